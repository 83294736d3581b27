"""The real trainer with the options of the loss, the advantage, the optimizer and the sampling."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from core_engine import (
    first_gradient,
    make_rows,
    open_engine,
    plain_logprobs,
    rates_of_updates,
    relative,
    tiny_model,
    weighted,
)
from small_runs.trained import (
    GROUP,
    PROMPTS,
    FinishedRun,
    steps_of,
    train_small_run,
    visited_in_order,
)

from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import LossSection
from grpo_replay.sampling.hf import HfSampler
from grpo_replay.tiny.problems import train_problems

GSPO = {"kind": "gspo", "aggregation": "sequence_mean"}
ONE_UPDATE = {"updates_per_step": 1}


# --- GSPO -----------------------------------------------------------------------------------------


def test_the_gradient_of_a_sequence_ratio_is_that_of_plain_autograd(processes):
    """In several micro-batches of several rows."""
    rows = weighted(make_rows(6), LossSection(**GSPO))
    batch = {"max_tokens_per_microbatch": 60}
    with open_engine(processes, loss=GSPO, batch=batch) as engine:
        result = engine.update(rows)
        assert 1 < result.micro_batches < len(rows)
        found = first_gradient(engine)
    model, total, clipped = tiny_model(), torch.zeros(()), []
    for row in rows:
        logprobs, _ = plain_logprobs(model, row)
        ratio = torch.exp((logprobs - torch.from_numpy(row.behavior_logprobs)).mean())
        a = row.coefficient
        surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        clipped.append(float(ratio > 1.28 if a > 0 else ratio < 0.8))
        total = total - surrogate / len(rows)
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert relative(found, expected) < 5e-6
    assert result.loss == pytest.approx(total.item(), rel=1e-5)
    assert [outcome.clip_fraction for outcome in result.outcomes] == clipped
    assert 0 < sum(clipped) < len(rows)


def test_a_run_with_a_sequence_ratio_clips_whole_rollouts_and_reports_the_kl(tmp_path, processes):
    """The reference is the initial policy, which the second of a step's two updates is no more."""
    loss = GSPO | {"epsilon": 0.01, "epsilon_high": 0.02, "beta": 0.05}
    run = train_small_run(tmp_path / "run", loss=loss, run={"steps": 4})
    assert all(0 < line["kl"] < 1 for line in run.metrics)
    checked = []
    for draw in run.all_draws:
        advantage = run.all_rollouts[draw["rollout_id"]]["advantage"]
        ratio = math.exp(draw["log_ratio_mean"])
        clipped = ratio > 1.02 if advantage > 0 else ratio < 0.99
        assert draw["clip_fraction"] == float(clipped)
        checked.append(clipped)
    assert 0 < sum(checked) < len(checked)


# --- Dr. GRPO -------------------------------------------------------------------------------------


def test_dr_grpo_divides_neither_by_sigma_nor_by_length(tmp_path, processes):
    run = train_small_run(
        tmp_path / "run",
        advantage={"std": "none"},
        loss={"aggregation": "constant"},
        batch=ONE_UPDATE,
        run={"steps": 3},
    )
    assert verify_run(run.path).passed
    for step in steps_of(run):
        survivors = run.survivors(step)
        for row in survivors:
            assert row["advantage"] == pytest.approx(row["reward"] - row["group_reward_mean"])
            assert row["group_reward_std"] > 0
        if step <= 2:  # the warm-up: nothing replayed, all ratios 1
            total = sum(row["advantage"] * row["tokens"] for row in survivors)
            expected = -total / (len(survivors) * run.recipe.sampling.max_completion_length)
            assert run.metrics[step - 1]["loss"] == pytest.approx(expected, abs=2e-5)


# --- truncated importance sampling ----------------------------------------------------------------


WEIGHTED = {
    "run": {"steps": 1}, "sampling": {"logprob_gap_limit": 0.1}, "batch": ONE_UPDATE,
    "replay": {"preset": "grpo"},
}  # fmt: skip


@contextmanager
def too_high() -> Iterator[None]:
    """A sampler whose log-probs are 0.05 too high."""
    original = HfSampler.generate

    def generate(sampler, requests):
        for completion in original(sampler, requests):
            completion.sampler_logprobs[:] += np.float32(0.05)
            yield completion

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HfSampler, "generate", generate)
        yield


@pytest.fixture(scope="module")
def unweighted(tmp_path_factory, processes) -> FinishedRun:
    with too_high():
        return train_small_run(tmp_path_factory.mktemp("plain") / "run", **WEIGHTED)


@pytest.mark.parametrize(
    "bounds, weight, bounded",
    [
        ({"high": 2}, math.exp(-0.05), 0),
        ({"low": 0.98}, 0.98, 1),
        ({"low": 0.98, "action": "mask"}, 0, 1),
    ],
)
def test_sampler_weights_scale_the_gradient(tmp_path, unweighted, bounds, weight, bounded):
    """All weights are e^-0.05, the bound, or 0."""
    with too_high():
        found = train_small_run(tmp_path / "run", **WEIGHTED, loss={"sampler_ratio": bounds})
    first, plain_first = found.metrics[0], unweighted.metrics[0]
    assert first["sampler/weight_mean"] == pytest.approx(weight, abs=1e-5)
    assert first["sampler/weight_capped_fraction"] == bounded
    assert first["grad_norm"] == pytest.approx(weight * plain_first["grad_norm"], rel=1e-4)
    assert "sampler/weight_mean" not in plain_first
    assert found.survivors(1)[0]["ratio_mean"] == pytest.approx(1, abs=1e-5)  # of the trainer


