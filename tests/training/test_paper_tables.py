"""What a run writes for paper A's tables: real runs, recounted from their rollouts."""

import json
from math import ceil

import numpy as np
import pytest
from small_runs.trained import GROUP, FinishedRun, train_small_run

from grpo_replay.engine.models import load_tokenizer
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.recipe import ModelSection

SIZE = 14


@pytest.fixture(scope="module")
def replay_run(tmp_path_factory, processes) -> FinishedRun:
    """Replay with mini-batches of a literal size, stopping at the brace, graded twice."""
    return train_small_run(
        tmp_path_factory.mktemp("replay") / "run",
        run={"steps": 8},
        batch={"mini_batch_rollouts": SIZE},
        sampling={"stop_tokens": ["}"]},
        eval={
            "benchmarks": ["tiny_add"], "max_problems": 4, "samples": 2, "at_start": False,
            "reward": "minerva",
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory, processes) -> FinishedRun:
    return train_small_run(
        tmp_path_factory.mktemp("grpo") / "run",
        run={"steps": 8},
        batch={"mini_batch_rollouts": SIZE},
        replay={"preset": "grpo"},
    )


def summary(run: FinishedRun) -> dict:
    return json.loads((run.path / "summary.json").read_text())


def test_shares_of_all_correct_and_all_wrong_groups_are_those_of_the_rollouts(replay_run):
    seen = set()
    for line in replay_run.metrics:
        rewards = np.array([row["reward"] for row in replay_run.rollouts(line["step"])])
        groups = rewards.reshape(-1, GROUP)
        assert line["groups/all_correct_fraction"] == np.mean((groups == 1).all(axis=1))
        assert line["groups/all_wrong_fraction"] == np.mean((groups == -1).all(axis=1))
        dropped = line["groups/all_correct_fraction"] + line["groups/all_wrong_fraction"]
        assert line["frac_reward_zero_std"] == pytest.approx(dropped)
        seen |= {line["groups/all_correct_fraction"], line["groups/all_wrong_fraction"]}
    assert len(seen) > 2


def test_the_summary_has_the_means_over_the_run(replay_run):
    means = summary(replay_run)["means"]
    assert set(means) == {
        *("fresh/rollouts", "fresh/clip_fraction", "replay/clip_fraction"),
        *("groups/all_correct_fraction", "groups/all_wrong_fraction"),
        "reward/missing_fraction",
    }
    for name, mean in means.items():
        defined = [line[name] for line in replay_run.metrics if line[name] is not None]
        assert mean == pytest.approx(sum(defined) / len(defined)), name
    replayed = [line["replay/clip_fraction"] for line in replay_run.metrics]
    assert replayed[:2] == [None, None], "the warm-up replays nothing, and does not count as 0"
    assert means["replay/clip_fraction"] > 0


def test_without_replay_there_is_no_mean_of_its_clipping(grpo_run):
    means = summary(grpo_run)["means"]
    assert means["replay/clip_fraction"] is None and means["fresh/rollouts"] > 0


def test_mini_batches_of_a_literal_size_give_replay_more_updates_than_grpo(replay_run, grpo_run):
    for run in (replay_run, grpo_run):
        for line in run.metrics:
            assert line["updates"] == ceil(line["cost/trained_rollouts"] / SIZE)
    # Of 24 rollouts 12 survive in many steps, as 113 of 256 do: with the draw they are 18, or 169.
    updates = [
        {line["updates"] for line in run.metrics[2:] if line["fresh/rollouts"] == 12}
        for run in (replay_run, grpo_run)
    ]
    assert updates == [{2}, {1}]


def test_training_ends_completions_at_the_recipes_stop_token_and_says_so(replay_run):
    brace = load_tokenizer(ModelSection()).convert_tokens_to_ids("}")
    ends = [
        row["completion_token_ids"][-1]
        for row in replay_run.all_rollouts.values()
        if row["finish_reason"] == "stop"
    ]
    assert len(ends) > 100 and set(ends) == {brace}
    log = "".join(path.read_text() for path in (replay_run.path / "log").glob("*"))
    assert f"completions end at }} ({brace}); sampling.stop_tokens chooses others" in log


def test_a_runs_evaluation_names_its_verifier_and_its_stop_tokens(replay_run):
    report = read_report(replay_run.path / "eval/step_000008.json")
    assert report.verifier == "minerva"
    assert report.settings["stop_tokens"] == ["}"]
