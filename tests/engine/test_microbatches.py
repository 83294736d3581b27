"""From a mini-batch to micro-batches: which rank computes which row, at which index."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_batches import plan_microbatches

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.microbatches import (
    MicroBatch,
    exchange,
    plan_sequences,
)
from grpo_replay.engine.shared_prompts import Layout
from grpo_replay.replay.batch import TrainRow


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


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(50, 400), st.integers(1, 5), st.booleans())
def test_every_row_is_planned_once_within_the_budget_and_equally_often_per_rank(
    lengths, budget, world_size, packing
):
    rows = [make_row(prompt, completion) for prompt, completion in lengths]
    plan = plan_microbatches(rows, Layout(budget, packing), world_size)
    assert len(plan) == world_size
    assert len({len(microbatches) for microbatches in plan}) == 1
    seen = [int(row) for rank in plan for m in rank for row in m.rows_R if row >= 0]
    assert sorted(seen) == list(range(len(rows)))
    for rank in plan:
        for m in rank:
            assert m.input_ids_SL.size <= budget or len(m.rows_R) == 1
    # Dealt in snake order, ranks differ by at most one longest row.
    tokens = [
        sum(rows[row].length_tokens for m in rank for row in m.rows_R if row >= 0) for rank in plan
    ]
    assert max(tokens) - min(tokens) <= max(row.length_tokens for row in rows)


def test_the_budget_of_a_pack_counts_tokens_and_short_rows_fill_up_long_ones():
    rows = [make_row(3, length - 3) for length in (4, 9, 5, 6)]
    assert plan_sequences(rows, Layout(10), 1) == [[[[1]], [[3]], [[2], [0]]]]
    packs = plan_sequences(rows, Layout(10, packing=True), 1)
    assert packs == [[[[1]], [[3], [0]], [[2]]]]
    packs = plan_sequences(rows, Layout(8, packing=True), 1)  # 9 is above the budget
    assert packs == [[[[1]], [[3]], [[2]], [[0]]]]


def test_a_pack_is_its_rows_end_to_end_with_positions_that_begin_again():
    rows = [
        replace(
            make_row(p, t), prompt_token_ids=np.arange(p), completion_token_ids=10 + np.arange(t)
        )
        for p, t in ((2, 3), (1, 2), (1, 0))
    ]
    ((pack,),) = plan_microbatches(rows, Layout(100, packing=True), 1)
    assert pack.input_ids_SL.tolist() == [[0, 1, 10, 11, 12, 0, 10, 11, 0]]
    assert pack.position_ids_SL.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0]]
    assert pack.positions_C.tolist() == [1, 2, 3, 5, 6]
    assert pack.target_ids_C.tolist() == [10, 11, 12, 10, 11]
    assert pack.row_of_C.tolist() == [0, 0, 0, 1, 1]
    ((padded,),) = plan_microbatches(rows, Layout(100), 1)
    assert padded.input_ids_SL.shape == (3, 5)
    assert padded.position_ids_SL is None


def test_no_rows_need_no_micro_batches():
    assert plan_microbatches([], Layout(100), 3) == [[], [], []]


def test_a_rank_without_rows_runs_micro_batches_of_weight_zero():
    plan = plan_microbatches([make_row(3, 4)], Layout(100), 2)
    assert [len(rank) for rank in plan] == [1, 1]
    (idle,) = plan[1]
    assert idle.rows_R.tolist() == [-1]
    assert idle.token_weights_R.tolist() == [0.0]
    assert idle.coefficients_R.tolist() == [0.0]


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(50, 400), st.integers(1, 3))
def test_padding_and_positions_match_a_naive_construction(lengths, budget, world_size):
    rows = [make_row(prompt, completion) for prompt, completion in lengths]
    plan = plan_microbatches(rows, Layout(budget), world_size)
    for m in [m for rank in plan for m in rank if m.rows_R[0] >= 0]:
        chosen = [rows[i] for i in m.rows_R]
        width = max(row.length_tokens for row in chosen)
        flat_inputs = m.input_ids_SL.reshape(-1)
        expected = []  # (row, hidden position, target, behaviour, reference)
        for r, row in enumerate(chosen):
            tokens = [*row.prompt_token_ids.tolist(), *row.completion_token_ids.tolist()]
            padded = tokens + [0] * (width - len(tokens))
            assert m.input_ids_SL[r].tolist() == padded
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
            if not isinstance(a, np.ndarray):
                assert (field.name, a) == (field.name, b)
                continue
            assert (field.name, a.dtype, a.shape) == (field.name, b.dtype, b.shape)
            assert a.tobytes() == b.tobytes()


class SharedList(Comm):
    """One of several ranks that take turns in this process: rank 0 leaves payloads, the others find
    their own."""

    def __init__(self, rank: int, ranks: int, left: list[memoryview]) -> None:
        super().__init__(rank, ranks)
        self._left = left

    def scatter(self, payloads):
        assert (payloads is not None) == self.is_main
        if payloads is not None:
            self._left[:] = payloads
        return self._left[self.rank]


def scattered(rows: list[TrainRow], layout: Layout, ranks: int) -> tuple[list, list]:
    """What each of the ranks gets, and the payloads."""
    left: list = []
    comms = [SharedList(rank, ranks, left) for rank in range(ranks)]
    given = [rows, *[()] * (ranks - 1)]
    plans = [plan_sequences(each, layout, ranks) for each in given]
    each_rank = zip(comms, plans, given, strict=True)
    return [exchange(*each, layout) for each in each_rank], left


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(50, 400), st.integers(2, 4), st.booleans())
def test_scattered_micro_batches_equal_those_of_rank_0_bit_for_bit(
    lengths, budget, world_size, packing
):
    plain = [make_row(*lengths_of_row, seed) for seed, lengths_of_row in enumerate(lengths)]
    corrected = [replace(row, sampler_weights=row.behavior_logprobs + 1) for row in plain]
    masked = [
        replace(row, completion_mask=row.behavior_logprobs < 0.5 if i % 2 else None)
        for i, row in enumerate(corrected)
    ]
    for rows in (plain, corrected, masked, []):
        layout = Layout(budget, packing)
        expected = plan_microbatches(rows, layout, world_size)
        found, _ = scattered(rows, layout, world_size)
        for of_rank, whole in zip(found, expected, strict=True):
            assert_same_bits(of_rank, whole)


@pytest.mark.parametrize("packing", [False, True])
def test_one_rank_has_all_micro_batches_and_sends_none(packing):
    rows = [make_row(3, tokens, tokens) for tokens in (5, 9, 2, 7, 4)]
    layout = Layout(24, packing)
    alone = exchange(Comm(), plan_sequences(rows, layout, 1), rows, layout)
    assert_same_bits(alone, plan_microbatches(rows, layout, 1)[0])
    assert len(alone) > 1
