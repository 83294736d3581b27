"""From a composed batch to mini-batches: who is in which update, with which weight."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_replay.recipe import BatchSection, LossSection
from grpo_replay.replay.batch import logprob_row, mini_batch_indices, train_rows, update_indices
from grpo_replay.types import Rollout


@given(st.integers(0, 200), st.integers(1, 9), st.integers(0, 5))
def test_updates_per_step_splits_into_even_parts_that_are_never_empty(count, updates, seed):
    parts = mini_batch_indices(
        count, BatchSection(updates_per_step=updates), np.random.default_rng(seed)
    )
    assert len(parts) == min(updates, count)
    assert sorted(np.concatenate([np.zeros(0, int), *parts]).tolist()) == list(range(count))
    sizes = [len(part) for part in parts]
    assert not sizes or (min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)


@pytest.mark.parametrize(
    "count, size, sizes",
    [(113, 128, [113]), (169, 128, [85, 84]), (128, 128, [128]), (256, 128, [128, 128])],
)
def test_mini_batch_rollouts_gives_the_fewest_even_parts(count, size, sizes):
    settings_ = BatchSection(mini_batch_rollouts=size)
    parts = mini_batch_indices(count, settings_, np.random.default_rng(0))
    assert [len(part) for part in parts] == sizes
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))


def test_the_split_is_random_but_reproducible():
    split = [
        mini_batch_indices(100, BatchSection(updates_per_step=2), np.random.default_rng(seed))
        for seed in (1, 1, 2)
    ]
    assert split[0][0].tolist() == split[1][0].tolist() != split[2][0].tolist()
    # Fresh rollouts come first in a composed batch: both halves must see both sides.
    assert 15 < sum(i < 50 for i in split[0][0]) < 35


def test_each_update_trains_on_the_rollouts_of_its_own_draw():
    draw = SimpleNamespace(update_N=np.array([3, 1, 2, 1, 3, 3]))
    batch = SimpleNamespace(draw=draw, rollouts=[None] * 6, trains_on_draw=True)
    parts = update_indices(batch, BatchSection(updates_per_step=3), np.random.default_rng(0))
    assert [part.tolist() for part in parts] == [[1, 3], [2], [0, 4, 5]]


def test_a_step_of_one_draw_is_split_at_random():
    draw = SimpleNamespace(update_N=None)
    batch = SimpleNamespace(draw=draw, rollouts=[None] * 7, trains_on_draw=True)
    settings = BatchSection(updates_per_step=2)
    parts, expected = (
        split(np.random.default_rng(3))
        for split in (
            lambda rng: update_indices(batch, settings, rng),
            lambda rng: mini_batch_indices(7, settings, rng),
        )
    )
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]


def test_every_pass_over_a_batch_has_each_rollout_once_in_an_order_of_its_own():
    batch = SimpleNamespace(
        draw=SimpleNamespace(update_N=None), rollouts=[None] * 7, trains_on_draw=True
    )
    settings = BatchSection(updates_per_step=2, epochs=3)
    parts = update_indices(batch, settings, np.random.default_rng(3))
    assert [len(part) for part in parts] == [4, 3] * 3
    passes = [np.concatenate(parts[first : first + 2]).tolist() for first in (0, 2, 4)]
    assert [sorted(each) for each in passes] == [list(range(7))] * 3
    assert len({tuple(each) for each in passes}) == 3
    # The first pass is that of a single one.
    single = update_indices(batch, BatchSection(updates_per_step=2), np.random.default_rng(3))
    assert [part.tolist() for part in parts[:2]] == [part.tolist() for part in single]


def test_a_masked_row_has_results_for_the_tokens_that_train():
    row = logprob_row(np.array([1, 2], np.int32), np.array([7, 8, 9], np.int32))
    assert row.trained_C.tolist() == [0, 1, 2]
    masked = replace(row, completion_mask=np.array([True, False, True]))
    assert masked.trained_C.tolist() == [0, 2]


def make_rollout(
    tokens: int, advantage: float | None, reward: float, mean: float, rollout_id: int = 0
) -> Rollout:
    logprobs = np.linspace(-1, -2, tokens).astype(np.float32)
    return Rollout(
        rollout_id, 0, "p", 0, 1, 0, 0, np.array([1, 2], np.int32),
        np.arange(tokens, dtype=np.int32), "", logprobs, logprobs, reward, advantage, mean,
        1.0, 1, "stop", "correct", True,
    )  # fmt: skip


def test_train_rows_carry_frozen_advantages_and_the_mini_batch_denominator():
    rollouts = [make_rollout(3, 1.5, 1.0, 0.2, 7), make_rollout(5, -0.5, -1.0, 0.2, 3)]
    rows = train_rows(rollouts, None, LossSection(), 20)
    assert [row.rollout_id for row in rows] == [7, 3]
    assert [row.coefficient for row in rows] == [1.5, -0.5]
    assert [row.token_weight for row in rows] == [1 / 8, 1 / 8]
    assert rows[0].behavior_logprobs is rollouts[0].behavior_logprobs
    assert rows[1].reference_logprobs.tolist() == [0.0] * 5


def test_train_rows_of_asymre_are_reward_minus_shifted_group_mean():
    rollouts = [make_rollout(3, 1.5, 1.0, 0.2), make_rollout(5, -0.5, -1.0, 0.2)]
    rows = train_rows(rollouts, None, LossSection(kind="asymre"), 20)
    assert [row.coefficient for row in rows] == pytest.approx([0.9, -1.1])
    assert [row.token_weight for row in rows] == [1 / 2, 1 / 2]


def test_a_row_for_log_probs_alone_trains_nothing():
    row = logprob_row(np.array([1], np.int32), np.array([2, 3], np.int32))
    assert (row.coefficient, row.token_weight, row.length_tokens) == (0.0, 0.0, 3)
    assert (row.rollout_id, row.sampler_weights.tolist()) == (-1, [])
