"""From a composed batch to micro-batches: mini-batches, token weights, packing, load balancing.

numpy only. Rank 0 plans for all ranks. Every rank gets the same number of micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_replay.recipe import BatchSection, LossSection
from grpo_replay.replay.sampler_weights import sampler_weights
from grpo_replay.types import Rollout


@dataclass(frozen=True, slots=True, eq=False)
class TrainRow:
    """One rollout of a mini-batch, as the engine needs it.

    `coefficient` multiplies the loss of its tokens (the frozen advantage, or AsymRE's
    `r - (V + δV)`). `token_weight` is the weight of each of its tokens in the mini-batch loss
    (`token_weights`). Both are 0 for a row that only needs log-probs. `rollout_id` is for error
    messages; -1 if unknown. `sampler_weights` multiply the surrogate; empty: all 1.
    """

    prompt_token_ids: np.ndarray  # int32 [P]
    completion_token_ids: np.ndarray  # int32 [T]
    behavior_logprobs: np.ndarray  # float32 [T]
    reference_logprobs: np.ndarray  # float32 [T]
    coefficient: float = 0.0
    token_weight: float = 0.0
    rollout_id: int = -1
    sampler_weights: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def length_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion_token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows padded on the right to one length, or packed end to end into a single sequence [1, L],
    and their completion tokens flattened row by row.

    Causal attention never looks right, so padding needs no mask. `positions_C` are indices into the
    flattened [R·L] positions, whose hidden states predict `target_ids_C`. `rows_R` are indices into
    the mini-batch. A rank without rows runs a micro-batch with `rows_R == [-1]` and weight 0.
    """

    rows_R: np.ndarray  # int64
    widths_R: np.ndarray  # int64, positions that a row takes up: its own length, or L if padded
    input_ids_RL: np.ndarray  # int64
    positions_C: np.ndarray  # int64
    target_ids_C: np.ndarray  # int64
    row_of_C: np.ndarray  # int64, 0 .. R-1
    behavior_logprobs_C: np.ndarray  # float32
    reference_logprobs_C: np.ndarray  # float32
    coefficients_R: np.ndarray  # float32
    token_weights_R: np.ndarray  # float32
    sampler_weights_C: np.ndarray  # float32; empty: all 1

    @property
    def position_ids_RL(self) -> np.ndarray | None:
        """int64 [1, L], beginning at 0 for each row of a pack; None if every row is a sequence."""
        if len(self.input_ids_RL) == len(self.rows_R):
            return None
        return np.concatenate([np.arange(width) for width in self.widths_R])[None]

    @property
    def bounds(self) -> np.ndarray | None:
        """int32 [R + 1]: where each row of a pack begins, and L; None if every row is a sequence.
        Flash attention takes a pack apart by them."""
        if len(self.input_ids_RL) == len(self.rows_R):
            return None
        return np.concatenate([[0], np.cumsum(self.widths_R)]).astype(np.int32)


def logprob_row(prompt_token_ids: np.ndarray, completion_token_ids: np.ndarray) -> TrainRow:
    """A row that only needs log-probs."""
    zeros_T = np.zeros(len(completion_token_ids), dtype=np.float32)
    return TrainRow(prompt_token_ids, completion_token_ids, zeros_T, zeros_T)


def mini_batch_indices(
    count: int, settings: BatchSection, generator: np.random.Generator
) -> list[np.ndarray]:
    """A random split of `count` rollouts into even parts, one per optimizer update.

    `updates_per_step` parts, or ceil(count / mini_batch_rollouts). Part sizes differ by at most
    one. No part is empty: with fewer rollouts than `updates_per_step` there are fewer parts.
    """
    if count == 0:
        return []
    parts = min(settings.updates_of(count), count)
    return [np.sort(part) for part in np.array_split(generator.permutation(count), parts)]


def token_weights(
    lengths_N: np.ndarray, settings: LossSection, max_completion_length: int
) -> np.ndarray:
    """float64 [N]: the weight of each token of rollout i in the loss of its mini-batch.

    The denominator is that of the whole mini-batch, over all ranks and micro-batches:
    `token_mean` 1 / Σ T, `sequence_mean` 1 / (N·T_i), `constant` 1 / (N·max_completion_length)
    (Dr. GRPO). AsymRE weights the log-prob of a whole rollout: 1 / N.
    """
    count = len(lengths_N)
    if count == 0:
        return np.zeros(0)
    if settings.kind == "asymre":
        return np.full(count, 1.0 / count)
    if settings.aggregation == "token_mean":
        return np.full(count, 1.0 / max(int(lengths_N.sum()), 1))
    if settings.aggregation == "sequence_mean":
        return 1.0 / (count * np.maximum(lengths_N, 1))
    return np.full(count, 1.0 / (count * max_completion_length))


def loss_coefficient(rollout: Rollout, settings: LossSection) -> float:
    """The frozen advantage; for AsymRE `r - (V + δV)`, V the group's mean reward (paper B)."""
    assert rollout.advantage is not None, f"rollout {rollout.rollout_id} was dropped"
    if settings.kind == "asymre":
        assert rollout.reward is not None and rollout.group_reward_mean is not None  # it was kept
        return rollout.reward - (rollout.group_reward_mean + settings.asymre_delta)
    return rollout.advantage


