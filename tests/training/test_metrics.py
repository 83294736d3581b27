"""What a step reports: definitions by hand, and recounted from the files of runs."""

import math
from dataclasses import replace

import buffer_makers
import numpy as np
import pytest

from grpo_replay.engine import UpdateResult
from grpo_replay.recipe import LossSection, SamplerRatio
from grpo_replay.replay import BufferStats
from grpo_replay.replay.insertion import entries_of
from grpo_replay.training.asynchronous import sampled_only_by
from grpo_replay.training.metrics import (
    GENERATION,
    age_bin,
    batch_metrics,
    buffer_metrics,
    cost_metrics,
    depends_on_time,
    generation_metrics,
    ratio_ess,
    sampler_weight_metrics,
    score_metrics,
    update_metrics,
)
from grpo_replay.training.weight_sync import gap_sample, measure_gap
from grpo_replay.types import ComposedBatch, Draw, Rollout, RolloutOutcome


def make_rollout(
    i: int, tokens: int, reward: float | None = 1.0, std: float | None = 1.0, **changes
) -> Rollout:
    """In groups of two, with -1 as the sampler's log-prob of each token."""
    made = buffer_makers.make_rollout(i, group_id=i // 2, tokens=tokens, kept=bool(std))
    logprobs = np.full(tokens, -1.0, np.float32)
    own = {"reward": reward, "group_reward_std": std, "sampler_logprobs": logprobs}
    return replace(made, **{**own, **changes})


def test_generation_metrics_by_hand():
    rollouts = [
        make_rollout(0, 4),
        make_rollout(1, 8, reward=-1.0, verdict="incorrect", finish_reason="length"),
        make_rollout(2, 1, std=0.0, group_correct=2),
        make_rollout(3, 7, std=0.0, group_correct=2),
    ]
    assert generation_metrics(rollouts, group_size=2) == {
        "reward": 0.5,
        "reward_std": 0.5,
        "reward/missing_fraction": 0.0,
        "frac_reward_zero_std": 0.5,
        "groups/all_correct_fraction": 0.5,
        "groups/all_wrong_fraction": 0.0,
        "completions/mean_length": 5.0,
        "completions/min_length": 1,
        "completions/max_length": 8,
        "completions/clipped_ratio": 0.25,
        "verdict/correct": 3,
        "verdict/incorrect": 1,
    }


def test_rewards_that_did_not_come_count_only_in_their_share():
    """Three groups of two: one with both rewards, one with one of them, one with none."""
    none = {"reward": None, "verdict": "crash"}
    alone = {"std": None, "group_reward_mean": None, "kept": False}
    rollouts = [
        make_rollout(0, 4, group_correct=2, std=0.0),
        make_rollout(1, 4, group_correct=2, std=0.0),
        make_rollout(2, 4, reward=-1.0, group_correct=0, **alone),
        *(make_rollout(i, 4, group_correct=0, **{**none, **alone}) for i in (3, 4, 5)),
    ]
    line = generation_metrics(rollouts, group_size=2)
    assert line["reward"] == pytest.approx(1 / 3) and line["reward_std"] == 0
    assert line["reward/missing_fraction"] == 0.5 and line["verdict/crash"] == 3
    assert line["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert line["groups/all_correct_fraction"] == line["groups/all_wrong_fraction"] == 0.5
    empty = generation_metrics(rollouts[4:], group_size=2)
    assert empty["reward/missing_fraction"] == 1
    names = ("reward", "reward_std", "frac_reward_zero_std")
    names += ("groups/all_correct_fraction", "groups/all_wrong_fraction")
    assert [empty[name] for name in names] == [None] * 5
    nothing = generation_metrics([], group_size=2)
    assert nothing.keys() == set(GENERATION) and set(nothing.values()) == {None}


def test_update_metrics_by_hand():
    results = [
        UpdateResult((), 0.5, 2.0, 0.1, 3, 0.2, 1e-3),
        UpdateResult((), -0.4, 1.0, 0.3, 2, 0.4, 2e-3),
        UpdateResult((), 0.2, 6.0, 0.2, 4, 0.0, 3e-3),
    ]
    assert update_metrics(results, beta=0.04) == {
        "updates": 3, "micro_batches": 9, "loss": pytest.approx(0.1), "grad_norm": 3.0,
        "kl": pytest.approx(0.2), "padding_share": pytest.approx(0.2), "learning_rate": 3e-3,
    }  # fmt: skip
    assert update_metrics(results, beta=0.0)["kl"] is None
    assert update_metrics([], beta=0.04) == {
        "updates": 0, "micro_batches": 0, "loss": None, "grad_norm": None, "kl": None,
        "padding_share": None, "learning_rate": None,
    }  # fmt: skip


SECONDS = {
    "generation": 12.0, "reward": 1.0, "logprob": 2.0, "training": 3.0, "sync": 0.5, "other": 0.5,
    "step": 19.0,
}  # fmt: skip


def test_the_ledger_by_hand():
    """μ: 4 generated in 12 s, 6 trained in 3 s -> 3 s / 0.5 s = 6; γ = (1 + 6·4/6) / (1 + 6)."""
    generated = [make_rollout(i, 10) for i in range(4)]
    trained = [make_rollout(i, 5) for i in range(6)]
    found = cost_metrics(SECONDS, SECONDS["generation"], generated, trained)
    assert found["cost/mu"] == pytest.approx(6.0)
    assert found["cost/gamma"] == pytest.approx(5 / 7)
    assert found["cost/generated_tokens"] == 40
    assert found["cost/trained_tokens"] == 30
    assert found["cost/generated_rollouts"] == 4
    assert found["cost/trained_rollouts"] == 6
    assert found["step_time"] == 19.0
    parts = [value for name, value in found.items() if name.endswith("_seconds")]
    assert sum(parts) == found["step_time"]


def ledger(generated: int, kept: int, trained: int) -> dict:
    made = [make_rollout(i, 3, std=1.0 if i < kept else 0.0) for i in range(generated)]
    return cost_metrics(
        SECONDS, SECONDS["generation"], made, [make_rollout(i, 3) for i in range(trained)]
    )


def test_plain_grpo_costs_one_however_many_groups_are_dropped():
    for kept in (2, 6, 8):
        assert ledger(generated=8, kept=kept, trained=kept)["cost/gamma"] == pytest.approx(1.0)


def test_gamma_is_paper_b_s_cost_of_b_drawn_and_r_generated():
    """c = B + μR in units of training on one rollout; without a buffer R = B."""
    for drawn in (2, 8, 40):
        found = ledger(generated=8, kept=8, trained=drawn)
        mu = found["cost/mu"]
        assert found["cost/gamma"] == pytest.approx((drawn + mu * 8) / (drawn + mu * drawn))


def test_without_survivors_there_is_no_gamma():
    found = ledger(generated=8, kept=0, trained=8)  # buffer_only still draws
    assert found["cost/mu"] is not None and found["cost/gamma"] is None


@pytest.mark.parametrize(
    ("seconds", "generation", "generated", "trained"),
    [(SECONDS, 12.0, 1, 0), (SECONDS, 12.0, 0, 1), (SECONDS, None, 1, 1),
     ({**SECONDS, "training": 0.0}, 12.0, 1, 1)],
    ids=["nothing trained", "nothing generated", "unknown", "no time"],
)  # fmt: skip
def test_without_its_parts_there_is_no_mu(seconds, generation, generated, trained):
    rollouts = [make_rollout(0, 3)]
    found = cost_metrics(seconds, generation, rollouts[:generated], rollouts[:trained])
    assert found["cost/mu"] is found["cost/gamma"] is None


def outcome(tokens: int, number: float) -> RolloutOutcome:
    """Whose quantities are the number, and parts of it."""
    return RolloutOutcome(
        tokens=tokens, clip_fraction=number / 2, log_ratio_mean=0.0, log_ratio_var=0.0,
        approx_kl=number / 4, ratio_mean=number, ratio_squared_mean=2 * number**2,
        ratio_max=2 * number, entropy=3 * number,
    )  # fmt: skip


def test_batch_metrics_by_hand():
    """One fresh rollout of one token, and three replayed ones of 1, 3 and 1 tokens, of ages 4, 2
    and 3; token means are over tokens."""
    rollouts = [make_rollout(i, 3, advantage=a) for i, a in enumerate([1.0, 0.5, -1.0, 0.0])]
    entries = tuple(entries_of(rollouts))
    draw = Draw(entries[1:], np.ones(3), np.array([4, 2, 3]), 2.5, 0.7)
    batch = ComposedBatch(
        entries, np.array([False, True, True, True]), np.array([0, 4, 2, 3]), draw
    )
    outcomes = [outcome(1, 1.0), outcome(1, 8.0), outcome(3, 4.0), outcome(1, 2.0)]
    found = batch_metrics(batch, outcomes, fresh_rollouts=2)
    assert found == {
        "entropy": pytest.approx(3 * 23 / 6),
        "fresh/rollouts": 2, "fresh/clip_fraction": 0.5, "fresh/ratio_mean": 1.0,
        "fresh/ratio_ess": 0.5, "fresh/ratio_max": 2.0, "fresh/approx_kl": 0.25,
        "replay/rollouts": 3, "replay/ratio": 1.5, "replay/clip_fraction": pytest.approx(2.2),
        "replay/ratio_mean": pytest.approx(4.4), "replay/ratio_max": 16.0,
        "replay/ratio_ess": pytest.approx(22**2 / (5 * 2 * (8**2 + 3 * 4**2 + 2**2))),
        "replay/approx_kl": pytest.approx(1.1), "replay/age_mean": 3.0, "replay/age_max": 4,
        "replay/ess": 2.5, "replay/draw_entropy": 0.7,
        "replay/positive_fraction": pytest.approx(1 / 3),
        "replay/age_2/clip_fraction": 2.0, "replay/age_2/ratio_mean": 4.0,
        "replay/age_2/approx_kl": 1.0, "replay/age_2/ratio_ess": 0.5,
        "replay/age_3-4/clip_fraction": 2.5, "replay/age_3-4/ratio_mean": 5.0,
        "replay/age_3-4/approx_kl": 1.25,
        "replay/age_3-4/ratio_ess": pytest.approx(10**2 / (2 * 2 * (8**2 + 2**2))),
    }  # fmt: skip
    assert list(found).index("replay/age_2/approx_kl") < list(found).index(
        "replay/age_3-4/clip_fraction"
    )


def test_in_shadow_what_a_pool_draws_of_the_fresh_rollouts_is_not_replayed():
    entries = tuple(entries_of([make_rollout(i, 3, advantage=1.0) for i in range(3)]))
    draw = Draw(entries, np.ones(3), np.array([0, 2, 0]), 2.5, 0.7)
    batch = ComposedBatch(entries[:1], np.zeros(1, bool), np.zeros(1, int), draw, False)
    probe = {0: outcome(1, 4.0), 1: outcome(1, 8.0)}
    found = batch_metrics(batch, [outcome(1, 1.0)], fresh_rollouts=2, probe=probe)
    names = ("replay/rollouts", "replay/age_mean", "replay/ratio_mean")
    assert [found[name] for name in names] == [1, 2.0, 8.0]


def test_metrics_of_a_batch_without_rollouts_are_null():
    nothing = ComposedBatch((), np.zeros(0, bool), np.zeros(0, int), Draw.empty())
    found = batch_metrics(nothing, [], fresh_rollouts=3)
    assert {name: value for name, value in found.items() if value is not None} == {
        "fresh/rollouts": 3, "replay/rollouts": 0, "replay/ratio": 0.0,
    }  # fmt: skip


def test_ages_in_the_buffer_are_counted_at_the_last_draw():
    """Ages of 2 and 4 steps; in a step of three draws the last one is 6 + 2 and 12 + 2 later."""
    stats = BufferStats(
        rollouts=9,
        age_mean=2.0,
        age_max=4,
        priority_mean=0.5,
        times_used_mean=1.5,
        evicted=5,
        evicted_undrawn=2,
        evicted_by_capacity=0,
    )
    shared = {
        "buffer/rollouts": 9, "buffer/evicted": 5, "buffer/priority_mean": 0.5,
        "buffer/times_used_mean": 1.5,
    }  # fmt: skip
    assert buffer_metrics(stats) == {**shared, "buffer/age_mean": 2.0, "buffer/age_max": 4}
    assert buffer_metrics(stats, 3) == {**shared, "buffer/age_mean": 8.0, "buffer/age_max": 14}
    empty = buffer_metrics(BufferStats(0, None, None, None, None, 0, 0, 0), 3)
    assert (empty["buffer/age_mean"], empty["buffer/age_max"]) == (None, None)


def test_scores_of_the_rollouts_whose_reward_came():
    rollouts = [
        make_rollout(0, 3, reward_scores=(1.0, 0.5)),
        make_rollout(1, 3, reward=None, reward_scores=()),
        make_rollout(2, 3, reward_scores=(-1.0, 0.1)),
    ]
    assert score_metrics(rollouts, ["a", "b"]) == {
        "rewards/a/mean": 0.0, "rewards/a/std": 1.0,
        "rewards/b/mean": pytest.approx(0.3), "rewards/b/std": pytest.approx(0.2),
    }  # fmt: skip
    assert score_metrics(rollouts[1:2], ["a", "b"]) == score_metrics([], ["a", "b"]) == {}
    assert score_metrics([make_rollout(0, 3)], ["a"]) == {}


def test_ratio_ess_by_hand():
    """Two tokens with ratios 1 and 3: 16 / (2 * 10). One more rollout, three tokens of 1: 49/65."""
    first = replace(outcome(2, 2.0), ratio_squared_mean=5.0)
    second = replace(outcome(3, 1.0), ratio_squared_mean=1.0)
    assert ratio_ess([first]) == pytest.approx(0.8)
    assert ratio_ess([first, second]) == pytest.approx(49 / 65)
    assert ratio_ess([]) is None


def test_weights_of_the_sampler_by_hand():
    """Two tokens, e^0.5 and e^2: the second is capped at 2."""
    rollout = make_rollout(0, 2, behavior_logprobs=np.array([-0.5, 1.0], np.float32))
    capped = LossSection(sampler_ratio=SamplerRatio(high=2.0))
    assert sampler_weight_metrics([rollout], capped) == {
        "sampler/weight_mean": pytest.approx((math.exp(0.5) + 2) / 2, rel=1e-6),
        "sampler/weight_capped_fraction": 0.5,
    }
    masked = replace(rollout, completion_mask=np.array([True, False]))
    one = {"sampler/weight_mean": pytest.approx(math.exp(0.5)), "sampler/weight_capped_fraction": 0}
    assert sampler_weight_metrics([masked], capped) == one
    assert set(sampler_weight_metrics([], capped).values()) == {None}
    assert sampler_weight_metrics([rollout], LossSection()) == {}


@pytest.mark.parametrize(
    "age, name",
    [(0, "0"), (1, "1"), (2, "2"), (3, "3-4"), (4, "3-4"), (5, "5-8"), (8, "5-8"), (65, "65-128")],
)
def test_age_bins_double(age, name):
    assert age_bin(age) == name


def test_time_dependent_names_are_those_of_clocks(ours_run):
    found = {name for line in ours_run.metrics for name in line if depends_on_time(name)}
    assert found == {
        "step_time", "cost/mu", "cost/gamma", "cost/generation_seconds", "cost/reward_seconds",
        "cost/logprob_seconds", "cost/training_seconds", "cost/sync_seconds",
        "cost/other_seconds",
    }  # fmt: skip


def test_stage_seconds_add_up_to_the_step(ours_run):
    for line in ours_run.metrics:
        parts = sum(value for name, value in line.items() if name.endswith("_seconds"))
        assert parts == pytest.approx(line["step_time"], rel=1e-6)


# --- the log-prob gap ------------------------------------------------------------------------


def test_the_gap_is_measured_on_every_survivor_and_on_at_least_64_rollouts():
    rollouts = [make_rollout(i, 2, kept=i % 4 == 0) for i in range(200)]
    sample = gap_sample(rollouts)
    assert len(sample) == 64
    assert {r.rollout_id for r in rollouts if r.kept} <= {r.rollout_id for r in sample}
    assert len({r.rollout_id for r in sample}) == 64
    few = [make_rollout(i, 2, kept=i == 3) for i in range(10)]
    assert gap_sample(few) == few
    many = [make_rollout(i, 2, kept=i < 90) for i in range(100)]
    assert gap_sample(many) == many[:90]


def test_with_the_sampler_s_log_probs_frozen_64_rollouts_prove_the_sync():
    rollouts = [make_rollout(i, 2, kept=i < 150) for i in range(256)]
    sample = gap_sample(rollouts, every_survivor=False)
    assert [r.rollout_id for r in sample] == list(range(0, 256, 4))
    assert gap_sample(rollouts[:10], every_survivor=False) == rollouts[:10]


@pytest.mark.parametrize("others", [(2, 3), (3, 4), (2, 4), (2, 2), (4, 4)])
def test_an_asynchronous_gap_is_measured_where_the_present_policy_sampled_every_token(others):
    """Version 3 has 100 rollouts alone, every second one; the others began or ended elsewhere."""
    versions = [(3, 3) if i % 2 else others for i in range(200)]
    rollouts = [
        make_rollout(i, 2, policy_version=first, policy_version_end=last)
        for i, (first, last) in enumerate(versions)
    ]
    sample = sampled_only_by(rollouts, 3)
    ids = [rollout.rollout_id for rollout in sample]
    assert len(set(ids)) == 64 and ids == sorted(ids)
    assert all(i % 2 for i in ids) and ids[0] == 1 and ids[-1] > 190
    few = rollouts[:10]
    assert [rollout.rollout_id for rollout in sampled_only_by(few, 3)] == [1, 3, 5, 7, 9]
    assert sampled_only_by(few, 5) == []


def test_the_gap_by_hand():
    rollouts = [make_rollout(0, 2), make_rollout(1, 1)]  # sampler log-probs are -1
    trainer = [np.array([-1.5, -1.0], np.float32), np.array([-0.9], np.float32)]
    gap = measure_gap(rollouts, trainer)
    assert (gap.mean, gap.max, gap.tokens) == (pytest.approx(0.2), pytest.approx(0.5), 3)
