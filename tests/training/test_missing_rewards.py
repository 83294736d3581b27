"""Rewards that did not come: a reward function that fails on a third of the completions trains the
weights of a run in which exactly these rollouts do not exist."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from missing_rewards import fails_on
from small_runs.trained import (
    FinishedRun,
    Listener,
    same_weights,
    small_recipe,
    steps_of,
    train_small_run,
)

from grpo_replay.errors import RewardError
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.inspection.views import read_life
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.replay.rollouts import assemble_rollouts
from grpo_replay.training.run import run_training
from grpo_replay.types import RequestKey

FAILING = {"function": "missing_rewards:boxed_unless_it_fails"}
SETTINGS = {"loss": {"behavior_logprobs": "sampler"}, "run": {"steps": 6}}


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener()


@pytest.fixture(scope="module")
def failing(tmp_path_factory, processes, listener) -> FinishedRun:
    path = tmp_path_factory.mktemp("missing") / "run"
    evaluation = {
        "benchmarks": ["tiny"], "samples": 2, "max_problems": 8, "at_start": False,
        "max_completion_length": 16, "reward": FAILING["function"],
    }  # fmt: skip
    recipe = small_recipe(reward=FAILING, eval=evaluation, **SETTINGS)
    run_training(recipe, path, False, listener)
    return FinishedRun(path, recipe)


def shorter_groups(prompts, graded, recipe, *, step, first_rollout_id, first_group_id):
    """`assemble_rollouts` of groups without the members on which the other run's function fails:
    each is a whole group of its own, smaller size."""
    size, rollouts = recipe.sampling.group_size, []
    for place, prompt in sorted(prompts.items()):
        keys = [RequestKey(step, place, i) for i in range(size)]
        there = [key for key in keys if not fails_on(graded[key].text, prompt.answer)]
        if len(there) < 2:
            continue
        sampling = recipe.sampling.model_copy(update={"group_size": len(there)})
        keys = [RequestKey(step, 0, i) for i in range(len(there))]
        renumbered = dict(zip(keys, there, strict=True))
        members = {
            key: graded[old]._replace(completion=replace(graded[old].completion, key=key))
            for key, old in renumbered.items()
        }
        of_group = assemble_rollouts(
            {0: prompt},
            members,
            recipe.model_copy(update={"sampling": sampling}),
            step=step,
            first_rollout_id=0,
            first_group_id=first_group_id + place,
        )
        rollouts += [
            replace(rollout, rollout_id=first_rollout_id + place * size + old.completion_index)
            for rollout, old in zip(of_group, there, strict=True)
        ]
    return rollouts


def test_the_weights_are_those_of_a_run_in_which_these_rollouts_do_not_exist(
    failing, tmp_path, monkeypatch
):
    monkeypatch.setattr("grpo_replay.training.synchronous.assemble_rollouts", shorter_groups)
    monkeypatch.setattr("grpo_replay.training.metrics.generation_metrics", lambda *_: {})
    other = train_small_run(
        tmp_path / "run", reward={"function": "missing_rewards:boxed"}, **SETTINGS
    )
    assert same_weights(failing.weights(), other.weights())
    for name in ("rollout_id", "probability"):
        assert [row[name] for row in failing.all_draws] == [row[name] for row in other.all_draws]
    gone = failing.all_rollouts.keys() - other.all_rollouts.keys()
    assert {i for i, row in failing.all_rollouts.items() if row["reward"] is None} <= gone
    share = np.mean([row["reward"] is None for row in failing.all_rollouts.values()])
    assert 0.25 < share < 0.45 and len(failing.all_draws) > 10


def test_the_log_keeps_the_row_and_nothing_trains_on_it_or_stores_it(failing):
    missing = {i: row for i, row in failing.all_rollouts.items() if row["reward"] is None}
    assert {row["verdict"] for row in missing.values()} == {"crash", "none"}
    assert not any(row["kept"] for row in missing.values())
    for name in ("advantage", "behavior_logprobs", "tokens"):
        assert all(row[name] is None for row in missing.values()), name
    assert not missing.keys() & {row["rollout_id"] for row in failing.all_draws}
    assert not missing.keys() & {r.rollout_id for r in failing.snapshot(6).rollouts}


def test_verify_agrees_and_finds_a_missing_reward_that_was_made_an_incorrect_one(failing, tmp_path):
    report = verify_run(failing.path)
    assert report.passed, [check for check in report.checks if not check.passed]
    changed = shutil.copytree(failing.path, tmp_path / "changed")
    path = changed / "rollouts/step_000002.parquet"
    table = pq.read_table(path)
    index = table.column_names.index("reward")
    filled = pc.fill_null(table["reward"], pa.scalar(-1.0, pa.float32()))
    pq.write_table(table.set_column(index, table.schema.field(index), filled), path)
    failed = {check.name for check in verify_run(changed).checks if not check.passed}
    assert {"kept flags", "group statistics", "metrics"} <= failed


def test_metrics_and_summary_show_the_share_and_a_notice_the_first_error(failing, listener):
    for step, line in zip(steps_of(failing), failing.metrics, strict=True):
        rewards = [row["reward"] for row in failing.rollouts(step)]
        assert line["reward/missing_fraction"] == pytest.approx(rewards.count(None) / len(rewards))
        assert line["reward"] == pytest.approx(np.mean([r for r in rewards if r is not None]))
        assert line.get("verdict/none", 0) + line.get("verdict/crash", 0) == rewards.count(None) > 0
    assert any("failed on" in each and "ConnectionError" in each for each in listener.notices)
    summary = json.loads((failing.path / "summary.json").read_text())
    share = np.mean([line["reward/missing_fraction"] for line in failing.metrics])
    assert summary["means"]["reward/missing_fraction"] == pytest.approx(share)


def test_inspect_buffer_shows_such_a_rollout(failing):
    missing = [i for i, row in failing.all_rollouts.items() if row["reward"] is None]
    assert "reward is missing" in read_life(open_source(failing.path), missing[0]).fate


def test_an_evaluation_counts_such_completions_as_not_correct_and_says_so(failing):
    report = read_report(failing.path / "eval/step_000006.json")
    rows = report.samples.to_pylist()
    missing = [row for row in rows if row["verdict"] in ("crash", "none")]
    assert len(missing) > 10 and not any(row["correct"] for row in missing)
    assert f"{len(missing)} of {len(rows)} completions" in report.missing_verdicts()


def test_above_the_limit_the_run_ends(tmp_path, processes):
    with pytest.raises(RewardError, match=r"step 1: .*reward\.max_failed_share 0\.1") as seen:
        train_small_run(tmp_path / "run", reward={**FAILING, "max_failed_share": 0.1})
    assert seen.value.exit_code == 4
