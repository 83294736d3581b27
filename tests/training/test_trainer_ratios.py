"""The real trainer: behaviour log-probs and the ratios that follow from them."""

import numpy as np
import pytest
import torch
from core_engine import plain_logprobs
from small_runs.trained import (
    WARMUP,
    policy_at,
    row_of,
    same_weights,
    small_recipe,
    steps_of,
    train_small_run,
)

from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
from grpo_replay.engine.models import load_policy
from grpo_replay.engine.policy_module import PolicyModule
from grpo_replay.engine.weights import named_weights
from grpo_replay.errors import LogprobGapError
from grpo_replay.sampling.hf import HfSampler


def test_behaviour_log_probs_are_those_of_the_policy_that_sampled(one_update_run):
    run = one_update_run
    for step in (1, 5, 12):
        model = policy_at(run, step - 1)
        for row in run.survivors(step):
            assert row["policy_version"] == row["policy_version_end"] == step - 1
            with torch.no_grad():
                expected = plain_logprobs(model, row_of(row))[0].numpy()
            assert np.abs(np.array(row["behavior_logprobs"]) - expected).max() < 2e-5
            assert np.abs(np.array(row["sampler_logprobs"]) - expected).max() < 2e-5


def test_the_ratio_of_a_fresh_rollout_before_any_update_is_one(one_update_run):
    checked = 0
    for step in steps_of(one_update_run):
        for row in one_update_run.survivors(step):
            assert abs(row["ratio_max"] - 1) < 2e-5
            assert abs(row["ratio_mean"] - 1) < 2e-5
            assert row["clip_fraction"] == 0
            checked += 1
    assert checked > 50


def test_with_one_mini_batch_the_replayed_ratio_is_policy_over_birth_policy(one_update_run):
    """The trap: `log_prob.detach()` as the old log-prob, or one recomputed at replay, gives 1."""
    run, differ = one_update_run, 0
    for step in steps_of(run):
        if not run.draws(step):
            continue
        model = policy_at(run, step - 1)
        for draw in run.draws(step):
            born = run.all_rollouts[draw["rollout_id"]]
            with torch.no_grad():
                now = plain_logprobs(model, row_of(born))[0].double().numpy()
            log_ratios = now - np.array(born["behavior_logprobs"], np.float64)
            assert draw["log_ratio_mean"] == pytest.approx(log_ratios.mean(), abs=2e-5)
            assert draw["log_ratio_var"] == pytest.approx(log_ratios.var(), rel=1e-3, abs=1e-6)
            assert draw["ratio_max"] == pytest.approx(np.exp(log_ratios).max(), rel=1e-4)
            k3 = np.exp(log_ratios) - 1 - log_ratios
            assert draw["approx_kl"] == pytest.approx(k3.mean(), rel=1e-3, abs=1e-6)
            differ += np.abs(log_ratios).max() > 1e-2
    assert differ > 20


def test_with_two_mini_batches_the_replayed_ratio_differs_from_one(ours_run):
    moved = [abs(draw["log_ratio_mean"]) for draw in ours_run.all_draws]
    assert np.median(moved) > 1e-3
    assert sum(draw["clip_fraction"] > 0 for draw in ours_run.all_draws) > 5


def test_stored_rollouts_never_change(ours_run):
    """Behaviour log-probs, advantages, tokens: bit for bit those of birth, in every snapshot."""
    older = 0
    for step in (3, 6, 9, 12):
        for stored in ours_run.snapshot(step).rollouts:
            born = ours_run.all_rollouts[stored.rollout_id]
            older += stored.birth_step < step
            behavior = np.array(born["behavior_logprobs"], np.float32)
            assert stored.behavior_logprobs.tobytes() == behavior.tobytes()
            sampler = np.array(born["sampler_logprobs"], np.float32)
            assert stored.sampler_logprobs.tobytes() == sampler.tobytes()
            assert stored.completion_token_ids.tolist() == born["completion_token_ids"]
            for name in ("advantage", "reward", "group_reward_mean", "group_reward_std",
                         "birth_step", "policy_version", "group_correct", "prompt_id"):  # fmt: skip
                assert getattr(stored, name) == born[name]
    assert older > 20