# --- masks by the ratio to the behaviour policy ---------------------------------------------------

UNCLIPPED = {"epsilon": 1 - 1e-9, "epsilon_high": 1e9, "dual_clip": None}


def far_run(path: Path, **loss) -> FinishedRun:
    """At a rate that moves ratios apart; without a mask nothing is clipped."""
    return train_small_run(
        path, loss={**UNCLIPPED, **loss}, optimizer={"learning_rate": 2e-4}, run={"steps": 5}
    )


def masked_draws(run: FinishedRun) -> list[tuple[dict, bool]]:
    """Each draw, and whether its advantage is negative."""
    return [(draw, run.all_rollouts[draw["rollout_id"]]["advantage"] < 0) for draw in run.all_draws]


def test_neutral_masks_train_the_same_bits(tmp_path, processes):
    plain, far = far_run(tmp_path / "plain"), {"low": 0.0, "high": 1e9}
    neutral = far_run(
        tmp_path / "neutral", ratio_mask=far, max_negative_kl=1e9, negative_veto=[0.0, 1e9]
    )
    assert [line["grad_norm"] for line in neutral.metrics] == [
        line["grad_norm"] for line in plain.metrics
    ]
    assert all(draw["clip_fraction"] == 0 for draw in plain.all_draws)


def test_a_run_masks_negative_rollouts_far_from_their_policy(tmp_path, processes):
    run = far_run(tmp_path / "run", max_negative_kl=0.01)
    expected = [
        float(negative and -draw["log_ratio_mean"] > 0.01) for draw, negative in masked_draws(run)
    ]
    assert [draw["clip_fraction"] for draw in run.all_draws] == expected
    assert 0 < sum(expected) < len(expected)
    assert verify_run(run.path).passed


@pytest.mark.slow
def test_a_run_masks_rollouts_by_the_product_of_their_ratios(tmp_path, processes):
    run = far_run(tmp_path / "run", ratio_mask={"level": "sequence", "high": 1.2})
    expected = [
        float(draw["log_ratio_mean"] * draw["tokens"] > math.log(1.2)) for draw in run.all_draws
    ]
    assert [draw["clip_fraction"] for draw in run.all_draws] == expected
    assert 0 < sum(expected) < len(expected)


@pytest.mark.slow
def test_a_run_with_a_veto_masks_parts_of_negative_rollouts_alone(tmp_path, processes):
    run = far_run(tmp_path / "run", negative_veto=[0.0, 1.02])
    found = [
        (draw["clip_fraction"], negative and draw["ratio_max"] > 1.02)
        for draw, negative in masked_draws(run)
    ]
    assert all(share < 1 and (may or share == 0) for share, may in found)
    assert sum(share > 0 for share, _ in found) >= 2


# --- the learning rate, and refills ---------------------------------------------------------------


def half_hopeless(folder: Path) -> dict:
    """Prompts of which every other one has an answer that nobody gives."""
    problems = train_problems()[::7][:200]
    for problem in problems[::2]:
        problem["answer"] = "never"
    return visited_in_order(folder / "problems.jsonl", problems)


def rounds_of(run: FinishedRun, step: int) -> list[int]:
    """How many prompts each round of the step took, by the rule of DAPO's refill."""
    rows = run.rollouts(step)
    kept = [row["kept"] for row in rows[::GROUP]]
    rounds = [PROMPTS]
    for _ in range(run.recipe.sampling.max_refills):
        missing = PROMPTS - sum(kept[: sum(rounds)])
        if missing == 0:
            break
        rounds.append(missing)
    return rounds


@pytest.fixture(scope="module")
def refilled(tmp_path_factory, processes) -> tuple[FinishedRun, list[float]]:
    """A run with refills and a schedule, two steps up, then linearly down; and the learning rate of
    every update, measured on the weights."""
    folder = tmp_path_factory.mktemp("refilled")
    with rates_of_updates() as measured:
        run = train_small_run(
            folder / "run", prompts=half_hopeless(folder), sampling={"max_refills": 2},
            optimizer={"learning_rate": 1e-3, "warmup_steps": 2, "schedule": "linear"},
            run={"steps": 4},
        )  # fmt: skip
    return run, measured


def test_updates_are_made_at_the_learning_rate_of_their_step(refilled):
    run, measured = refilled
    expected = [5e-4, 1e-3, 1e-3, 5e-4]
    assert [line["learning_rate"] for line in run.metrics] == pytest.approx(expected)
    updates = [line["updates"] for line in run.metrics]
    assert min(updates) > 0
    assert measured == pytest.approx(np.repeat(expected, updates).tolist(), rel=1e-3)


def test_dropped_groups_are_refilled_up_to_the_limit(refilled):
    run, taken = refilled[0], 0
    for step in steps_of(run):
        rows = run.rollouts(step)
        rounds = rounds_of(run, step)
        assert len(rows) == GROUP * sum(rounds)
        assert [row["rollout_id"] for row in rows] == list(
            range(taken * GROUP, (taken + sum(rounds)) * GROUP)
        )
        prompts = [row["prompt_id"] for row in rows[::GROUP]]
        assert prompts == [
            problem["problem_id"] for problem in train_problems()[::7][taken : taken + len(prompts)]
        ]
        taken += sum(rounds)
        survivors = sum(row["kept"] for row in rows[::GROUP])
        assert survivors <= PROMPTS
        assert survivors == PROMPTS or len(rounds) == 3
    state = json.loads((run.path / "checkpoints/latest/state.json").read_text())
    assert state["prompt_cursor"] == taken > 5 * PROMPTS
    assert state["next_rollout_id"] == taken * GROUP
    assert verify_run(run.path).passed
