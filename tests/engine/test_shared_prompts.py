"""Rollouts behind one copy of their prompt, or of what their prompts begin with: the results are
those of separate rows."""

from dataclasses import asdict, replace
from itertools import chain

import numpy as np
import pytest
import torch
from architectures import random_model
from core_engine import (
    first_gradient,
    keep_rows_apart,
    make_rows,
    open_engine,
    parameters,
    relative,
    share_prompts,
    weighted,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_batches import plan_microbatches

from grpo_replay.engine.microbatches import micro_batch, plan_sequences
from grpo_replay.engine.policy_module import segment_mask
from grpo_replay.engine.shared_prompts import (
    Layout,
    Lengths,
    assign_to_ranks,
    group_rows,
    pairs_per_token,
)
from grpo_replay.recipe import LossSection
from grpo_replay.replay.batch import TrainRow

ALL = Layout(10**6, pairs_per_token=np.inf)


def row_of(prompt: int, completion: int, seed: int = 0) -> TrainRow:
    """Rows of one `prompt` have the same tokens there."""
    random = np.random.default_rng([seed, completion])
    values = random.normal(size=(2, completion)).astype(np.float32)
    return TrainRow(
        np.arange(prompt, dtype=np.int32),
        random.integers(50, 99, completion).astype(np.int32),
        *values,
    )


def few_shot(prefix: int, rest: int, completion: int, question: int, seed: int = 0) -> TrainRow:
    """Rows whose prompts begin with the same `prefix` tokens, and differ in the `rest`."""
    prompt = [*range(prefix), *range(1000 * question, 1000 * question + rest)]
    row = row_of(1, completion, seed)
    return replace(row, prompt_token_ids=np.array(prompt, dtype=np.int32))


def two_updates(processes, rows, sharing, loss=None, **sections):
    batch = {"max_tokens_per_microbatch": 110} | sections.pop("batch", {})
    loss = {"beta": 0.1} if loss is None else loss
    with open_engine(processes, batch=batch, loss=loss, **sections) as engine:
        (share_prompts if sharing else keep_rows_apart)(engine)
        logprobs, reference = engine.logprobs(rows), []
        if engine._recipe.loss.beta:
            reference = engine.reference_logprobs(rows)
        first, gradient = engine.update(rows), first_gradient(engine)
        moved = parameters(engine)
        engine.update(rows[:1])
    return first, np.concatenate([*logprobs, *reference]), gradient, moved


SIBLINGS = {"per_prompt": 7}
EXAMPLES = {"per_prompt": 2, "prefix": 20}
"""Two prompts of seven rows; seven prompts of two rows that begin with the same 20 tokens."""


@pytest.mark.parametrize(
    ("attention", "stage", "checkpointing", "lora", "packing", "given"),
    [
        ("sdpa", 0, False, None, False, SIBLINGS),
        ("sdpa", 0, False, None, True, EXAMPLES),
        pytest.param("eager", 2, True, None, False, SIBLINGS, marks=pytest.mark.slow),
        pytest.param("sdpa", 3, True, 4, False, EXAMPLES, marks=pytest.mark.slow),
        pytest.param("eager", 3, False, None, True, EXAMPLES, marks=pytest.mark.slow),
    ],
)
def test_shared_prompts_give_the_update_of_separate_rows(
    processes, attention, stage, checkpointing, lora, packing, given
):
    """The tied head, and groups that are split because they do not fit, are part of it."""
    rows = make_rows(14, **given)
    sections = {
        "engine": {"zero_stage": stage},
        "model": {
            "attn_implementation": attention,
            "gradient_checkpointing": checkpointing,
            "lora": {"r": lora},
        },
        "batch": {"packing": packing},
    }
    separate, values, gradient, moved = two_updates(processes, rows, False, **sections)
    shared, found, its_gradient, its_moved = two_updates(processes, rows, True, **sections)
    assert shared.micro_batches < separate.micro_batches
    if "prefix" in given:
        joined = group_rows(Lengths(rows), replace(ALL, max_tokens=110), 1)
        prompts = Lengths(rows).prompt_of
        assert max(len({prompts[row] for row in each}) for each in joined) > 1
    assert np.abs(found - values).max() < 2e-5
    rounding = 6e-6 if "prefix" in given else 2e-6  # as separate rows in other micro-batches
    assert relative(its_gradient, gradient) < rounding
    assert relative(its_moved, moved) < 1e-6
    assert shared.loss == pytest.approx(separate.loss, rel=rounding)
    assert shared.grad_norm == pytest.approx(separate.grad_norm, rel=rounding)
    assert shared.reference_kl == pytest.approx(separate.reference_kl, rel=1e-5)
    assert 0 <= shared.padding_share < 0.5
    for a, b in zip(shared.outcomes, separate.outcomes, strict=True):
        assert asdict(a) == pytest.approx(asdict(b), rel=5e-5, abs=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "asymre"},
        {"kind": "gspo", "aggregation": "sequence_mean"},
    ],
)
def test_every_loss_is_that_of_separate_rows(processes, loss):
    rows = weighted(make_rows(12, per_prompt=4), LossSection(**loss))
    rows = [replace(row, sampler_weights=row.behavior_logprobs / 3) for row in rows]
    separate, _, gradient, _ = two_updates(processes, rows, False, loss)
    shared, _, its_gradient, _ = two_updates(processes, rows, True, loss)
    assert shared.loss == pytest.approx(separate.loss, rel=1e-5)
    assert relative(its_gradient, gradient) < 2e-6
    for a, b in zip(shared.outcomes, separate.outcomes, strict=True):
        assert asdict(a) == pytest.approx(asdict(b), rel=5e-5, abs=1e-5)


