"""Results of the ranks for their rows: packed for sending, unpacked in the mini-batch's order.

Arrays and bytes only: no DeepSpeed, no process group.
"""

from collections.abc import Sequence

import numpy as np

from grpo_replay.engine.engine_protocol import UpdateResult
from grpo_replay.engine.microbatches import MicroBatch
from grpo_replay.replay.loss import ROW_STATISTICS
from grpo_replay.types import RolloutOutcome

_PACKED_COLUMNS = 1 + len(ROW_STATISTICS)
"""Row, statistics."""


def pack_tokens(parts: Sequence[tuple[MicroBatch, np.ndarray]]) -> tuple[bytes, bytes]:
    """One rank's float32 value per completion token of its micro-batches, as bytes to send: (index
    and length of each row, values)."""
    lengths, values = [np.zeros((0, 2), np.int64)], [np.zeros(0, np.float32)]
    for microbatch, values_C in parts:
        lengths_R = np.bincount(microbatch.row_of_C, minlength=len(microbatch.rows_R))
        lengths.append(np.column_stack([microbatch.rows_R, lengths_R]))
        values.append(values_C)
    return (
        np.concatenate(lengths).astype(np.int64).tobytes(),
        np.concatenate(values).astype(np.float32).tobytes(),
    )


def unpack_tokens(
    lengths: Sequence[bytes], values: Sequence[bytes], count: int
) -> list[np.ndarray]:
    """float32 [T] for each of the mini-batch's `count` rows, from what all ranks packed. Padding
    rows (-1) are left out."""
    table = np.concatenate([np.frombuffer(p, np.int64).reshape(-1, 2) for p in lengths])
    flat = np.concatenate([np.frombuffer(p, np.float32) for p in values])
    pieces = np.split(flat, np.cumsum(table[:, 1])[:-1])
    rows: list[np.ndarray] = [np.zeros(0, np.float32)] * count
    for row, piece in zip(table[:, 0], pieces, strict=True):
        if row >= 0:
            rows[row] = piece.copy()
    return rows


def pack_statistics(microbatches: Sequence[MicroBatch], tables: Sequence[np.ndarray]) -> bytes:
    """One rank's float64 [R, K] row statistics of each micro-batch, as bytes to send, behind the
    numbers of tokens and of positions that its forward passes computed."""
    mine = [
        np.column_stack([microbatch.rows_R, table])
        for microbatch, table in zip(microbatches, tables, strict=True)
    ]
    tokens = sum(microbatch.tokens for microbatch in microbatches)
    positions = sum(microbatch.input_ids_SL.size for microbatch in microbatches)
    everything = [np.zeros((0, _PACKED_COLUMNS)), *mine]
    return np.array([tokens, positions], float).tobytes() + np.concatenate(everything).tobytes()


def unpack_statistics(payloads: Sequence[bytes], count: int) -> tuple[np.ndarray, float]:
    """float64 [N, K] in the mini-batch's order, N = `count`, and the share of the positions of all
    forward passes that are padding, from what all ranks packed."""
    arrays = [np.frombuffer(payload) for payload in payloads]
    tokens, positions = np.sum([array[:2] for array in arrays], axis=0)
    everything = np.concatenate([array[2:].reshape(-1, _PACKED_COLUMNS) for array in arrays])
    table = np.zeros((count, len(ROW_STATISTICS)))
    real = everything[everything[:, 0] >= 0]
    table[real[:, 0].astype(np.int64)] = real[:, 1:]
    return table, float(1 - tokens / positions) if positions else 0.0


def update_result(
    table: np.ndarray,
    grad_norm: float,
    micro_batches: int,
    padding_share: float,
    learning_rate: float,
) -> UpdateResult:
    """The update's result: sums over tokens become means, which are 0 for rows without tokens."""
    column = {name: table[:, index] for index, name in enumerate(ROW_STATISTICS)}
    tokens = np.maximum(column["tokens"], 1.0)
    mean = column["log_ratio"] / tokens
    outcomes = tuple(
        RolloutOutcome(*values)
        for values in zip(
            column["tokens"].astype(int).tolist(),
            (column["clipped"] / tokens).tolist(),
            mean.tolist(),
            np.maximum(column["log_ratio_squared"] / tokens - mean**2, 0.0).tolist(),
            (column["approx_kl"] / tokens).tolist(),
            (column["ratio"] / tokens).tolist(),
            np.exp(np.minimum(column["log_ratio_max"], 700.0)).tolist(),
            (column["entropy"] / tokens).tolist(),
            strict=True,
        )
    )
    total = column["tokens"].sum()
    return UpdateResult(
        outcomes,
        float(column["loss"].sum()),
        grad_norm,
        float(column["reference_kl"].sum() / total) if total else 0.0,
        micro_batches,
        padding_share,
        learning_rate,
    )