def nudged(monkeypatch: pytest.MonkeyPatch, nats: float) -> None:
    """Make the sampler report log-probs that are off by `nats`."""
    original = HfSampler.generate

    def generate(sampler, requests):
        for completion in original(sampler, requests):
            completion.sampler_logprobs[:] += np.float32(nats)
            yield completion

    monkeypatch.setattr(HfSampler, "generate", generate)


def test_sampler_log_probs_play_no_part_in_a_loss_anchored_at_the_trainers(
    tmp_path, processes, monkeypatch, ours_run
):
    """No truncated importance weight on top of the behaviour-anchored ratio."""
    nudged(monkeypatch, 0.05)
    shifted = train_small_run(
        tmp_path / "shifted", run={"steps": 6}, sampling={"logprob_gap_limit": 0.1}
    )
    for a, b in zip(ours_run.timeless_metrics, shifted.timeless_metrics, strict=False):
        gaps = {name for name in a if a[name] != b[name]}
        assert gaps == {"sampler/logprob_gap_mean", "sampler/logprob_gap_max"}
        assert b["sampler/logprob_gap_mean"] == pytest.approx(0.05, abs=1e-4)
    assert sum(line["replay/rollouts"] for line in shifted.metrics) > 0
    assert same_weights(ours_run.weights(6), shifted.weights(6))


def test_sampler_log_probs_are_the_behaviour_if_the_recipe_says_so(
    tmp_path, processes, monkeypatch
):
    nudged(monkeypatch, -0.05)
    run = train_small_run(
        tmp_path / "run",
        loss={"behavior_logprobs": "sampler"},
        batch={"updates_per_step": 1},
        run={"steps": 3},
        sampling={"logprob_gap_limit": 0.1},
    )
    for step in steps_of(run):
        for row in run.survivors(step):
            assert row["behavior_logprobs"] == row["sampler_logprobs"]
            assert row["log_ratio_mean"] == pytest.approx(0.05, abs=1e-4)


def test_a_sampler_at_another_temperature_than_the_trainer_is_refused(
    tmp_path, processes, monkeypatch
):
    """Log-probs of raw logits against those of the distribution sampled from."""
    sections = {
        "sampling": {"temperature": 0.6}, "run": {"steps": 2}, "replay": {"preset": "grpo"},
    }  # fmt: skip
    run = train_small_run(tmp_path / "right", **sections)
    assert max(line["sampler/logprob_gap_max"] for line in run.metrics) < 1e-4

    def wrap(engine, model):
        return PolicyModule(model, 1.0, 1024)

    monkeypatch.setattr(DeepSpeedEngine, "_wrap", wrap)
    with pytest.raises(LogprobGapError):
        train_small_run(tmp_path / "wrong", **sections)


def test_a_sampler_that_misses_an_update_is_refused(tmp_path, processes, monkeypatch):
    base = dict(named_weights(load_policy(small_recipe().model, 0)))

    def push_the_base(engine, sampler, version, *_):
        sampler.load_weights(iter(base.items()), version)

    monkeypatch.setattr("grpo_replay.training.synchronous.sync_weights", push_the_base)
    with pytest.raises(LogprobGapError, match="weight sync"):
        train_small_run(tmp_path / "run", optimizer={"learning_rate": 3e-2})


def test_the_loss_of_a_first_update_is_minus_the_mean_advantage(one_update_run):
    """With every ratio 1 and nothing replayed, the token mean of -ρA."""
    for step in range(1, WARMUP + 1):
        rows = one_update_run.survivors(step)
        tokens = sum(row["tokens"] for row in rows)
        expected = -sum(row["advantage"] * row["tokens"] for row in rows) / tokens
        assert one_update_run.metrics[step - 1]["loss"] == pytest.approx(expected, abs=2e-5)