def test_a_completion_mask_leaves_tokens_out_of_the_results_alone(processes):
    rows = make_rows(8, per_prompt=4)
    masks = [np.arange(len(row.completion_token_ids)) % 3 != index % 3
             for index, row in enumerate(rows)]  # fmt: skip
    rows = [replace(row, completion_mask=mask) for row, mask in zip(rows, masks, strict=True)]
    _, values, gradient, _ = two_updates(processes, rows, False)
    _, found, its_gradient, _ = two_updates(processes, rows, True)
    assert len(values) == 2 * sum(mask.sum() for mask in masks)
    assert np.abs(found - values).max() < 2e-5
    assert relative(its_gradient, gradient) < 2e-6


def test_completions_lie_behind_their_prompt_at_the_positions_they_would_have_alone():
    rows = [row_of(3, 2, 1), row_of(3, 3, 2), row_of(2, 1)]
    batch = micro_batch([5, 7, 6], rows, [2, 1], packing=False)
    first, second, third = (row.completion_token_ids.tolist() for row in rows)
    assert batch.input_ids_SL.tolist() == [[0, 1, 2, *first, *second], [0, 1, *third, *[0] * 5]]
    assert batch.position_ids_SL.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5], [0, 1, 2, *[0] * 5]]
    assert batch.positions_C.tolist() == [2, 3, 2, 5, 6, 8 + 1]
    assert batch.target_ids_C.tolist() == [*first, *second, *third]
    assert batch.row_of_C.tolist() == [0, 0, 1, 1, 1, 2]
    assert (batch.rows_R.tolist(), batch.tokens) == ([5, 7, 6], 11)
    packed = micro_batch([5, 7, 6], rows, [2, 1], packing=True)
    assert packed.position_ids_SL.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2]]
    assert packed.positions_C.tolist() == [2, 3, 2, 5, 6, 9]
    assert packed.bounds is None  # flash attention would take the completions for one row


