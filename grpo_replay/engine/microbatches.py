"""The way of a mini-batch over the ranks: from rows to the micro-batches of every rank, one forward
pass each (`plan_sequences`, `exchange`), and from the ranks' results back to the rows (`join_…`).

Arrays only: no DeepSpeed, no process group. Rank 0 plans for all ranks and sends them their rows.
Every rank gets the same number of micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine import UpdateResult
from grpo_replay.engine.shared_prompts import Layout, Lengths, deal, sequences_of
from grpo_replay.replay.batch import TrainRow
from grpo_replay.replay.loss import ROW_STATISTICS
from grpo_replay.types import RolloutOutcome

Sequences = list[list[int]]
"""A micro-batch: the row indices of each of its sequences."""
Chosen = tuple[list[int], list[TrainRow], list[int]]
"""A micro-batch: the indices of its rows, the rows, and how many of them each sequence has."""
RowValues = tuple[int, np.ndarray]
"""The index of a row in the mini-batch, and a value for each of its trained tokens."""

PADDING = -1
"""The segment of padding."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """S sequences, padded on the right to one length, or packed end to end into one [1, L], and
    the C trained completion tokens of their R rows, flattened row by row.

    A sequence is a row, or several rows: what their prompts begin with, then for every prompt the
    rest of it and its completions. `positions_C` are indices into the flattened positions, whose
    hidden states predict `target_ids_C`; the first tokens of completions that share a prompt have
    the same. `rows_R` are indices into the mini-batch. A rank without rows runs a micro-batch with
    `rows_R == [-1]` and weight 0.

    `position_ids_SL` and `segments_3SL` are None where each sequence is one row: causal attention
    never looks right, so padding needs no mask. `segments_3SL` holds for every position the segment
    that it belongs to (the common prefix, the rest of a prompt, a completion), that of the rest of
    its prompt, and that of the common prefix. A position sees the three, up to itself.
    """

    rows_R: np.ndarray  # int64
    widths_S: np.ndarray  # int64, positions that a sequence takes up, padding included
    input_ids_SL: np.ndarray  # int64
    position_ids_SL: np.ndarray | None  # int64
    segments_3SL: np.ndarray | None  # int64
    tokens: int
    positions_C: np.ndarray  # int64
    target_ids_C: np.ndarray  # int64
    row_of_C: np.ndarray  # int64, 0 .. R-1
    behavior_logprobs_C: np.ndarray  # float32
    reference_logprobs_C: np.ndarray  # float32
    coefficients_R: np.ndarray  # float32
    token_weights_R: np.ndarray  # float32
    sampler_weights_C: np.ndarray  # float32; empty: all 1

    @property
    def bounds(self) -> np.ndarray | None:
        """int32 [S + 1]: where each row of a pack begins, and L; None if every row is a sequence.
        Flash attention takes a pack apart by them."""
        if self.position_ids_SL is None or self.segments_3SL is not None:
            return None
        return np.concatenate([[0], np.cumsum(self.widths_S)]).astype(np.int32)


def plan_sequences(rows: Sequence[TrainRow], layout: Layout, ranks: int) -> list[list[Sequences]]:
    """For each rank the sequences of each of its micro-batches: the same number per rank, with
    balanced numbers of tokens. An empty list is a micro-batch without rows.

    Sequences (`sequences_of`) are dealt to the ranks (`deal`). Each rank groups neighbouring ones
    while the padded size (sequences times longest) is at most `max_tokens`; with `packing`, any
    whose lengths add up to that. A row longer than that gets a micro-batch of its own.
    """
    lengths = Lengths(rows)
    sequences = sequences_of(lengths, layout, ranks)
    tokens = list(map(lengths.of_sequence, sequences))
    group = _packs if layout.packing else _padded
    grouped = [
        [[sequences[index] for index in batch] for batch in group(its, tokens, layout.max_tokens)]
        for its in deal(sequences, lengths, ranks)
    ]
    count = max(1, *(len(batches) for batches in grouped)) if rows else 0
    return [batches + [[] for _ in range(count - len(batches))] for batches in grouped]


def _packs(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First fit: the longest sequences open packs, and shorter ones fill them."""
    groups: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        length = lengths[index]
        fitting = next((place for place, left in enumerate(room) if length <= left), len(room))
        if fitting == len(room):
            groups.append([])
            room.append(max_tokens)
        groups[fitting].append(index)
        room[fitting] -= length
    return groups


