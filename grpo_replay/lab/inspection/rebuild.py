"""Runs the rollout log of a run through a buffer: to rebuild the buffer after any step, and to
simulate other replay settings (`--what-if`).

Buffer and composer are those of the trainer. Generation is held fixed: with other draws a real run
would have trained another policy, which would have sampled other rollouts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_replay.errors import SnapshotError, UsageError
from grpo_replay.lab.inspection.rollout_columns import (
    Rollouts,
    draws_of_stored,
    find_rows,
    read_log,
    read_log_and_draws,
    read_stored,
)
from grpo_replay.lab.inspection.source import Source
from grpo_replay.recipe import Recipe, ReplaySection, parse_overrides, resolve_recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.compose import buffer_step
from grpo_replay.replay.priorities import COLUMNS
from grpo_replay.terminal.console import tracked
from grpo_replay.types import Entry


def log_entries(rows: Rollouts) -> list[Entry]:
    """Make buffer entries of rollouts, without payload, with what priorities and eviction need."""
    columns = zip(*(rows[name].tolist() for name in COLUMNS), strict=True)
    fields = [dict(zip(COLUMNS, row, strict=True)) for row in columns]
    return [
        Entry(row["rollout_id"], row["group_id"], row["birth_step"], row, None) for row in fields
    ]


def stored_after(
    source: Source, settings: ReplaySection, group_size: int, log: Rollouts | None = None
) -> Rollouts:
    """Return the rollouts stored after `source.step`, oldest first: those of the snapshot, or,
    without one, of a buffer that is rebuilt from the log (`log`, or read here). Raises
    SnapshotError if the run logged no rollouts."""
    if source.snapshot is not None:
        return read_stored(source.snapshot)
    if settings.replays and not source.rollout_files:
        raise SnapshotError(
            f"{source.path}: no checkpoint of step {source.step} and no rollouts/ to rebuild the "
            "buffer from; choose a step with a checkpoint"
        )
    log = read_log(source.rollout_files) if log is None else log
    if not settings.replays:
        return log[:0].view(np.recarray)
    buffer, survivors = ReplayBuffer(settings, group_size), log[log.kept]
    for step, _ in source.rollout_files:
        first, last = np.searchsorted(survivors.logged_step, [step, step + 1])
        buffer.evict(step)
        buffer.insert(log_entries(survivors[first:last]), step)
        buffer.evict_ahead(step)
    return log[find_rows(log.rollout_id, buffer.column("rollout_id"))]


REPEATS = 5
"""Number of simulations with different random draws, which give the standard deviation."""

Statistics = dict[str, float]
"""Statistics of a whole run by name (see `statistics`); NaN if undefined."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Statistics of the run as logged, and simulated with its own and with changed settings.

    Simulated statistics are means over `REPEATS` simulations. `*_error` are the standard
    deviations, 0 for deterministic statistics."""

    changes: Mapping[str, Any]
    logged: Statistics
    same: Statistics
    same_error: Statistics
    changed: Statistics
    changed_error: Statistics


def what_if(source: Source, changes: Sequence[str]) -> WhatIf:
    """Compare a run's log with simulations of its draws: with its own replay settings, and with
    `key=value` changes to them.

    Raises UsageError for a longer age limit that would have kept rollouts which an asynchronous run
    dropped, RecipeError for a bad key or value, and SnapshotError if the run has no recipe or
    logged no rollouts.
    """
    recipe = source.recipe
    if recipe is None or not source.rollout_files:
        raise SnapshotError(
            f"{source.path}: --what-if replays the rollout log of a run; give a run directory with "
            "recipe.yaml and rollouts/"
        )
    replay = recipe.replay.model_copy(update={"shadow": False})  # both are simulated outside it
    own = recipe.model_copy(update={"replay": replay})
    changed = changed_recipe(own, changes)
    log, draws = read_log_and_draws(source)
    refuse_longer_age_limit(log, recipe.replay.max_age_steps, changed.replay.max_age_steps)
    plan = [(simulated, seed) for simulated in (own, changed) for seed in range(REPEATS)]
    results = [simulate(log, *pair) for pair in tracked(plan, "replaying the log")]
    before, after = (settings.replay.model_dump(mode="json") for settings in (own, changed))
    # As logged: the rollouts trained on as fresh, and every draw in the log.
    fresh = np.flatnonzero(log.kept & recipe.replay.trains_on_all_fresh(log.logged_step))
    replayed = draws_of_stored(draws, recipe.replay)
    logged = statistics(
        log,
        np.append(draws.row, fresh),
        replayed.row,
        replayed.age // recipe.draws_per_step,
        [value for _, value in source.points_of("replay/ess")],
        [value for _, value in source.points_of("buffer/rollouts")],
    )
    return WhatIf(
        {key: [before[key], after[key]] for key in after if after[key] != before[key]},
        logged,
        *_across(results[:REPEATS]),
        *_across(results[REPEATS:]),
    )


def changed_recipe(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """Return the recipe with `key=value` changes (or `replay.key=value`) in its replay section."""
    if wrong := [word for word in changes if "=" not in word]:
        raise UsageError(f"--what-if {wrong[0]}: expected key=value, such as max_age_steps=5")
    words = [f"replay.{word.strip().removeprefix('replay.')}" for word in changes]
    layers = [recipe.model_dump(mode="json"), parse_overrides(words)]
    replay = resolve_recipe(layers, source="--what-if").replay
    return recipe.model_copy(update={"replay": replay})


def refuse_longer_age_limit(log: Rollouts, limit: int | None, other: int | None) -> None:
    """Raises UsageError if age limit `other` would keep what the run, with `limit`, dropped."""
    if limit is None or (other is not None and other <= limit):
        return
    stale = ~log.kept & (log.group_reward_std > 0) & (log.logged_step - log.birth_step > limit)
    if stale.any():
        raise UsageError(
            f"--what-if max_age_steps: {stale.sum()} rollouts that arrived more than {limit} steps "
            "late were dropped, and their advantages are not in the log: give at most "
            f"{limit}, or make a new run"
        )


def simulate(log: Rollouts, recipe: Recipe, seed: int) -> Statistics:
    """Run the log through buffer and composer by `recipe`, never in shadow; returns statistics."""
    settings = recipe.replay.model_copy(update={"shadow": False})
    buffer = ReplayBuffer(settings, recipe.sampling.group_size)
    rng = np.random.default_rng(seed)
    draws_per_step = recipe.draws_per_step
    log = kept_with_settings(log, recipe.replay)
    survivors = log[log.kept]
    entries = log_entries(survivors)
    batches, stored = [], []
    for step, generated in _steps_of(log, recipe):
        first, last = np.searchsorted(survivors.logged_step, [step, step + 1])
        fresh = entries[first:last]
        batches.append(buffer_step(buffer, fresh, step, generated, rng, draws_per_step))
        stored.append(len(buffer))
    ids = [entry.rollout_id for batch in batches for entry in batch.entries]
    trained = find_rows(log.rollout_id, ids)
    replayed = np.concatenate([batch.replayed for batch in batches])
    ages = np.concatenate([batch.ages for batch in batches])[replayed] // draws_per_step
    ess = [batch.draw.effective_sample_size for batch in batches if batch.draw.entries]
    return statistics(log, trained, trained[replayed], ages, ess, stored)


def _steps_of(log: Rollouts, recipe: Recipe) -> list[tuple[int, int]]:
    """The steps of the log, each with the number of rollouts that it generates. In an asynchronous
    run, where any number may arrive in a step, also none, that number is the recipe's."""
    steps, counts = np.unique(log.logged_step, return_counts=True)
    if recipe.run.is_async:
        return [(step, recipe.rollouts_per_step) for step in range(steps[0], steps[-1] + 1)]
    return list(zip(steps.tolist(), counts.tolist(), strict=True))