def test_prompts_lie_behind_the_tokens_that_they_begin_with():
    """Two rows of one prompt, one of another, and one of a prompt that is no longer than what all
    begin with."""
    rows = [few_shot(2, 1, 2, 7, 1), few_shot(2, 1, 1, 7, 2), few_shot(2, 2, 1, 8), row_of(2, 2)]
    batch = micro_batch(range(4), rows, [4], packing=False)
    first, second, third, fourth = (row.completion_token_ids.tolist() for row in rows)
    prompts = [[0, 1], [7000], [8000, 8001]]
    assert batch.input_ids_SL.tolist() == [
        [*prompts[0], *prompts[1], *first, *second, *prompts[2], *third, *fourth]
    ]
    assert batch.position_ids_SL.tolist() == [[0, 1, 2, 3, 4, 3, 2, 3, 4, 2, 3]]
    assert batch.positions_C.tolist() == [2, 3, 2, 7, 1, 9]
    assert batch.tokens == Lengths(rows).sequence_tokens(range(4)) == 11
    mask = segment_mask(torch.from_numpy(batch.segments_3SL), "sdpa", torch.float32)
    assert ["".join(str(int(seen)) for seen in line) for line in mask[0, 0]] == [
        "10000000000", "11000000000",  # what all begin with
        "11100000000", "11110000000", "11111000000", "11100100000",  # a prompt, its two rows
        "11000010000", "11000011000", "11000011100",  # another prompt and its row
        "11000000010", "11000000011",  # a row of the prompt that ends there
    ]  # fmt: skip


@pytest.mark.parametrize("packing", [False, True])
def test_a_completion_sees_its_prompt_and_itself(packing):
    rows = [row_of(2, 2, 1), row_of(2, 1, 2), row_of(1, 1)]
    batch = micro_batch([0, 1, 2], rows, [2, 1], packing)
    segments = torch.from_numpy(batch.segments_3SL)
    mask = segment_mask(segments, "sdpa", torch.float32)
    group = ["10000", "11000", "11100", "11110", "11001"]  # prompt, prompt, first, first, second
    alone = ["10", "11"]
    if packing:
        expected = [[*(line + "00" for line in group), *("00000" + line for line in alone)]]
    else:
        padding = ["00100", "00110", "00111"]
        expected = [group, [*(line + "000" for line in alone), *padding]]
    found = [["".join(str(int(seen)) for seen in line) for line in each[0]] for each in mask]
    assert found == expected
    added = segment_mask(segments, "eager", torch.bfloat16)
    assert torch.equal(added == 0, mask)
    assert added.min() == torch.finfo(torch.bfloat16).min


PROMPTS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 30), min_size=1, max_size=9)),
    min_size=1,
    max_size=8,
    unique_by=lambda prompt: prompt[0],
)


@settings(max_examples=100, deadline=None)
@given(PROMPTS, st.integers(50, 400), st.integers(1, 5), st.booleans())
def test_every_row_is_planned_once_within_the_budget_and_never_for_more_tokens(
    prompts, budget, ranks, packing
):
    rows = [row_of(prompt, tokens, seed)
            for prompt, completions in prompts
            for seed, tokens in enumerate(completions)]  # fmt: skip
    plan = plan_microbatches(rows, Layout(budget, packing, np.inf), ranks)
    assert len({len(batches) for batches in plan}) == 1
    batches = [batch for of_rank in plan for batch in of_rank]
    assert sorted(i for b in batches for i in b.rows_R if i >= 0) == list(range(len(rows)))
    for batch in batches:
        assert batch.input_ids_SL.size <= budget or len(batch.rows_R) == 1
    assert sum(batch.tokens for batch in batches) <= sum(row.length_tokens for row in rows)


def test_a_group_costs_its_prompt_once_or_once_for_each_part_that_fits():
    rows = [row_of(45, 5, seed) for seed in range(8)]
    assert [sorted(each) for each in group_rows(Lengths(rows), ALL, 1)] == [list(range(8))]
    assert Lengths(rows).sequence_tokens(range(8)) == 85
    (halves,) = plan_sequences(rows, replace(ALL, max_tokens=84), 1)
    assert [[len(part) for part in batch] for batch in halves] == [[4], [4]]
    thirds = group_rows(Lengths(rows), replace(ALL, max_tokens=60), 1)
    assert sorted(len(part) for part in thirds) == [2, 3, 3]
    assert len(group_rows(Lengths(rows), replace(ALL, max_tokens=54), 1)) == 8  # a row is 50 tokens


