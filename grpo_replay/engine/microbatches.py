"""Micro-batches: a mini-batch's rows are distributed over the ranks, one forward pass for each
micro-batch (`plan_sequences`, `exchange`), and the ranks' results brought back to the order of the
rows (`join_…`).

Arrays only: no DeepSpeed, no process group. Rank 0 plans for all ranks and sends them their rows.
Every rank gets the same number of micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine import UpdateResult
from grpo_replay.engine.shared_prompts import (
    Grouping,
    Layout,
    Lengths,
    assign_to_ranks,
    group_rows,
)
from grpo_replay.replay.batch import TrainRow
from grpo_replay.replay.loss import ROW_STATISTICS
from grpo_replay.types import RolloutOutcome

MicroBatchRows = tuple[list[int], list[TrainRow], list[int]]
"""The rows of a micro-batch: their indices, the rows, and the number of rows of each sequence."""
RowValues = tuple[int, np.ndarray]
"""The index of a row in the mini-batch, and a value for each of its trained tokens."""

PADDING = -1
"""The segment of padding."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """S sequences, padded on the right to one length, or packed end to end into one [1, L], and
    the C trained completion tokens of their R rows, flattened row by row.

    A sequence is a row, or several rows that share prompts: the common prefix of their prompts,
    then for every prompt the rest of it and its completions. `positions_C` are indices into the
    flattened positions, whose hidden states predict `target_ids_C`; the first tokens of completions
    that share a prompt have the same position. `rows_R` are indices into the mini-batch. A rank
    without rows runs a micro-batch with `rows_R == [-1]` and weight 0.

    `position_ids_SL` and `segments_3SL` are None where each sequence is one row: causal attention
    never looks right, so padding needs no mask. `segments_3SL` holds three segments for every
    position: its own (a common prefix, the rest of a prompt, or a completion), the rest of its
    prompt, and its common prefix. A position attends to these three, up to itself.
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
        """int32 [S + 1]: the start of each row of a pack, and L, by which flash attention separates
        the rows; None if rows are not packed, or share prompts."""
        if self.position_ids_SL is None or self.segments_3SL is not None:
            return None
        return np.concatenate([[0], np.cumsum(self.widths_S)]).astype(np.int32)


def plan_sequences(rows: Sequence[TrainRow], layout: Layout, ranks: int) -> list[list[Grouping]]:
    """Plan the micro-batches of every rank: `plan[rank][micro_batch]` are the row indices of each
    sequence. All ranks have the same number of micro-batches, and balanced numbers of tokens; a
    micro-batch without rows is an empty list.

    Sequences (`group_rows`) are assigned to ranks (`assign_to_ranks`). Each rank puts neighbouring
    ones into a micro-batch while its padded size (sequences times longest) is at most `max_tokens`;
    with `packing`, any whose lengths add up to that. A longer row is a micro-batch of its own.
    """
    lengths = Lengths(rows)
    sequences = group_rows(lengths, layout, ranks)
    tokens = list(map(lengths.sequence_tokens, sequences))
    fill = _packed_batches if layout.packing else _padded_batches
    plan = [
        [[sequences[index] for index in batch] for batch in fill(rank, tokens, layout.max_tokens)]
        for rank in assign_to_ranks(sequences, lengths, ranks)
    ]
    count = max(1, *(len(batches) for batches in plan)) if rows else 0
    return [batches + [[] for _ in range(count - len(batches))] for batches in plan]