def kept_with_settings(log: Rollouts, settings: ReplaySection) -> Rollouts:
    """Return the log with the `kept` flags and advantages of a run with these settings. Groups of
    equal rewards are dropped, or kept with advantage 0. Rollouts that an asynchronous run dropped
    as too old or partial stay dropped, and those too old for these settings are dropped."""
    equal = (log.group_reward_std == 0) & np.isfinite(log.reward)
    kept_equal = bool((log.kept & equal).any())  # then those it dropped nonetheless are masked
    kept = log.kept | (equal & (not kept_equal))
    if settings.max_age_steps is not None:
        kept &= log.logged_step - log.birth_step <= settings.max_age_steps
    rows = log.copy()
    if settings.drop_zero_variance:
        rows.kept = kept & (log.group_reward_std > 0)
    else:
        rows.kept, rows.advantage = kept, np.nan_to_num(log.advantage)
    return rows


def statistics(
    log: Rollouts,
    trained: np.ndarray,
    replayed: np.ndarray,
    ages: np.ndarray,
    ess: Sequence[float],
    stored: Sequence[float],
) -> Statistics:
    """Compute the statistics of a run. `trained` has the log rows that it trained on, once per use;
    `replayed` those that were replayed, at `ages` in steps; `ess` and `stored` a value per step."""
    magnitude = np.abs(np.nan_to_num(log.advantage))[replayed]
    uses, tokens = np.bincount(replayed, minlength=len(log))[log.kept], log.completion_tokens
    return {
        "replayed_rollouts": float(len(replayed)),
        "age_mean": _mean(ages),
        "age_p95": float(np.quantile(ages, 0.95)) if len(ages) else math.nan,
        "abs_advantage_mean": _mean(magnitude),
        "positive_share": _mean(log[replayed].advantage > 0),
        "never_drawn_share": _mean(uses == 0),
        "ess_mean": _mean(ess),
        "stored_mean": _mean(stored),
        "trained_tokens_per_generated": float(tokens[trained].sum() / max(tokens.sum(), 1)),
    }


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _across(runs: Sequence[Statistics]) -> tuple[Statistics, Statistics]:
    """Mean and standard deviation of each statistic; NaN where a run has none."""
    columns = {name: [run[name] for run in runs] for name in runs[0]}
    means = {name: float(np.mean(values)) for name, values in columns.items()}
    return means, {name: float(np.std(values, ddof=1)) for name, values in columns.items()}
