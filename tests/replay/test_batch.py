"""From a composed batch to micro-batches: who is in which update, on which rank, at which index."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.scatter import from_bytes, scatter_microbatches, to_bytes
from grpo_replay.recipe import BatchSection, LossSection
from grpo_replay.replay.batch import (
    MicroBatch,
    TrainRow,
    logprob_row,
    mini_batch_indices,
    plan_groups,
    plan_microbatches,
    train_rows,
)
from grpo_replay.types import Rollout


def make_row(prompt: int, completion: int, seed: int = 0) -> TrainRow:
    rng = np.random.default_rng([seed, prompt, completion])
    return TrainRow(
        rng.integers(1, 99, prompt).astype(np.int32),
        rng.integers(1, 99, completion).astype(np.int32),
        rng.normal(size=completion).astype(np.float32),
        rng.normal(size=completion).astype(np.float32),
        float(np.float32(rng.normal())),
        float(np.float32(rng.uniform(0.1, 1))),
    )


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=40)


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


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(50, 400), st.integers(1, 5), st.booleans())
def test_every_row_is_planned_once_within_the_budget_and_equally_often_per_rank(
    lengths, budget, world_size, packing
):
    rows = [make_row(prompt, completion) for prompt, completion in lengths]
    plan = plan_microbatches(rows, budget, world_size, packing)
    assert len(plan) == world_size
    assert len({len(microbatches) for microbatches in plan}) == 1
    seen = [int(row) for rank in plan for m in rank for row in m.rows_R if row >= 0]
    assert sorted(seen) == list(range(len(rows)))
    for rank in plan:
        for m in rank:
            assert m.input_ids_RL.size <= budget or len(m.rows_R) == 1
    # Dealt in snake order, ranks differ by at most one longest row.
    tokens = [
        sum(rows[row].length_tokens for m in rank for row in m.rows_R if row >= 0) for rank in plan
    ]
    assert max(tokens) - min(tokens) <= max(row.length_tokens for row in rows)


def test_the_budget_of_a_pack_counts_tokens_and_short_rows_fill_up_long_ones():
    rows = [make_row(3, length - 3) for length in (4, 9, 5, 6)]
    assert plan_groups(rows, 10, 1) == [[[1], [3], [2, 0]]]
    assert plan_groups(rows, 10, 1, packing=True) == [[[1], [3, 0], [2]]]
    assert plan_groups(rows, 8, 1, packing=True) == [[[1], [3], [2], [0]]]  # 9 is above the budget


def test_a_pack_is_its_rows_end_to_end_with_positions_that_begin_again():
    rows = [
        replace(
            make_row(p, t), prompt_token_ids=np.arange(p), completion_token_ids=10 + np.arange(t)
        )
        for p, t in ((2, 3), (1, 2), (1, 0))
    ]
    ((pack,),) = plan_microbatches(rows, 100, 1, packing=True)
    assert pack.input_ids_RL.tolist() == [[0, 1, 10, 11, 12, 0, 10, 11, 0]]
    assert pack.position_ids_RL.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0]]
    assert pack.positions_C.tolist() == [1, 2, 3, 5, 6]
    assert pack.target_ids_C.tolist() == [10, 11, 12, 10, 11]
    assert pack.row_of_C.tolist() == [0, 0, 0, 1, 1]
    ((padded,),) = plan_microbatches(rows, 100, 1)
    assert padded.input_ids_RL.shape == (3, 5)
    assert padded.position_ids_RL is None


def test_no_rows_need_no_micro_batches():
    assert plan_microbatches([], 100, 3) == [[], [], []]


def test_a_rank_without_rows_runs_micro_batches_of_weight_zero():
    plan = plan_microbatches([make_row(3, 4)], 100, 2)
    assert [len(rank) for rank in plan] == [1, 1]
    (idle,) = plan[1]
    assert idle.rows_R.tolist() == [-1]
    assert idle.token_weights_R.tolist() == [0.0]
    assert idle.coefficients_R.tolist() == [0.0]


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(50, 400), st.integers(1, 3))
def test_padding_and_positions_match_a_naive_construction(lengths, budget, world_size):
    rows = [make_row(prompt, completion) for prompt, completion in lengths]
    plan = plan_microbatches(rows, budget, world_size)
    for m in [m for rank in plan for m in rank if m.rows_R[0] >= 0]:
        chosen = [rows[i] for i in m.rows_R]
        width = max(row.length_tokens for row in chosen)
        flat_inputs = m.input_ids_RL.reshape(-1)
        expected = []  # (row, hidden position, target, behaviour, reference)
        for r, row in enumerate(chosen):
            tokens = [*row.prompt_token_ids.tolist(), *row.completion_token_ids.tolist()]
            padded = tokens + [0] * (width - len(tokens))
            assert m.input_ids_RL[r].tolist() == padded
            for t, target in enumerate(row.completion_token_ids.tolist()):
                predicts_from = len(row.prompt_token_ids) + t - 1
                expected.append(
                    (
                        r,
                        r * width + predicts_from,
                        target,
                        row.behavior_logprobs[t],
                        row.reference_logprobs[t],
                    )
                )
        found = list(
            zip(
                m.row_of_C.tolist(),
                m.positions_C.tolist(),
                m.target_ids_C.tolist(),
                m.behavior_logprobs_C.tolist(),
                m.reference_logprobs_C.tolist(),
                strict=True,
            )
        )
        assert found == expected
        for _, position, target, _, _ in found:
            assert flat_inputs[position + 1] == target  # the hidden state just before predicts it
        assert m.coefficients_R.tolist() == [row.coefficient for row in chosen]
        assert m.token_weights_R.tolist() == [row.token_weight for row in chosen]


def assert_same_bits(found: list[MicroBatch], expected: list[MicroBatch]) -> None:
    assert len(found) == len(expected)
    for before, after in zip(expected, found, strict=True):
        for field in fields(MicroBatch):
            a, b = getattr(before, field.name), getattr(after, field.name)
            assert (field.name, a.dtype, a.shape) == (field.name, b.dtype, b.shape)
            assert a.tobytes() == b.tobytes()


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(50, 400), st.integers(1, 4), st.booleans())
def test_scattered_micro_batches_equal_those_of_rank_0_bit_for_bit(
    lengths, budget, world_size, packing
):
    plain = [make_row(*lengths_of_row, seed) for seed, lengths_of_row in enumerate(lengths)]
    corrected = [replace(row, sampler_weights=row.behavior_logprobs + 1) for row in plain]
    for rows in (plain, corrected):
        expected = plan_microbatches(rows, budget, world_size, packing)
        plan = plan_groups(rows, budget, world_size, packing)
        for groups, whole in zip(plan, expected, strict=True):
            assert_same_bits(from_bytes(to_bytes(groups, rows), packing), whole)
        assert from_bytes(to_bytes([], rows), packing) == []


class SharedList(Comm):
    """One of two ranks that take turns in this process: rank 0 leaves payloads, rank 1 finds its
    own."""

    def __init__(self, rank: int, left: list[memoryview]) -> None:
        super().__init__(rank, 2)
        self._left = left

    def scatter(self, payloads):
        assert (payloads is not None) == self.is_main
        if payloads is not None:
            self._left[:] = payloads
        return self._left[self.rank]


@pytest.mark.parametrize("packing", [False, True])
def test_every_rank_gets_its_own_micro_batches_and_one_rank_all(packing):
    rows, left = [make_row(3, tokens, tokens) for tokens in (5, 9, 2, 7, 4)], []
    expected = plan_microbatches(rows, 24, 2, packing)
    for rank, given_rows in ((0, rows), (1, None)):
        found = scatter_microbatches(SharedList(rank, left), given_rows, 24, packing)
        assert_same_bits(found, expected[rank])
    alone = scatter_microbatches(Comm(), rows, 24, packing)
    assert_same_bits(alone, plan_microbatches(rows, 24, 1, packing)[0])
    assert len(left) == 2 and len(alone) > 1


def test_scattering_costs_4_bytes_per_token_and_4_per_nonzero_log_prob():
    rows = [make_row(1000, 9000, seed) for seed in range(4)]
    plain = [logprob_row(row.prompt_token_ids, row.completion_token_ids) for row in rows]
    without_reference = [replace(row, reference_logprobs=np.zeros(9000, "f")) for row in rows]
    for given_rows, bytes_per_row in (
        (plain, 4 * 10_000),
        (without_reference, 4 * 10_000 + 4 * 9000),
        (rows, 4 * 10_000 + 8 * 9000),
    ):
        (groups,) = plan_groups(given_rows, 20_000, 1)
        payload = to_bytes(groups, given_rows)
        assert 4 * bytes_per_row < len(payload) < 4 * bytes_per_row + 4000
        assert_same_bits(from_bytes(payload), plan_microbatches(given_rows, 20_000, 1)[0])


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
    rows = train_rows(rollouts, None, LossSection(kind="asymre", asymre_delta=-0.1), 20)
    assert [row.coefficient for row in rows] == pytest.approx([0.9, -1.1])
    assert [row.token_weight for row in rows] == [1 / 2, 1 / 2]


def test_a_row_for_log_probs_alone_trains_nothing():
    row = logprob_row(np.array([1], np.int32), np.array([2, 3], np.int32))
    assert (row.coefficient, row.token_weight, row.length_tokens) == (0.0, 0.0, 3)
