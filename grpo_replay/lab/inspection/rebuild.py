"""Replays the rollout log of a run through the buffer: to rebuild it after any step, and with other
replay settings (`--what-if`).

The buffer and the composer are those of the trainer. Generation is held fixed: with other draws a
real run would have trained another policy, which would have sampled other rollouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_replay.errors import SnapshotError, UsageError
from grpo_replay.lab.inspection.rollout_columns import (
    Rollouts,
    find_rows,
    is_positive,
    no_rollouts,
    read_draws,
    read_log,
    read_stored,
    updates_of_a_step,
    uses_of,
)
from grpo_replay.lab.inspection.source import Source
from grpo_replay.recipe import Recipe, ReplaySection, parse_overrides, resolve_recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.compose import buffer_step
from grpo_replay.storage.recipe_history import differences
from grpo_replay.terminal.console import tracked
from grpo_replay.types import ComposedBatch, Entry

_READ = ("advantage", "group_reward_std", "reward", "group_correct", "truncated")


def entries_of_log(rows: Rollouts) -> list[Entry]:
    """Entries with all that the buffer and priorities read, and no payload."""
    columns = {name: rows[name].tolist() for name in _READ}
    columns["completion_tokens"] = rows.tokens.tolist()
    given = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    ids = (rows.rollout_id.tolist(), rows.group_id.tolist(), rows.birth_step.tolist())
    return [Entry(*each, payload=None) for each in zip(*ids, given, strict=True)]


def stored_after(source: Source, settings: ReplaySection, group_size: int) -> tuple[Rollouts, bool]:
    """The rollouts stored after `source.step`, and whether they are rebuilt, not of a snapshot."""
    if source.snapshot is not None:
        return read_stored(source.snapshot), False
    if not settings.replays:
        return no_rollouts(), False
    return rebuild_stored(source, settings, group_size), True


def rebuild_stored(source: Source, settings: ReplaySection, group_size: int) -> Rollouts:
    """The rollouts stored after `source.step`, oldest first, with priorities and uses.

    Raises SnapshotError if the run logged no rollouts.
    """
    if not source.rollout_files:
        raise SnapshotError(
            f"{source.path}: no checkpoint of step {source.step} and no rollouts/ to rebuild the "
            "buffer from; choose a step with a checkpoint"
        )
    limit = settings.max_age_steps
    start = 0 if limit is None else source.step - limit
    files = [file for file in source.rollout_files if file[0] >= start]
    log, buffer = read_log(files), ReplayBuffer(settings, group_size)
    survivors = log[log.kept]
    for step, _ in files:
        buffer.evict(step)
        buffer.insert(entries_of_log(survivors[survivors.logged_step == step]), step)
        buffer.evict_ahead(step)
    stored = log[find_rows(log.rollout_id, buffer.column("rollout_id"))]
    stored.priority = buffer.column("priority")
    stored.times_used = uses_of(stored.rollout_id, read_draws(source.draw_files))
    return stored


REPEATS = 5
"""Number of simulations with different random draws, which give the standard deviation."""

CANNOT_KNOW = (
    "Generation is held fixed: rollouts, rewards and advantages are those of the log. A real run "
    "with these settings would have trained another policy on these draws and sampled other "
    "rollouts from it. The simulation predicts the buffer and its draws; clip fraction, KL and "
    "accuracy need a real run."
)


Statistics = dict[str, float | None]
"""Of the rollouts trained on, over a whole run: see `statistics`. None if undefined."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The run as logged, its own settings simulated, and the changed settings simulated.

    Simulated statistics are means over `REPEATS` simulations. `*_error` are the standard
    deviations, 0 for deterministic statistics."""

    changes: Mapping[str, Any]
    logged: Statistics
    same: Statistics
    same_error: Statistics
    changed: Statistics
    changed_error: Statistics
    cannot_know: str = CANNOT_KNOW


@dataclass(frozen=True, slots=True, eq=False)
class _Trained:
    """All rollouts trained on in a run, as rows of the log; aligned arrays."""

    row: np.ndarray  # int64
    age: np.ndarray  # int64
    replayed: np.ndarray  # bool
    ess: Sequence[float]
    stored: Sequence[float]


def what_if(source: Source, changes: Sequence[str]) -> WhatIf:
    """The comparison for `key=value` changes to the replay section.

    Raises UsageError for a run whose replay settings were changed at a resume, and for a longer age
    limit with which an asynchronous run would have kept rollouts that it dropped; RecipeError for a
    bad key or value; and SnapshotError if the run has no recipe or logged no rollouts.
    """
    recipe = source.recipe
    if recipe is None or not source.rollout_files:
        raise SnapshotError(
            f"{source.path}: --what-if replays the rollout log of a run; give a run directory with "
            "recipe.yaml and rollouts/"
        )
    _refuse_changed_recipes(source)
    other = changed_settings(recipe, changes)
    log = read_log(source.rollout_files)
    refuse_what_was_not_kept(log, recipe.replay, other)
    steps = steps_of(log, recipe.rollouts_per_step if recipe.run.is_async else None)
    own = updates_of_a_step(recipe.draws_per_step, source.draw_files)
    changed_to = recipe.model_copy(update={"replay": other}).draws_per_step
    plan = [
        (*each, seed)
        for each in ((recipe.replay, own), (other, changed_to))
        for seed in range(REPEATS)
    ]
    group_size = recipe.sampling.group_size
    results = [
        simulate(log, settings, group_size, steps, number, draws)
        for settings, draws, number in tracked(plan, "replaying the log")
    ]
    before, after = recipe.replay.model_dump(mode="json"), other.model_dump(mode="json")
    return WhatIf(
        {key: [before[key], after[key]] for key in after if after[key] != before[key]},
        statistics(log, _logged(source, log, recipe.replay), own),
        *_across(results[:REPEATS]),
        *_across(results[REPEATS:]),
    )


_SIMULATED = ("replay.", "batch.updates_per_step", "batch.mini_batch", "sampling.group_size")


def _refuse_changed_recipes(source: Source) -> None:
    assert source.recipes is not None
    for after, recipe in source.recipes.changed:
        if after >= source.step:
            return
        for key, old, new in differences(source.recipes.first, recipe):
            if key.startswith(_SIMULATED):
                raise UsageError(
                    f"--what-if: the run changed {key} from {old!r} to {new!r} after step {after}, "
                    f"so it has no settings of its own to compare with; inspect it up to there: "
                    f"--step {after}"
                )


def changed_settings(recipe: Recipe, changes: Sequence[str]) -> ReplaySection:
    """The replay section of a recipe with `key=value` changes in it, as a resume with them has it;
    `replay.key` is accepted too."""
    if wrong := [word for word in changes if "=" not in word]:
        raise UsageError(f"--what-if {wrong[0]}: expected key=value, such as max_age_steps=5")
    words = [f"replay.{word.strip().removeprefix('replay.')}" for word in changes]
    layers = [recipe.model_dump(mode="json"), parse_overrides(words)]
    return resolve_recipe(layers, source="--what-if").replay


def simulate(
    log: Rollouts,
    settings: ReplaySection,
    group_size: int,
    steps: Sequence[tuple[int, int]],
    seed: int,
    draws_per_step: int = 1,
) -> Statistics:
    """Statistics of one simulation: the log through buffer and composer with these settings.
    `steps` has each step and the rollouts that it generates."""
    rng = np.random.default_rng(seed)
    log = kept_under(log, settings)
    buffer = ReplayBuffer(settings, group_size)
    survivors = log[log.kept]
    entries = entries_of_log(survivors)
    batches: list[ComposedBatch] = []
    stored: list[int] = []
    for step, count in steps:
        first, last = np.searchsorted(survivors.logged_step, [step, step + 1])
        fresh = entries[first:last]
        batches.append(buffer_step(buffer, fresh, step, count, rng, draws_per_step))
        stored.append(len(buffer))
    ids = [entry.rollout_id for batch in batches for entry in batch.entries]
    draws = [batch.draw for batch in batches if batch.draw.entries]
    trained = _Trained(
        row=find_rows(log.rollout_id, ids),
        age=np.concatenate([np.zeros(0, np.int64), *(batch.ages for batch in batches)]),
        replayed=np.concatenate([np.zeros(0, bool), *(batch.replayed for batch in batches)]),
        ess=[draw.effective_sample_size for draw in draws],
        stored=stored,
    )
    return statistics(log, trained, draws_per_step)


def steps_of(log: Rollouts, generated: int | None) -> list[tuple[int, int]]:
    """Each step of the log, and the rollouts that a step of the run generates. Into a step of an
    asynchronous run any number may have come, none too; its batches are sized by the recipe."""
    steps, counts = np.unique(log.logged_step, return_counts=True)
    if generated is None:
        return list(zip(steps.tolist(), counts.tolist(), strict=True))
    return [(step, generated) for step in range(steps[0], steps[-1] + 1)]


def kept_under(log: Rollouts, settings: ReplaySection) -> Rollouts:
    """The log as a run with these settings keeps it: without the groups whose rewards are all
    equal, or with them, at advantage 0. What an asynchronous run dropped as stale or straddling
    stays out, and so does what came later than these settings allow."""
    kept = log.kept | ((log.group_reward_std == 0) & np.isfinite(log.reward))
    if settings.max_age_steps is not None:
        kept &= log.logged_step - log.birth_step <= settings.max_age_steps
    rows = log.copy()
    if settings.drop_zero_variance:
        rows.kept = kept & (log.group_reward_std > 0)
    else:
        rows.kept, rows.advantage = kept, np.nan_to_num(log.advantage)
    return rows


def refuse_what_was_not_kept(log: Rollouts, settings: ReplaySection, other: ReplaySection) -> None:
    """Raises UsageError if `other` would have kept rollouts that the run dropped as stale: their
    advantages are not in the log."""
    limit, longer = settings.max_age_steps, other.max_age_steps
    if limit is None:
        return
    age = log.logged_step - log.birth_step
    stale = ~log.kept & (log.group_reward_std > 0) & np.isfinite(log.reward) & (age > limit)
    missing = int((stale if longer is None else stale & (age <= longer)).sum())
    if missing:
        raise UsageError(
            f"--what-if max_age_steps={'null' if longer is None else longer}: the run dropped "
            f"{missing} rollouts that came more than {limit} steps late, and their advantages are "
            f"not in its log: give at most {limit}, or make a new run"
        )


def _logged(source: Source, log: Rollouts, settings: ReplaySection) -> _Trained:
    """The rollouts that the run trained on, from its draw log and fresh survivors."""
    draws = read_draws(source.draw_files)
    drawn = find_rows(log.rollout_id, draws.rollout_id)
    known = drawn >= 0
    trained_fresh = settings.anchors_fresh or not settings.replays
    fresh = np.flatnonzero(log.kept & (trained_fresh | (log.logged_step <= settings.warmup_steps)))
    replayed = draws.age[known] > 0 if settings.pools_fresh else np.ones(int(known.sum()), bool)
    return _Trained(
        row=np.append(drawn[known], fresh),
        age=np.append(draws.age[known], np.zeros(len(fresh), dtype=np.int64)),
        replayed=np.append(replayed, np.zeros(len(fresh), dtype=bool)),
        ess=_series(source, "replay/ess"),
        stored=_series(source, "buffer/rollouts"),
    )


def _series(source: Source, name: str) -> list[float]:
    return [line[name] for line in source.metrics if line.get(name) is not None]


def statistics(log: Rollouts, trained: _Trained, ages_of_a_step: int = 1) -> Statistics:
    """Statistics of the rollouts trained on, those of advantage and reward of what was replayed;
    ages at use in steps, of which each has `ages_of_a_step`."""
    replayed, ages = trained.row[trained.replayed], trained.age[trained.replayed] // ages_of_a_step
    magnitude = np.abs(np.nan_to_num(log.advantage))
    uses = np.bincount(replayed, minlength=len(log))[log.kept]
    some = len(replayed) > 0
    generated_tokens = int(log.tokens.sum())
    return {
        "replayed_rollouts": float(len(replayed)),
        "age_mean": float(ages.mean()) if some else None,
        "age_p95": float(np.quantile(ages, 0.95)) if some else None,
        "abs_advantage_mean": float(magnitude[replayed].mean()) if some else None,
        "positive_share": float(is_positive(log[replayed]).mean()) if some else None,
        "never_drawn_share": float((uses == 0).mean()) if log.kept.any() else None,
        "ess_mean": _mean(trained.ess),
        "stored_mean": _mean(trained.stored),
        "trained_tokens_per_generated": (
            float(log.tokens[trained.row].sum() / generated_tokens) if generated_tokens else None
        ),
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _across(runs: Sequence[Statistics]) -> tuple[Statistics, Statistics]:
    """Mean and standard deviation of each statistic; None where a run has none."""
    means, deviations = Statistics(), Statistics()
    for name in runs[0]:
        known = [value for run in runs if (value := run[name]) is not None]
        whole = len(known) == len(runs)
        means[name] = float(np.mean(known)) if whole else None
        deviations[name] = float(np.std(known, ddof=1)) if whole else None
    return means, deviations