def test_prompts_that_begin_alike_are_joined_where_that_saves_work():
    """Examples of 41 tokens, a question of 4 and answers of 5: 41 + 96 · (4 + 5) = 905 tokens in
    one sequence for 96 prompts, 4,800 in rows of their own."""
    rows = [few_shot(41, 4, 5, question) for question in range(1, 97)]
    (everything,) = group_rows(Lengths(rows), ALL, 1)
    assert (sorted(everything), Lengths(rows).sequence_tokens(everything)) == (list(range(96)), 905)
    layout = Layout(1024, pairs_per_token=pairs_per_token("sdpa", 576))
    sequences = group_rows(Lengths(rows), layout, 1)
    assert sorted(chain.from_iterable(sequences)) == list(range(96))
    assert 2 <= len(sequences) <= 6  # in one, attention would compare too many pairs
    assert sum(Lengths(rows).sequence_tokens(each) for each in sequences) == 905 + 41 * (
        len(sequences) - 1
    )
    loads = [sum(Lengths(rows).sequence_tokens(sequences[index]) for index in its)
             for sequences in [group_rows(Lengths(rows), layout, 4)]
             for its in assign_to_ranks(sequences, Lengths(rows), 4)]  # fmt: skip
    assert max(loads) <= 1.2 * min(loads)
    two_tasks = [few_shot(41, 4, 5, 10 * task + question) for task in (1, 2) for question in (1, 2)]
    two_tasks = [replace(row, prompt_token_ids=row.prompt_token_ids + 5 * (index > 1))
                 for index, row in enumerate(two_tasks)]  # fmt: skip
    assert sorted(map(sorted, group_rows(Lengths(two_tasks), ALL, 1))) == [[0, 1], [2, 3]]


def test_prompts_are_shared_only_where_that_saves_work():
    """Tokens of SmolLM2's width (576), for which a token costs as much as 1,152 pairs."""
    layout = Layout(10**6, pairs_per_token=pairs_per_token("sdpa", 576))

    def parts(prompt: int, completion: int) -> list[int]:
        rows = [row_of(prompt, completion, seed) for seed in range(8)]
        return [len(each) for each in group_rows(Lengths(rows), layout, 1)]

    assert parts(45, 5) == parts(1024, 16) == [8]
    assert parts(154, 2458) == parts(16, 256) == [1] * 8  # 5 % of the tokens
    assert len(parts(1024, 256)) < 8
    tiny = Layout(10**6, pairs_per_token=pairs_per_token("sdpa", 64))
    rows = [row_of(7, 11, seed) for seed in range(8)]
    assert len(group_rows(Lengths(rows), tiny, 1)) == 8
    distinct = [few_shot(0, 10 + seed, 5, 1 + seed) for seed in range(8)]
    assert len(group_rows(Lengths(distinct), ALL, 1)) == 8


@pytest.mark.parametrize(
    ("kind", "shares"),
    [("qwen3", True), ("gemma3_text", False), ("lfm2", False), ("bloom", False)],
)  # fmt: skip
def test_which_models_share_prompts_is_found_by_trying(processes, kind, shares):
    """Gemma 3 has a window of fewer tokens than the recipe's longest sequence; Bloom counts
    positions by itself."""
    sections = {"prompts": {"max_prompt_length": 60}}
    with open_engine(processes, random_model(kind), **sections) as engine:
        assert (engine._layout.pairs_per_token is not None) is shares
        said = [f"a model of type {kind} does not keep" in notice for notice in engine.notices]
        assert said == ([] if shares else [True])