def _padded(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for index in indices:  # longest first: a group's first sequence sets its padded length
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def micro_batch(
    indices: Sequence[int], chosen: Sequence[TrainRow], sizes: Sequence[int], packing: bool
) -> MicroBatch:
    """The micro-batch of the rows `chosen`, whose indices in the mini-batch are `indices`.
    `sizes` are the numbers of neighbouring rows of each sequence (`sequences_of`)."""
    if not chosen:
        return _empty_micro_batch()
    ends = np.cumsum(sizes).tolist()
    sequences = [range(start, end) for start, end in pairwise([0, *ends])]
    lengths = Lengths(chosen)
    lengths_S = np.array(list(map(lengths.of_sequence, sequences)))
    widths_S = lengths_S if packing else np.full(len(sequences), lengths_S.max())
    trained = [row.trained_C for row in chosen]
    flat, positions_C = _lay_out(chosen, trained, sequences, widths_S, lengths)
    ids_SL, places_SL, *segments = flat.reshape(5, 1 if packing else len(sequences), -1)
    shares = len(sequences) < len(chosen)
    return MicroBatch(
        rows_R=np.asarray(indices, dtype=np.int64),
        widths_S=widths_S,
        input_ids_SL=ids_SL,
        position_ids_SL=places_SL if shares or len(sequences) > len(ids_SL) else None,
        segments_3SL=np.stack(segments) if shares else None,
        tokens=int(lengths_S.sum()),
        positions_C=positions_C,
        **_columns(chosen, trained),
    )


def _lay_out(
    chosen: Sequence[TrainRow],
    trained: Sequence[np.ndarray],
    sequences: Sequence[range],
    widths_S: np.ndarray,
    lengths: Lengths,
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [5, positions]: token id, position id, own segment, that of the rest of the prompt and
    that of the common prefix; padding is in segment -1. And `positions_C`.

    Rows 0 to 2 in one sequence: prompt 7 8 1 with completions 5 and 6 6, prompt 7 8 2 with 4.

        token id         7 8   1   5   6 6   2   4
        position id      0 1   2   3   3 4   2   3
        own segment      3 3   6   0   1 1   8   2
        rest of prompt   3 3   6   6   6 6   8   8
        common prefix    3 3   3   3   3 3   3   3

    The completion of row r is segment r; of N rows, the common prefix of sequence s is N + s, and
    the rest of a prompt 2·N + its first row. `positions_C` are 2, 2 4, 6: what predicts 5, 6 6, 4.
    """
    pieces: list[np.ndarray] = []
    facts: list[tuple[int, ...]] = []  # of each piece: position id of its first token, segments
    after = 0

    def put(ids: np.ndarray, first_place: int, *segments: int) -> None:
        nonlocal after
        pieces.append(ids)
        facts.append((first_place, *segments))
        after += len(ids)

    count, ends_of_prompts, befores = len(chosen), [], []
    for s, (sequence, end) in enumerate(zip(sequences, np.cumsum(widths_S).tolist(), strict=True)):
        prefix, shared, prompt = lengths.of_prefix(sequence), count + s, None
        put(chosen[sequence[0]].prompt_token_ids[:prefix], 0, shared, shared, shared)
        end_of_prefix = after - 1
        for r in sequence:
            ids = chosen[r].prompt_token_ids
            if lengths.prompt_of[r] != prompt:
                prompt, rest = lengths.prompt_of[r], 2 * count + r
                put(ids[prefix:], prefix, rest, rest, shared)
                end_of_prompt = after - 1 if len(ids) > prefix else end_of_prefix
            ends_of_prompts.append(end_of_prompt)
            befores.append(after - 1)
            put(chosen[r].completion_token_ids, len(ids), r, rest, shared)
        put(np.zeros(end - after, np.int32), 0, PADDING, PADDING, PADDING)
    sizes_P, facts_4P = np.array([len(piece) for piece in pieces]), np.array(facts).T
    starts_P = np.cumsum(sizes_P) - sizes_P
    flat = np.empty((5, after), dtype=np.int64)
    flat[0] = np.concatenate(pieces)
    flat[1] = np.arange(after) + np.repeat(facts_4P[0] - starts_P, sizes_P)
    flat[2:] = np.repeat(facts_4P[1:], sizes_P, axis=1)
    flat[1, flat[2] == PADDING] = 0
    counts, nth_C = [len(its) for its in trained], np.concatenate(trained)
    end_of_prompt_C, before_C = np.repeat(ends_of_prompts, counts), np.repeat(befores, counts)
    return flat, np.where(nth_C == 0, end_of_prompt_C, before_C + nth_C).astype(np.int64)


def _columns(chosen: Sequence[TrainRow], trained: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """What a micro-batch holds for each trained token and each row."""

    def flat(name: str) -> np.ndarray:
        return np.concatenate(
            [getattr(row, name)[its] for row, its in zip(chosen, trained, strict=True)]
        )

    weighted = any(len(row.sampler_weights) for row in chosen)
    return {
        "target_ids_C": flat("completion_token_ids").astype(np.int64),
        "row_of_C": np.repeat(np.arange(len(chosen)), [len(its) for its in trained]),
        "behavior_logprobs_C": flat("behavior_logprobs"),
        "reference_logprobs_C": flat("reference_logprobs"),
        "coefficients_R": np.array([row.coefficient for row in chosen], dtype=np.float32),
        "token_weights_R": np.array([row.token_weight for row in chosen], dtype=np.float32),
        "sampler_weights_C": flat("sampler_weights") if weighted else np.zeros(0, np.float32),
    }


def _empty_micro_batch() -> MicroBatch:
    """One token of weight 0, for a rank that has no rows but takes part in the collectives."""
    zero, zero_f = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
    return MicroBatch(
        rows_R=np.array([-1]),
        widths_S=np.array([2]),
        input_ids_SL=np.zeros((1, 2), dtype=np.int64),
        position_ids_SL=None,
        segments_3SL=None,
        tokens=0,
        positions_C=zero,
        target_ids_C=zero,
        row_of_C=zero,
        behavior_logprobs_C=zero_f,
        reference_logprobs_C=zero_f,
        coefficients_R=zero_f,
        token_weights_R=zero_f,
        sampler_weights_C=np.zeros(0, np.float32),
    )


def chosen_rows(sequences: Sequences, rows: Sequence[TrainRow]) -> Chosen:
    """The rows of a micro-batch, as `micro_batch` takes them."""
    indices = [index for sequence in sequences for index in sequence]
    return indices, [rows[index] for index in indices], [len(sequence) for sequence in sequences]


def exchange(
    comm: Comm, plan: Sequence[Sequence[Sequences]], rows: Sequence[TrainRow], layout: Layout
) -> list[MicroBatch]:
    """This rank's micro-batches of rank 0's `plan` and `rows`; those of other ranks are not read.
    Collective.

    Padding, positions and targets are computed on the receiving rank. A token costs 4 bytes of
    traffic, and each kind of log-prob 4 bytes per completion token.
    """
    # A generator: rank 0 holds what it sends to one rank at a time.
    chosen = ([chosen_rows(batch, rows) for batch in batches] for batches in plan)
    mine = comm.scatter(chosen if comm.is_main else None)
    return [micro_batch(*each, layout.packing) for each in mine]


def values_of_rows(microbatch: MicroBatch, values_C: np.ndarray) -> list[RowValues]:
    """The values of each row of a micro-batch, as copies."""
    ends = np.cumsum(np.bincount(microbatch.row_of_C, minlength=len(microbatch.rows_R)))
    pieces = [piece.copy() for piece in np.split(values_C, ends[:-1])]
    return list(zip(microbatch.rows_R.tolist(), pieces, strict=True))


def join_values(ranks: Sequence[Sequence[RowValues]] | None, count: int) -> list[np.ndarray]:
    """float32 [T] for each of the mini-batch's `count` rows, from the values of all ranks; nothing
    where they are None, which is off rank 0. Padding rows (-1) are left out."""
    if ranks is None:
        return []
    rows: list[np.ndarray] = [np.zeros(0, np.float32)] * count
    for row, values in (pair for of_rank in ranks for pair in of_rank):
        if row >= 0:
            rows[row] = values
    return rows


class RankStatistics(NamedTuple):
    """Of the micro-batches of one rank."""

    tokens: int
    positions: int  # that the forward passes computed: tokens and padding
    rows_R: np.ndarray  # int64; -1 for padding
    table: np.ndarray  # float64 [R, K] row statistics


def rank_statistics(
    microbatches: Sequence[MicroBatch], tables: Sequence[np.ndarray]
) -> RankStatistics:
    """Of the row statistics [R, K] of each micro-batch."""
    return RankStatistics(
        sum(microbatch.tokens for microbatch in microbatches),
        sum(microbatch.input_ids_SL.size for microbatch in microbatches),
        np.concatenate([np.zeros(0, np.int64), *(each.rows_R for each in microbatches)]),
        np.concatenate([np.zeros((0, len(ROW_STATISTICS))), *tables]),
    )


def join_statistics(
    ranks: Sequence[RankStatistics] | None, count: int
) -> tuple[np.ndarray, float] | None:
    """float64 [N, K] in the mini-batch's order, N = `count`, and the share of the positions of all
    forward passes that are padding; None where `ranks` are, which is off rank 0."""
    if ranks is None:
        return None
    found = np.zeros((count, len(ROW_STATISTICS)))
    for each in ranks:
        real_R = each.rows_R >= 0
        found[each.rows_R[real_R]] = each.table[real_R]
    positions = sum(each.positions for each in ranks)
    return found, 1 - sum(each.tokens for each in ranks) / positions if positions else 0.0


def update_result(
    table: np.ndarray,
    padding_share: float,
    grad_norm: float,
    micro_batches: int,
    learning_rate: float,
) -> UpdateResult:
    """The update's result: sums over tokens become means, which are 0 for rows without tokens."""
    column = {name: table[:, index] for index, name in enumerate(ROW_STATISTICS)}
    total = column["tokens"].sum()
    return UpdateResult(
        row_outcomes(table),
        float(column["loss"].sum()),
        grad_norm,
        float(column["reference_kl"].sum() / total) if total else 0.0,
        micro_batches,
        padding_share,
        learning_rate,
    )


def row_outcomes(table: np.ndarray) -> tuple[RolloutOutcome, ...]:
    """The outcome of each row of float64 [N, K] row statistics."""
    column = {name: table[:, index] for index, name in enumerate(ROW_STATISTICS)}
    tokens = np.maximum(column["tokens"], 1.0)
    mean = column["log_ratio"] / tokens
    return tuple(
        RolloutOutcome(*values)
        for values in zip(
            column["tokens"].astype(int).tolist(),
            (column["clipped"] / tokens).tolist(),
            mean.tolist(),
            np.maximum(column["log_ratio_squared"] / tokens - mean**2, 0.0).tolist(),
            (column["approx_kl"] / tokens).tolist(),
            (column["ratio"] / tokens).tolist(),
            (column["ratio_squared"] / tokens).tolist(),
            np.exp(np.minimum(column["log_ratio_max"], 700.0)).tolist(),
            (column["entropy"] / tokens).tolist(),
            strict=True,
        )
    )