def train_rows(
    rollouts: Sequence[Rollout],
    reference_logprobs: Sequence[np.ndarray] | None,
    settings: LossSection,
    max_completion_length: int,
) -> list[TrainRow]:
    """The rows of one mini-batch. Their token weights contain its normalisation."""
    lengths_N = np.array([len(rollout.completion_token_ids) for rollout in rollouts])
    weights_N = token_weights(lengths_N, settings, max_completion_length)
    rows = []
    for index, rollout in enumerate(rollouts):
        behavior_T = rollout.behavior_logprobs
        assert behavior_T is not None, f"rollout {rollout.rollout_id} has no behaviour log-probs"
        reference_T = reference_logprobs[index] if reference_logprobs else np.zeros_like(behavior_T)
        rows.append(
            TrainRow(
                rollout.prompt_token_ids,
                rollout.completion_token_ids,
                behavior_T,
                reference_T,
                loss_coefficient(rollout, settings),
                float(weights_N[index]),
                rollout.rollout_id,
                sampler_weights(rollout, settings),
            )
        )
    return rows


def plan_microbatches(
    rows: Sequence[TrainRow], max_tokens: int, world_size: int, packing: bool = False
) -> list[list[MicroBatch]]:
    """Micro-batches for each rank: the same number per rank, with balanced numbers of tokens.

    Rows are dealt to the ranks from longest to shortest in snake order, so that all ranks get
    similar lengths. Each rank groups neighbouring rows while the padded size (rows times longest)
    is at most `max_tokens`; with `packing`, any rows whose lengths add up to that. A row longer
    than that gets a micro-batch of its own.
    """
    return [
        [micro_batch(group, [rows[index] for index in group], packing) for group in groups]
        for groups in plan_groups(rows, max_tokens, world_size, packing)
    ]


def plan_groups(
    rows: Sequence[TrainRow], max_tokens: int, world_size: int, packing: bool = False
) -> list[list[list[int]]]:
    """Row indices of each micro-batch of each rank. An empty list is a micro-batch without rows."""
    longest_first = sorted(range(len(rows)), key=lambda i: (-rows[i].length_tokens, i))
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    for position, index in enumerate(longest_first):
        turn, seat = divmod(position, world_size)
        dealt[seat if turn % 2 == 0 else world_size - 1 - seat].append(index)
    grouped = [(_packs if packing else _padded)(indices, rows, max_tokens) for indices in dealt]
    count = max(1, *(len(groups) for groups in grouped)) if rows else 0
    return [groups + [[] for _ in range(count - len(groups))] for groups in grouped]


def _packs(indices: Sequence[int], rows: Sequence[TrainRow], max_tokens: int) -> list[list[int]]:
    """First fit: the longest rows open packs, and shorter ones fill them."""
    groups: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        length = rows[index].length_tokens
        fitting = next((place for place, left in enumerate(room) if length <= left), len(room))
        if fitting == len(room):
            groups.append([])
            room.append(max_tokens)
        groups[fitting].append(index)
        room[fitting] -= length
    return groups


def _padded(indices: Sequence[int], rows: Sequence[TrainRow], max_tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for index in indices:  # longest first: a group's first row sets its padded length
        if groups and (len(groups[-1]) + 1) * rows[groups[-1][0]].length_tokens <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def micro_batch(
    indices: Sequence[int] | np.ndarray, chosen: Sequence[TrainRow], packing: bool
) -> MicroBatch:
    if not chosen:
        return _empty_micro_batch()
    lengths_R = np.array([row.length_tokens for row in chosen])
    widths_R = lengths_R if packing else np.full(len(chosen), lengths_R.max())
    input_ids = np.zeros(widths_R.sum(), dtype=np.int64)
    positions, row_of = [], []
    for r, (row, end) in enumerate(zip(chosen, np.cumsum(widths_R), strict=True)):
        start = end - widths_R[r]
        prompt_tokens, total_tokens = len(row.prompt_token_ids), row.length_tokens
        input_ids[start : start + prompt_tokens] = row.prompt_token_ids
        input_ids[start + prompt_tokens : start + total_tokens] = row.completion_token_ids
        positions.append(start + np.arange(prompt_tokens - 1, total_tokens - 1))
        row_of.append(np.full(total_tokens - prompt_tokens, r))
    return MicroBatch(
        rows_R=np.asarray(indices, dtype=np.int64),
        widths_R=widths_R,
        input_ids_RL=input_ids.reshape(1 if packing else len(chosen), -1),
        positions_C=np.concatenate(positions).astype(np.int64),
        target_ids_C=np.concatenate([row.completion_token_ids for row in chosen]).astype(np.int64),
        row_of_C=np.concatenate(row_of).astype(np.int64),
        behavior_logprobs_C=np.concatenate([row.behavior_logprobs for row in chosen]),
        reference_logprobs_C=np.concatenate([row.reference_logprobs for row in chosen]),
        coefficients_R=np.array([row.coefficient for row in chosen], dtype=np.float32),
        token_weights_R=np.array([row.token_weight for row in chosen], dtype=np.float32),
        sampler_weights_C=np.concatenate([row.sampler_weights for row in chosen]),
    )


def _empty_micro_batch() -> MicroBatch:
    """One token of weight 0, for a rank that has no rows but takes part in the collectives."""
    zero, zero_f = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
    return MicroBatch(
        rows_R=np.array([-1]),
        widths_R=np.array([2]),
        input_ids_RL=np.zeros((1, 2), dtype=np.int64),
        positions_C=zero,
        target_ids_C=zero,
        row_of_C=zero,
        behavior_logprobs_C=zero_f,
        reference_logprobs_C=zero_f,
        coefficients_R=zero_f,
        token_weights_R=zero_f,
        sampler_weights_C=np.zeros(0, np.float32),
    )
