"""Splits a composed batch into mini-batches and makes their rows, with the weights of their tokens.

numpy only. Rank 0 does this for all ranks; `engine/microbatches.py` assigns the rows to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_replay.recipe import BatchSection, LossSection
from grpo_replay.types import ComposedBatch, Rollout

MAX_LOG_WEIGHT = 80.0  # exp(80) is finite in float32


@dataclass(frozen=True, slots=True, eq=False)
class TrainRow:
    """One rollout of a mini-batch, as the engine needs it.

    `coefficient` multiplies the loss of every token (`loss_coefficient`); `token_weight` is the
    weight of a token in the mini-batch loss (`token_weights`). Both are 0 for a row that only
    needs log-probs. `rollout_id` is for error messages; -1 if unknown. `sampler_weights` multiply
    the surrogate; if empty, all are 1. The engine returns results for the tokens where
    `completion_mask` is True; without a mask, for all.
    """

    prompt_token_ids: np.ndarray  # int32 [P]
    completion_token_ids: np.ndarray  # int32 [T]
    behavior_logprobs: np.ndarray  # float32 [T]
    reference_logprobs: np.ndarray  # float32 [T]
    coefficient: float = 0.0
    token_weight: float = 0.0
    rollout_id: int = -1
    sampler_weights: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    completion_mask: np.ndarray | None = None  # bool [T]

    @property
    def trained_C(self) -> np.ndarray:
        """Indices of the completion tokens that train, int64 [≤ T]."""
        if self.completion_mask is None:
            return np.arange(len(self.completion_token_ids))
        return np.flatnonzero(self.completion_mask)

    @property
    def length_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion_token_ids)


def logprob_row(prompt_token_ids: np.ndarray, completion_token_ids: np.ndarray) -> TrainRow:
    """Make a row that only needs log-probs, from int32 [P] and [T]."""
    zeros_T = np.zeros(len(completion_token_ids), dtype=np.float32)
    return TrainRow(prompt_token_ids, completion_token_ids, zeros_T, zeros_T)


def even_sizes(count: int, parts: int) -> list[int]:
    """Sizes of `parts` parts of `count` items that differ by at most one, the larger ones first.
    Some are 0 if there are more parts than items. Example: 8 items in 3 parts are [3, 3, 2]."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def mini_batch_indices(
    count: int, settings: BatchSection, generator: np.random.Generator
) -> list[np.ndarray]:
    """Split `count` rollouts at random into even parts, one for each optimizer update of an epoch.
    Returns the ascending indices of each part, int64.

    There are `updates_per_step` or ceil(count / mini_batch_rollouts) parts, whose sizes differ by
    at most one. No part is empty: of fewer rollouts, each is a part.
    """
    if count == 0:
        return []
    parts = min(settings.updates_of(count), count)
    ends = np.cumsum(even_sizes(count, parts))[:-1]
    return [np.sort(part) for part in np.split(generator.permutation(count), ends)]


def update_indices(
    batch: ComposedBatch, settings: BatchSection, generator: np.random.Generator
) -> list[np.ndarray]:
    """Returns the indices of the rollouts of each optimizer update, int64. A step that drew for
    each update trains on those draws; otherwise each of `batch.epochs` passes makes a random split
    (`mini_batch_indices`). No update is empty."""
    update_N = batch.draw.update_N if batch.trains_on_draw else None
    if update_N is None:
        count = len(batch.rollouts)
        passes = [mini_batch_indices(count, settings, generator) for _ in range(settings.epochs)]
        return [part for parts in passes for part in parts]
    return [np.flatnonzero(update_N == update) for update in np.unique(update_N)]


def token_weights(
    lengths_N: np.ndarray, settings: LossSection, max_completion_length: int
) -> np.ndarray:
    """Compute the weight of each token of rollout i in the loss of its mini-batch, float64 [N].

    `lengths_N` has the number T_i of tokens of rollout i that train. The denominator is that of the
    whole mini-batch, over all ranks and micro-batches:
    `token_mean` 1 / Σ T, `sequence_mean` 1 / (N·T_i), `constant` 1 / (N·max_completion_length)
    (Dr. GRPO); 1 / N for a loss that sums over a rollout's tokens (`LossFacts`).
    """
    count = len(lengths_N)
    if count == 0:
        return np.zeros(0)
    if settings.facts.sums_rollouts:
        return np.full(count, 1.0 / count)
    if settings.aggregation == "token_mean":
        return np.full(count, 1.0 / max(int(lengths_N.sum()), 1))
    if settings.aggregation == "sequence_mean":
        return 1.0 / (count * np.maximum(lengths_N, 1))
    return np.full(count, 1.0 / (count * max_completion_length))


def loss_coefficient(rollout: Rollout, settings: LossSection) -> float:
    """Returns the factor of a rollout's token losses: its frozen advantage, or `r - (V + δV)` for a
    loss with a `baseline_shift` δV (AsymRE of paper B), where V is the group's mean reward."""
    assert rollout.advantage is not None, f"rollout {rollout.rollout_id} was dropped"
    shift = settings.facts.baseline_shift
    if shift is None:
        return rollout.advantage
    assert rollout.reward is not None and rollout.group_reward_mean is not None  # a kept rollout
    return rollout.reward - (rollout.group_reward_mean + shift)


def train_rows(
    rollouts: Sequence[Rollout],
    reference_logprobs: Sequence[np.ndarray] | None,
    settings: LossSection,
    max_completion_length: int,
) -> list[TrainRow]:
    """Make the rows of one mini-batch, with token weights that normalise its loss.

    `reference_logprobs` has a float32 [T] for each rollout; None if the loss has no KL term."""
    lengths_N = np.array([rollout.trained_tokens for rollout in rollouts])
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
                rollout.completion_mask,
            )
        )
    return rows


def sampler_weights(rollout: Rollout, settings: LossSection) -> np.ndarray:
    """Compute importance weights π_b / π_sampler of the tokens, or their product over the rollout,
    float32 [T], bounded by `loss.sampler_ratio`: truncated to [low, high] (Ionides 2008; between an
    inference engine and a trainer, with high = 2: Yao et al. 2025), or 0 outside. Empty if it is
    null.

    π_b is the trainer's, frozen at birth. In sync mode it has the weights of the sampler, and a
    token's importance weight differs from 1 only by the rounding of two implementations. Multiplied
    by the ratio π_θ / π_b of the loss it is π_θ / π_sampler: no ratio is applied twice.
    """
    bounds = settings.sampler_ratio
    if bounds is None:
        return np.zeros(0, np.float32)
    assert rollout.behavior_logprobs is not None
    log_ratios_T = rollout.behavior_logprobs.astype(np.float64) - rollout.sampler_logprobs
    if bounds.level == "sequence":
        mask_T = rollout.completion_mask
        log_ratios_T[:] = log_ratios_T.sum(where=True if mask_T is None else mask_T)
    weights_T = np.exp(np.minimum(log_ratios_T, MAX_LOG_WEIGHT))
    if bounds.action == "truncate":
        return weights_T.clip(bounds.low, bounds.high).astype(np.float32)
    return np.where(bounds.excludes(log_ratios_T), 0.0, weights_T).astype(np.float32)
