"""Rank 0's rows to the ranks that train on them, as bytes. numpy only."""

import io
from collections.abc import Sequence

import numpy as np

from grpo_replay.distributed.comm import Comm
from grpo_replay.replay.batch import (
    MicroBatch,
    TrainRow,
    micro_batch,
    plan_groups,
    plan_microbatches,
)


def scatter_microbatches(
    comm: Comm, rows: Sequence[TrainRow] | None, max_tokens: int, packing: bool
) -> list[MicroBatch]:
    """This rank's micro-batches of rank 0's rows (`plan_microbatches`). Collective.

    Padding, positions and targets are computed on the receiving rank. A token costs 4 bytes of
    traffic; each kind of log-prob 4 bytes per completion token, or nothing if all are zero.
    """
    if comm.world_size == 1:
        assert rows is not None
        return plan_microbatches(rows, max_tokens, 1, packing)[0]
    payloads = None
    if comm.is_main:
        assert rows is not None
        # A generator: rank 0 holds the payload of one rank at a time.
        plan = plan_groups(rows, max_tokens, comm.world_size, packing)
        payloads = (to_bytes(groups, rows) for groups in plan)
    return from_bytes(comm.scatter(payloads), packing)


def to_bytes(groups: Sequence[Sequence[int]], rows: Sequence[TrainRow]) -> memoryview:
    indices = [index for group in groups for index in group]
    chosen = [rows[index] for index in indices]
    stream = io.BytesIO()
    np.savez(
        stream,
        group_sizes=np.array([len(group) for group in groups], dtype=np.int64),
        indices=np.array(indices, dtype=np.int64),
        lengths=np.array(
            [(len(row.prompt_token_ids), len(row.completion_token_ids)) for row in chosen],
            dtype=np.int64,
        ).reshape(-1, 2),
        token_ids=_flat(
            [ids for row in chosen for ids in (row.prompt_token_ids, row.completion_token_ids)],
            np.int32,
        ),
        behavior_logprobs=_flat_unless_zero([row.behavior_logprobs for row in chosen]),
        reference_logprobs=_flat_unless_zero([row.reference_logprobs for row in chosen]),
        sampler_weights=_flat([row.sampler_weights for row in chosen], np.float32),
        coefficients=np.array([row.coefficient for row in chosen], dtype=np.float64),
        token_weights=np.array([row.token_weight for row in chosen], dtype=np.float64),
    )
    return stream.getbuffer()


def _flat(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _flat_unless_zero(arrays: Sequence[np.ndarray]) -> np.ndarray:
    zero = not any(array.any() for array in arrays)
    return _flat([] if zero else arrays, np.float32)


def from_bytes(payload: bytes | memoryview, packing: bool = False) -> list[MicroBatch]:
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        whole = dict(arrays)
    prompts_N, completions_N = whole["lengths"].T
    tokens = np.split(whole["token_ids"], np.cumsum(whole["lengths"]))
    total = int(completions_N.sum())
    behavior, reference = (
        np.split(flat if len(flat) else np.zeros(total, np.float32), np.cumsum(completions_N))
        for flat in (whole["behavior_logprobs"], whole["reference_logprobs"])
    )
    weights = np.split(whole["sampler_weights"], np.cumsum(completions_N))
    rows = [
        TrainRow(tokens[2 * i], tokens[2 * i + 1], behavior[i], reference[i],
                 whole["coefficients"][i], whole["token_weights"][i],
                 sampler_weights=weights[i])
        for i in range(len(prompts_N))
    ]  # fmt: skip
    ends = np.cumsum(whole["group_sizes"])
    return [
        micro_batch(whole["indices"][end - size : end], rows[end - size : end], packing)
        for end, size in zip(ends, whole["group_sizes"], strict=True)
    ]
