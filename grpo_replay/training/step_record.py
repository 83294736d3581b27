"""The files, metrics and counters of one training step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_replay.engine.engine_protocol import UpdateResult
from grpo_replay.recipe import Recipe
from grpo_replay.replay import BufferStats
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.storage.rollout_log import step_path, write_draws, write_rollouts
from grpo_replay.training.metrics import (
    batch_metrics,
    buffer_metrics,
    cost_metrics,
    generation_metrics,
    null_where_not_finite,
    sampler_metrics,
    sampler_weight_metrics,
    score_metrics,
    update_metrics,
)
from grpo_replay.training.weight_sync import LogprobGap
from grpo_replay.types import ComposedBatch, Rollout, RolloutOutcome


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """One training step on rank 0. `fresh` are the survivors among `generated`; `outcomes[i]`
    belongs to rollout i of the batch. `gap` is None if an asynchronous step had no rollout to
    measure it on."""

    step: int
    generated: Sequence[Rollout]
    fresh: Sequence[Rollout]
    gap: LogprobGap | None
    batch: ComposedBatch
    results: Sequence[UpdateResult]
    outcomes: Sequence[RolloutOutcome]


def count_step(
    state: RunState,
    recipe: Recipe,
    prompts: int,
    generated: Sequence[Rollout],
    batch: ComposedBatch,
) -> None:
    """Advance the counters of the run by one step, which took so many prompts."""
    count_rollouts(state, generated, batch)
    state.prompt_cursor += prompts
    state.next_rollout_id += prompts * recipe.sampling.group_size
    state.next_group_id += prompts


def count_rollouts(state: RunState, generated: Sequence[Rollout], batch: ComposedBatch) -> None:
    """Count one step, its rollouts and their tokens. Token counts are complete on rank 0 only."""
    state.step += 1
    state.generated_tokens += sum(len(r.completion_token_ids) for r in generated)
    state.trained_tokens += sum(len(r.completion_token_ids) for r in batch.rollouts)
    state.processed_tokens += sum(
        len(r.prompt_token_ids) + len(r.completion_token_ids) for r in generated
    )
    state.replayed_rollouts += int(batch.replayed_N.sum())


def write_step_files(run_folder: Path, recipe: Recipe, record: StepRecord) -> None:
    """Write the rollouts that the step took from the sampler, and its draws if the recipe replays.
    Outcomes in rollouts/ are those of rollouts trained on in the step that took them."""
    fresh = {rollout.rollout_id: rollout for rollout in record.fresh}
    batch = record.batch
    outcomes = {
        rollout.rollout_id: outcome
        for rollout, outcome in zip(batch.rollouts, record.outcomes, strict=True)
        if rollout.rollout_id in fresh
    }
    write_rollouts(
        step_path(run_folder / "rollouts", record.step),
        [fresh.get(rollout.rollout_id, rollout) for rollout in record.generated],
        outcomes,
    )
    if recipe.replays:
        drawn = len(batch.draw.rollouts)
        of_draws = record.outcomes[len(record.outcomes) - drawn :]
        write_draws(step_path(run_folder / "draws", record.step), record.step, batch.draw, of_draws)


def step_metrics(
    recipe: Recipe,
    state: RunState,
    record: StepRecord,
    buffer: BufferStats,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The row of metrics.jsonl (see docs/metrics.md). `seconds` are by stage."""
    assert record.gap is not None
    return null_where_not_finite(
        {
            "step": record.step,
            **generation_metrics(record.generated, recipe.sampling.group_size),
            **score_metrics(record.generated, recipe.reward.score_names),
            **update_metrics(record.results, recipe.loss.beta),
            **batch_metrics(record.batch, record.outcomes, len(record.fresh)),
            **buffer_metrics(buffer),
            **sampler_metrics(record.gap, record.generated[0].policy_version),
            **sampler_weight_metrics(record.batch.rollouts, recipe.loss),
            **cost_metrics(seconds, record.generated, record.batch.rollouts),
            "num_tokens": state.processed_tokens,
        }
    )