def _packed_batches(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Grouping:
    """Pack by first fit: the longest sequences open packs, and shorter ones fill them."""
    packs: Grouping = []
    room: list[int] = []
    for index in indices:
        length = lengths[index]
        fitting = next((pack for pack, left in enumerate(room) if length <= left), len(room))
        if fitting == len(room):
            packs.append([])
            room.append(max_tokens)
        packs[fitting].append(index)
        room[fitting] -= length
    return packs


def _padded_batches(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Grouping:
    """Put neighbouring sequences into a batch while its padded size is at most `max_tokens`."""
    batches: Grouping = []
    for index in indices:  # longest first: a batch's first sequence sets its padded length
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def micro_batch(
    indices: Sequence[int], rows: Sequence[TrainRow], sizes: Sequence[int], packing: bool
) -> MicroBatch:
    """Make the micro-batch of `rows`, whose indices in the mini-batch are `indices`. `sizes` are
    the numbers of neighbouring rows of each sequence (`group_rows`)."""
    if not rows:
        return _empty_micro_batch()
    ends = np.cumsum(sizes).tolist()
    sequences = [range(start, end) for start, end in pairwise([0, *ends])]
    lengths = Lengths(rows)
    lengths_S = np.array(list(map(lengths.sequence_tokens, sequences)))
    widths_S = lengths_S if packing else np.full(len(sequences), lengths_S.max())
    trained = [row.trained_C for row in rows]
    flat, positions_C = _lay_out(rows, trained, sequences, widths_S, lengths)
    ids_SL, position_ids_SL, *segments = flat.reshape(5, 1 if packing else len(sequences), -1)
    shares_prompts = len(sequences) < len(rows)
    is_packed = len(sequences) > len(ids_SL)
    return MicroBatch(
        rows_R=np.asarray(indices, dtype=np.int64),
        widths_S=widths_S,
        input_ids_SL=ids_SL,
        position_ids_SL=position_ids_SL if shares_prompts or is_packed else None,
        segments_3SL=np.stack(segments) if shares_prompts else None,
        tokens=int(lengths_S.sum()),
        positions_C=positions_C,
        **_columns(rows, trained),
    )


def _lay_out(
    rows: Sequence[TrainRow],
    trained: Sequence[np.ndarray],
    sequences: Sequence[range],
    widths_S: np.ndarray,
    lengths: Lengths,
) -> tuple[np.ndarray, np.ndarray]:
    """Lay sequences out one after the other. Returns int64 [5, positions] (token id, position id,
    own segment, segment of the rest of the prompt, segment of the common prefix; padding is in
    segment -1), and `positions_C`.

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
    labels: list[tuple[int, ...]] = []  # per piece: position id of its first token, segments
    end = 0

    def append(token_ids: np.ndarray, first_position: int, *segments: int) -> None:
        nonlocal end
        pieces.append(token_ids)
        labels.append((first_position, *segments))
        end += len(token_ids)

    count, last_of_prompts, before_completions = len(rows), [], []
    sequence_ends = np.cumsum(widths_S).tolist()
    for s, (sequence, sequence_end) in enumerate(zip(sequences, sequence_ends, strict=True)):
        prefix_tokens, prefix, prompt = lengths.prefix_tokens(sequence), count + s, None
        append(rows[sequence[0]].prompt_token_ids[:prefix_tokens], 0, prefix, prefix, prefix)
        last_of_prefix = end - 1
        for r in sequence:
            prompt_ids = rows[r].prompt_token_ids
            if lengths.prompt_of[r] != prompt:
                prompt, rest = lengths.prompt_of[r], 2 * count + r
                append(prompt_ids[prefix_tokens:], prefix_tokens, rest, rest, prefix)
                has_rest = len(prompt_ids) > prefix_tokens
                last_of_prompt = end - 1 if has_rest else last_of_prefix
            last_of_prompts.append(last_of_prompt)
            before_completions.append(end - 1)
            append(rows[r].completion_token_ids, len(prompt_ids), r, rest, prefix)
        append(np.zeros(sequence_end - end, np.int32), 0, PADDING, PADDING, PADDING)
    sizes_P, labels_4P = np.array([len(piece) for piece in pieces]), np.array(labels).T
    starts_P = np.cumsum(sizes_P) - sizes_P
    flat = np.empty((5, end), dtype=np.int64)
    flat[0] = np.concatenate(pieces)
    flat[1] = np.arange(end) + np.repeat(labels_4P[0] - starts_P, sizes_P)
    flat[2:] = np.repeat(labels_4P[1:], sizes_P, axis=1)
    flat[1, flat[2] == PADDING] = 0
    counts, token_C = [len(tokens) for tokens in trained], np.concatenate(trained)
    first_C = np.repeat(last_of_prompts, counts)
    later_C = np.repeat(before_completions, counts)
    return flat, np.where(token_C == 0, first_C, later_C + token_C).astype(np.int64)


def _columns(rows: Sequence[TrainRow], trained: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Make the fields of a micro-batch with a value for each trained token or each row. `trained`
    has the indices of every row's completion tokens that train."""

    def flat(name: str) -> np.ndarray:
        return np.concatenate(
            [getattr(row, name)[tokens] for row, tokens in zip(rows, trained, strict=True)]
        )

    weighted = any(len(row.sampler_weights) for row in rows)
    return {
        "target_ids_C": flat("completion_token_ids").astype(np.int64),
        "row_of_C": np.repeat(np.arange(len(rows)), [len(tokens) for tokens in trained]),
        "behavior_logprobs_C": flat("behavior_logprobs"),
        "reference_logprobs_C": flat("reference_logprobs"),
        "coefficients_R": np.array([row.coefficient for row in rows], dtype=np.float32),
        "token_weights_R": np.array([row.token_weight for row in rows], dtype=np.float32),
        "sampler_weights_C": flat("sampler_weights") if weighted else np.zeros(0, np.float32),
    }


def _empty_micro_batch() -> MicroBatch:
    """Make one token of weight 0, for a rank without rows that must take part in collectives."""
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


def micro_batch_rows(sequences: Grouping, rows: Sequence[TrainRow]) -> MicroBatchRows:
    """Returns the rows of a micro-batch, the first arguments of `micro_batch`."""
    indices = [index for sequence in sequences for index in sequence]
    return indices, [rows[index] for index in indices], [len(sequence) for sequence in sequences]


def exchange(
    comm: Comm, plan: Sequence[Sequence[Grouping]], rows: Sequence[TrainRow], layout: Layout
) -> list[MicroBatch]:
    """Send each rank its rows by rank 0's `plan`, and return this rank's micro-batches. `plan` and
    `rows` of other ranks are not read. Collective.

    Padding, positions and targets are computed on the receiving rank. A token costs 4 bytes of
    traffic, and each kind of log-prob 4 bytes per completion token.
    """
    # A generator: rank 0 holds what it sends to one rank at a time.
    rows_of_ranks = ([micro_batch_rows(batch, rows) for batch in batches] for batches in plan)
    mine = comm.scatter(rows_of_ranks if comm.is_main else None)
    return [micro_batch(*batch_rows, layout.packing) for batch_rows in mine]


def values_of_rows(microbatch: MicroBatch, values_C: np.ndarray) -> list[RowValues]:
    """Split a micro-batch's values by row; the arrays are copies."""
    ends = np.cumsum(np.bincount(microbatch.row_of_C, minlength=len(microbatch.rows_R)))
    pieces = [piece.copy() for piece in np.split(values_C, ends[:-1])]
    return list(zip(microbatch.rows_R.tolist(), pieces, strict=True))


def join_values(ranks: Sequence[Sequence[RowValues]] | None, count: int) -> list[np.ndarray]:
    """Join the values of all ranks: float32 [T] for each of the mini-batch's `count` rows. Empty
    off rank 0, where `ranks` is None. Padding rows (-1) are left out."""
    if ranks is None:
        return []
    joined: list[np.ndarray] = [np.zeros(0, np.float32)] * count
    for row, values in chain.from_iterable(ranks):
        if row >= 0:
            joined[row] = values
    return joined


class RankStatistics(NamedTuple):
    """Statistics of one rank's micro-batches."""

    tokens: int
    positions: int  # that the forward passes computed: tokens and padding
    rows_R: np.ndarray  # int64; -1 for padding
    table: np.ndarray  # float64 [R, K] row statistics


def rank_statistics(
    microbatches: Sequence[MicroBatch], tables: Sequence[np.ndarray]
) -> RankStatistics:
    """Join one rank's micro-batches: `tables` has the row statistics [R, K] of each. No
    micro-batches give empty arrays."""
    return RankStatistics(
        sum(microbatch.tokens for microbatch in microbatches),
        sum(microbatch.input_ids_SL.size for microbatch in microbatches),
        np.concatenate([np.zeros(0, np.int64), *(batch.rows_R for batch in microbatches)]),
        np.concatenate([np.zeros((0, len(ROW_STATISTICS))), *tables]),
    )


def join_statistics(
    ranks: Sequence[RankStatistics] | None, count: int
) -> tuple[np.ndarray, float] | None:
    """Join all ranks' statistics: float64 [N, K] in the mini-batch's order, N = `count`, and the
    share of padding among the positions of all forward passes. None off rank 0 (`ranks` None)."""
    if ranks is None:
        return None
    table = np.zeros((count, len(ROW_STATISTICS)))
    for rank in ranks:
        real_R = rank.rows_R >= 0
        table[rank.rows_R[real_R]] = rank.table[real_R]
    positions = sum(rank.positions for rank in ranks)
    return table, 1 - sum(rank.tokens for rank in ranks) / positions if positions else 0.0


def update_result(
    table: np.ndarray,
    padding_share: float,
    grad_norm: float,
    micro_batches: int,
    learning_rate: float,
) -> UpdateResult:
    """Make the update's result of row statistics, float64 [N, K]: sums over tokens become means,
    which are 0 for rows without tokens."""
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
    """Make the outcome of every row from float64 [N, K] row statistics: means per trained token,
    the variance of its log-ratios, and its largest ratio."""
    column = {name: table[:, index] for index, name in enumerate(ROW_STATISTICS)}
    tokens = np.maximum(column["tokens"], 1.0)
    log_ratio_mean = column["log_ratio"] / tokens
    return tuple(
        RolloutOutcome(*values)
        for values in zip(
            column["tokens"].astype(int).tolist(),
            (column["clipped"] / tokens).tolist(),
            log_ratio_mean.tolist(),
            np.maximum(column["log_ratio_squared"] / tokens - log_ratio_mean**2, 0.0).tolist(),
            (column["approx_kl"] / tokens).tolist(),
            (column["ratio"] / tokens).tolist(),
            (column["ratio_squared"] / tokens).tolist(),
            np.exp(np.minimum(column["log_ratio_max"], 700.0)).tolist(),
            (column["entropy"] / tokens).tolist(),
            strict=True,
        )
    )
