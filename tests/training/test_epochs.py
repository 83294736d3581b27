"""Several passes over the fresh batch (`batch.epochs`), by the real trainer."""

import numpy as np
import pytest
import torch
from core_engine import plain_logprobs
from small_runs.trained import (
    FinishedRun,
    interrupted,
    policy_at,
    row_of,
    same_files,
    same_weights,
    small_recipe,
    spied_updates,
    train_small_run,
)

from grpo_replay.errors import RecipeError
from grpo_replay.lab.verification.verify import verify_run

PLAIN = {"preset": "grpo"}
STEPS = {"run": {"steps": 4}, "checkpoint": {"every_steps": 1, "keep": 10}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, processes) -> tuple[FinishedRun, FinishedRun]:
    """(one pass, two passes) of one update each."""
    folder = tmp_path_factory.mktemp("epochs")
    one, two = (
        train_small_run(
            folder / str(epochs),
            replay=PLAIN,
            batch={"updates_per_step": 1, "epochs": epochs},
            **STEPS,
        )
        for epochs in (1, 2)
    )
    return one, two


def test_the_second_pass_has_the_log_probs_of_birth_under_the_policy_of_the_first(runs):
    """The first step starts from the base in both runs, so the run of one pass has the policy that
    the second pass meets."""
    one, two = runs
    after_one_update, moved = policy_at(one, 1), 0
    for row, single in zip(two.survivors(1), one.survivors(1), strict=True):
        assert row["completion_token_ids"] == single["completion_token_ids"]
        assert row["behavior_logprobs"] == single["behavior_logprobs"]
        with torch.no_grad():
            now = plain_logprobs(after_one_update, row_of(row))[0].double().numpy()
        log_ratios = now - np.array(row["behavior_logprobs"], np.float64)
        assert row["log_ratio_mean"] == pytest.approx(log_ratios.mean(), abs=2e-5)
        assert single["log_ratio_mean"] == pytest.approx(0, abs=2e-5)
        moved += abs(log_ratios.mean()) > 1e-3
    assert moved > 3
    assert not same_weights(one.weights(1), two.weights(1))


def test_updates_tokens_and_rollouts_are_counted_in_every_pass(runs):
    for epochs, run in enumerate(runs, 1):
        tokens = 0
        for step, line in enumerate(run.metrics, 1):
            survivors = run.survivors(step)
            tokens += epochs * sum(len(row["completion_token_ids"]) for row in survivors)
            assert line["updates"] == epochs
            assert line["fresh/rollouts"] == len(survivors) > 0
            assert line["cost/trained_rollouts"] == epochs * len(survivors)
        assert tokens == sum(line["cost/trained_tokens"] for line in run.metrics)
        assert f'"trained_tokens": {tokens},' in (run.path / "summary.json").read_text()
        assert verify_run(run.path).passed


def test_a_pass_takes_every_rollout_once_and_the_next_in_another_order(tmp_path, processes):
    with spied_updates() as updates:
        run = train_small_run(
            tmp_path / "run",
            replay=PLAIN,
            batch={"updates_per_step": 2, "epochs": 3},
            sampling={"prompts_per_step": 20},
            run={"steps": 1},
        )
    ids = [[row.rollout_id for row in rows] for rows in updates]
    assert len(ids) == 6
    born = sorted(row["rollout_id"] for row in run.survivors(1))
    passes = [ids[first] + ids[first + 1] for first in (0, 2, 4)]
    assert [sorted(each) for each in passes] == [born] * 3
    assert len({tuple(each) for each in passes}) == 3


@pytest.mark.slow
def test_a_run_with_passes_that_died_and_is_resumed_is_the_run_that_did_not(tmp_path, runs):
    sections = {"replay": PLAIN, "batch": {"updates_per_step": 1, "epochs": 2}, **STEPS}
    interrupted(tmp_path / "run", 3, **sections)
    resumed = train_small_run(tmp_path / "run", resume=True, **sections)
    whole = runs[1]
    assert resumed.timeless_metrics == whole.timeless_metrics
    assert same_files(whole.path, resumed.path, "rollouts") == 4
    assert same_weights(whole.weights(4), resumed.weights(4))


def test_passes_with_replay_are_refused_and_beside_a_shadow_are_those_without(tmp_path, runs):
    shadow = {"shadow": True, "warmup_steps": 1}
    batch = {"updates_per_step": 1, "epochs": 2}
    run = train_small_run(tmp_path / "run", replay=shadow, batch=batch, **STEPS)
    assert same_weights(run.weights(4), runs[1].weights(4))
    assert len(run.all_draws) > 10 and verify_run(run.path).passed
    with pytest.raises(RecipeError, match=r"batch\.epochs 2 with replay\.preset 'ours'"):
        small_recipe(batch={"epochs": 2})
