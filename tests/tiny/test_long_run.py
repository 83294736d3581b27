"""A short real run of the tiny-long recipe."""

import pytest
from small_runs.trained import FinishedRun

from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.estimate import estimate_from_run
from grpo_replay.recipe import load_recipe
from grpo_replay.training import Observer
from grpo_replay.training.run import run_training

SHORT = ["run.steps=4", "eval.benchmarks=[]", "reward.workers=1", "replay.warmup_steps=2"]


@pytest.mark.slow
def test_a_short_run_samples_graded_completions_of_two_hundred_tokens_and_replays(tmp_path):
    recipe = load_recipe("tiny-long", SHORT)
    run_training(recipe, tmp_path / "run", False, Observer())
    run = FinishedRun(tmp_path / "run", recipe)
    rows = list(run.all_rollouts.values())
    assert len(rows) == 4 * recipe.rollouts_per_step
    assert sum(row["finish_reason"] == "stop" for row in rows) > 0.95 * len(rows)
    assert {row["verdict"] for row in rows} <= {"correct", "incorrect", "unparsable"}
    assert 0.1 < sum(row["verdict"] == "correct" for row in rows) / len(rows) < 0.8
    assert run.all_draws
    assert estimate_from_run(open_source(run.path)).mu is not None
    lengths = [len(row["completion_token_ids"]) for row in rows]
    assert 180 < sum(lengths) / len(lengths) < 240
