"""The metrics and counters that only an asynchronous training step has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_replay.collection.assembly import TakenRollouts, mean_lengths
from grpo_replay.collection.intake import Intake
from grpo_replay.collection.messages import Report
from grpo_replay.recipe import Recipe
from grpo_replay.replay import BufferStats, ReplayBuffer
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.training.metrics import (
    Metrics,
    batch_metrics,
    buffer_metrics,
    cost_metrics,
    generation_metrics,
    null_where_not_finite,
    score_metrics,
    update_metrics,
)
from grpo_replay.training.step_record import StepRecord, count_rollouts
from grpo_replay.types import ComposedBatch, Rollout


@dataclass(frozen=True, slots=True)
class SamplerShare:
    """The servers during one step. `idle` is None if none was in use. `busy_seconds` is None for a
    step repeated from the journal: its generation was in an earlier attempt."""

    busy_seconds: float | None
    idle: float | None


@dataclass(frozen=True, slots=True)
class AsyncStep:
    """What only an asynchronous step has."""

    waited_seconds: float
    sampler: SamplerShare
    straddlers: int
    outstanding_groups: int
    undrawn_evicted: int
    sampler_version: int
    ledger: dict[str, int]


class SamplerTimes:
    """Differences between the collector's reports of two steps. `ranks` is the number of trainers.

    A server that loads weights is idle, too. `busy_seconds` are GPU-seconds of the servers per
    trainer rank, so that μ compares the cost of generating a rollout with that of training on one
    (paper B).
    """

    def __init__(self, recipe: Recipe, ranks: int) -> None:
        self._gpus_per_rank = recipe.sampling.gpus_per_server / ranks
        self._last = (0.0, 0.0, 0.0)

    def step(self, report: Report, paused_seconds: float) -> SamplerShare:
        now = (report.idle_seconds, report.server_seconds, paused_seconds)
        if now[1] < self._last[1]:  # another collector
            self._last = (0.0, 0.0, self._last[2])
        idle, used, paused = (a - b for a, b in zip(now, self._last, strict=True))
        self._last = now
        if used <= 0:
            return SamplerShare(0.0, None)
        idle = min(idle + paused, used)
        return SamplerShare((used - idle) * self._gpus_per_rank, idle / used)


class UndrawnEvictions:
    """Counts the rollouts that leave the buffer in a step without ever having been drawn."""

    def __init__(self) -> None:
        self._never_drawn: set[int] = set()

    def begin(self, buffer: ReplayBuffer, fresh: Sequence[Rollout]) -> None:
        """Called before the step changes the buffer."""
        never = buffer.column("rollout_id")[buffer.column("times_used") == 0]
        self._never_drawn = {*never.tolist(), *(rollout.rollout_id for rollout in fresh)}

    def end(self, buffer: ReplayBuffer, batch: ComposedBatch) -> int:
        """The number of them that are neither stored nor in the step's draw."""
        if not buffer.settings.replays:
            return 0
        drawn = {rollout.rollout_id for rollout in batch.draw.rollouts}
        return len(self._never_drawn - set(buffer.column("rollout_id").tolist()) - drawn)


def count_async_step(
    state: RunState, intake: Intake | None, taken: TakenRollouts, batch: ComposedBatch
) -> None:
    """Advance the counters of the run by one step. Those of rank 0 are complete."""
    count_rollouts(state, taken.generated, batch)
    if intake is not None:
        arrivals = intake.arrivals
        state.prompt_cursor = arrivals.records
        state.next_group_id = arrivals.arrived_groups
        state.next_rollout_id = arrivals.arrived_groups * intake.recipe.sampling.group_size


def async_step_metrics(
    recipe: Recipe,
    state: RunState,
    record: StepRecord,
    buffer: BufferStats,
    seconds: dict[str, float],
    step: AsyncStep,
) -> dict[str, Any]:
    """The row of metrics.jsonl (see docs/metrics.md)."""
    gap = record.gap
    busy = step.sampler.busy_seconds
    seconds = {**seconds, "generation": busy or 0.0}
    return null_where_not_finite(
        {
            "step": record.step,
            **_generation(record.generated, recipe.sampling.group_size),
            **score_metrics(record.generated, recipe.reward.score_names),
            **update_metrics(record.results, recipe.loss.beta),
            **batch_metrics(record.batch, record.outcomes, len(record.fresh)),
            **buffer_metrics(buffer),
            "sampler/logprob_gap_mean": gap.mean if gap else None,
            "sampler/logprob_gap_max": gap.max if gap else None,
            "sampler/policy_version": step.sampler_version,
            **cost_metrics(seconds, record.generated, record.batch.rollouts, busy is not None),
            **_asynchrony(record, seconds, step),
            **step.ledger,
            "num_tokens": state.processed_tokens,
        }
    )


def _generation(generated: Sequence[Rollout], group_size: int) -> Metrics:
    """As in synchronous runs; null in a step in which nothing arrived."""
    if generated:
        return generation_metrics(generated, group_size)
    return {
        "reward": None, "reward_std": None, "reward/missing_fraction": None,
        "frac_reward_zero_std": None,
        "groups/all_correct_fraction": None, "groups/all_wrong_fraction": None,
        "completions/mean_length": None, "completions/min_length": None,
        "completions/max_length": None, "completions/clipped_ratio": None,
    }  # fmt: skip


def _asynchrony(record: StepRecord, seconds: dict[str, float], step: AsyncStep) -> Metrics:
    trained, current = record.batch.rollouts, record.step - 1
    ages = [record.step - rollout.birth_step for rollout in trained]
    first_lags = [current - rollout.policy_version for rollout in trained]
    last_lags = [current - rollout.policy_version_end for rollout in trained]
    kept_length, dropped_length = mean_lengths(record.generated)
    return {
        "async/trainer_idle": step.waited_seconds / max(seconds["step"], 1e-9),
        "async/sampler_idle": step.sampler.idle,
        "async/straddlers": step.straddlers,
        "async/outstanding_groups": step.outstanding_groups,
        "async/undrawn_evicted": step.undrawn_evicted,
        "async/age_mean": float(np.mean(ages)) if ages else None,
        "async/age_max": max(ages, default=None),
        "async/first_token_lag_mean": float(np.mean(first_lags)) if trained else None,
        "async/last_token_lag_mean": float(np.mean(last_lags)) if trained else None,
        "async/kept_mean_length": kept_length,
        "async/dropped_mean_length": dropped_length,
    }
