"""Computes an `Inspection` from a source: every number on the screen."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_replay.errors import SnapshotError
from grpo_replay.lab.inspection.buffer_summary import (
    TREND_LABELS,
    AgeOutcome,
    Bin,
    DrawLaw,
    Inspection,
    LastUse,
    Occupancy,
    Population,
    RunUses,
    find_warnings,
    staleness_rows,
)
from grpo_replay.lab.inspection.rebuild import stored_after
from grpo_replay.lab.inspection.rollout_columns import (
    OUTCOMES,
    Draws,
    Rollouts,
    find_rows,
    is_positive,
    of_stored,
    read_draws,
    read_log,
    updates_of_a_step,
    uses_of,
)
from grpo_replay.lab.inspection.source import Source
from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.priorities import draw_law, query_spans
from grpo_replay.replay.snapshot import read_snapshot_facts
from grpo_replay.storage.recipe_history import RECIPE_FILE

_BINS = 12
_DISTINCT = 16


def summarise(source: Source) -> Inspection:
    """The inspection of a source. Raises SnapshotError if a file cannot be read."""
    settings, group_size, facts = _settings(source)
    stored, rebuilt = stored_after(source, settings, group_size)
    step = source.step
    log = read_log(source.rollout_files)
    draws = read_draws(source.draw_files)
    replay_draws = of_stored(draws, settings)
    # Without a rollout log, those still stored are known.
    known = log if len(log) else stored
    rows = find_rows(known.rollout_id, replay_draws.rollout_id)
    replayed = known[rows[rows >= 0]]
    draws_per_step = source.recipe.draws_per_step if source.recipe else 1
    updates = updates_of_a_step(draws_per_step, source.draw_files)
    inspection = Inspection(
        path=str(source.path),
        kind=source.kind,
        step=step,
        updates_per_step=updates,
        recipe_name=source.recipe.name if source.recipe else None,
        settings=settings.model_dump(mode="json"),
        replays=settings.replays,
        rebuilt=rebuilt,
        occupancy=_occupancy(stored, log, settings, step, facts),
        staleness=staleness_rows(stored.birth_step, replay_draws.age, step, updates),
        abs_advantage=magnitude_bins(np.abs(log.advantage[log.kept]), np.abs(replayed.advantage)),
        uses_over_run=uses_over_run(log, draws, settings),
        last_use=steps_since_last_use(log, draws, settings) if len(draws) else None,
        draw_law=next_draw_law(stored, settings),
        populations=_populations(log, stored, replayed),
        by_age=_outcomes(log, draws),
        trends=_trends(source.metrics, settings.replays),
        replayed_rollouts=len(replay_draws),
        missing_rewards=int(np.isnan(log.reward).sum()),
        warnings=(),
    )
    gaps = (*find_gaps(source), *_rebuild_warnings(source, inspection))
    return replace(inspection, warnings=(*gaps, *find_warnings(inspection)))


def find_gaps(source: Source) -> Iterator[str]:
    """One warning for each kind of file that lacks steps up to the inspected one."""
    if source.run_dir is None:
        return
    if source.recipes is None:
        yield (
            f"{source.run_dir} has no {RECIPE_FILE}: what depends on the settings of replay is not "
            "shown. Restore it from a copy."
        )
        return
    steps = [int(line["step"]) for line in source.metrics]
    replayed = [step for step in steps if source.recipes.at(step).replays]
    for folder, files, expected in (
        ("rollouts", source.rollout_files, steps),
        ("draws", source.draw_files, replayed),
    ):
        missing = sorted(set(expected) - {step for step, _ in files})
        if missing:
            more = f" and of {len(missing) - 1} more steps" if len(missing) > 1 else ""
            yield (
                f"{folder}/ lacks the file of step {missing[0]}{more}: their rows are missing from "
                "everything shown here. Restore them from a copy."
            )


def _rebuild_warnings(source: Source, inspection: Inspection) -> Iterator[str]:
    """A warning if the rebuilt buffer differs in size from the one the run logged."""
    logged = source.metrics[-1].get("buffer/rollouts") if source.metrics else None
    stored = inspection.occupancy.stored_rollouts
    if inspection.rebuilt and logged is not None and logged != stored:
        yield (
            f"The buffer rebuilt for step {inspection.step} has {stored:,} rollouts, but the run "
            f"logged {logged:,}: the run was resumed with an empty buffer or other settings. "
            "Inspect a checkpoint instead."
        )


def _settings(source: Source) -> tuple[ReplaySection, int, Mapping[str, Any]]:
    """Replay settings, group size and snapshot metadata. The snapshot takes precedence."""
    facts = read_snapshot_facts(source.snapshot) if source.snapshot else {}
    if facts:
        return ReplaySection.model_validate(facts["settings"]), facts["group_size"], facts
    if source.recipe is None:
        raise SnapshotError(
            f"{source.path}: found neither a snapshot (buffer.parquet) nor recipe.yaml with the "
            "replay settings; give the directory of a run"
        )
    return source.recipe.replay, source.recipe.sampling.group_size, facts


def _occupancy(
    stored: Rollouts,
    log: Rollouts,
    settings: ReplaySection,
    step: int,
    facts: Mapping[str, Any],
) -> Occupancy:
    survivors = expected = None
    if len(log):
        window = min(settings.max_age_steps or step, step)
        recent = int((log.kept & (log.birth_step > step - window)).sum())
        survivors = recent / window
        expected = min(recent, settings.capacity_rollouts) if settings.replays else None
    return Occupancy(
        stored_rollouts=len(stored),
        capacity_rollouts=settings.capacity_rollouts if settings.enabled else None,
        stored_groups=len(np.unique(stored.group_id)),
        stored_tokens=int(stored.tokens.sum()),
        survivors_per_step=survivors,
        expected_rollouts=expected,
        evicted_by_age=facts.get("evicted_by_age"),
        evicted_by_capacity=facts.get("evicted_by_capacity"),
    )


def magnitude_bins(kept: np.ndarray, replayed: np.ndarray) -> tuple[Bin, ...]:
    """One bin per value if there are at most 16 distinct values (|A| has few for a fixed group
    size), otherwise 12 equal bins from 0 to the maximum; empty without a log or replay."""
    if kept.size == 0 or replayed.size == 0:
        return ()
    values = np.unique(kept.round(4))
    if values.size <= _DISTINCT:
        counts = [(group.round(4)[:, None] == values).sum(axis=0) for group in (kept, replayed)]
        lows = highs = values
    else:
        edges = np.linspace(0.0, float(kept.max()), _BINS + 1)
        counts = [np.histogram(group, edges)[0] for group in (kept, replayed)]
        lows, highs = edges[:-1], edges[1:]
    return tuple(
        Bin(float(low), float(high), *(int(n) for n in numbers))
        for low, high, *numbers in zip(lows, highs, *counts, strict=True)
    )


def _populations(log: Rollouts, stored: Rollouts, replayed: Rollouts) -> tuple[Population, ...]:
    groups = {
        "generated": log,
        "kept": log[log.kept],
        "stored": stored,
        "replayed": replayed,
    }
    return tuple(population(name, rows) for name, rows in groups.items() if len(rows))


def population(name: str, rows: Rollouts) -> Population:
    """Statistics of a non-empty set of rollouts."""
    uses = Counter(rows.prompt_id.tolist())
    signal = bool(rows.kept.all())
    return Population(
        name=name,
        rollouts=len(rows),
        prompts=len(uses),
        largest_prompt_share=max(uses.values()) / len(rows),
        positive_share=float(is_positive(rows).mean()) if signal else None,
        abs_advantage_mean=float(np.abs(rows.advantage).mean()) if signal else None,
        tokens_mean=float(rows.tokens.mean()),
        truncated_share=float(rows.truncated.mean()),
    )


def _trends(
    metrics: tuple[Mapping[str, Any], ...], replaying: bool
) -> dict[str, tuple[tuple[int, float], ...]]:
    """Metrics over training. Without replay, replay and buffer metrics are left out."""
    names = [
        name for name in TREND_LABELS if replaying or not name.startswith(("replay/", "buffer/"))
    ]
    series = {
        name: tuple(
            (int(line["step"]), float(line[name])) for line in metrics if line.get(name) is not None
        )
        for name in names
    }
    return {name: points for name, points in series.items() if points}


def count_values(values: np.ndarray) -> dict[int, int]:
    """How often each distinct value occurs, in ascending order of the value."""
    unique, counts = np.unique(values, return_counts=True)
    return dict(zip(unique.tolist(), counts.tolist(), strict=True))


def uses_over_run(log: Rollouts, draws: Draws, settings: ReplaySection) -> RunUses | None:
    """Number of uses of every survivor in the log; None if there are no survivors.

    Each draw is a use. Training as fresh in the birth step is also a use; with the pool and FIFO
    this happens only during warm-up.
    """
    kept = log[log.kept]
    if not len(kept):
        return None
    uses = uses_of(kept.rollout_id, draws)
    all_train = not settings.replays or settings.anchors_fresh
    uses += all_train | (kept.logged_step <= settings.warmup_steps)
    return RunUses(count_values(uses), float(uses.mean()), float((uses == 0).mean()))


def steps_since_last_use(log: Rollouts, draws: Draws, settings: ReplaySection) -> LastUse:
    """Updates between consecutive uses of a rollout, over all draws (paper B); training steps, if a
    step makes one draw.

    If all fresh rollouts are trained on (fresh-anchored, and during warm-up), the gap of a first
    draw is counted from the step that took the rollout: that of its birth, in asynchronous runs a
    later one. Otherwise a first draw is new.
    """
    order = np.lexsort((draws.update, draws.rollout_id))
    ids, updates, ages = draws.rollout_id[order], draws.update[order], draws.age[order]
    first = np.append(True, ids[1:] != ids[:-1])
    rows = find_rows(log.rollout_id, ids)
    known, taken, late = rows >= 0, updates - ages, np.zeros_like(ages)
    taken[known] = log.logged_step[rows[known]]
    late[known] = taken[known] - log.birth_step[rows[known]]
    trained_when_taken = taken <= settings.warmup_steps
    if settings.anchors_fresh:
        trained_when_taken = np.ones_like(first)
    gaps = np.where(first, ages - late, np.append(0, np.diff(updates)))
    new = first & ~trained_when_taken
    return LastUse(int(new.sum()), count_values(gaps[~new]))


def next_draw_law(stored: Rollouts, settings: ReplaySection) -> DrawLaw:
    """Distribution of a draw made now from the stored rollouts.

    With `unused_first`, only rollouts that were never drawn are candidates, if there are any.
    """
    never_drawn = stored.times_used == 0
    if settings.unused_first and never_drawn.any():
        stored = stored[never_drawn]
    priority_U = stored.priority
    if settings.unit == "query" and len(stored):
        starts, sizes = query_spans(stored.group_id)
        priority_U = np.add.reduceat(priority_U, starts) / sizes
    law = draw_law(priority_U, settings.priority_exponent)
    return DrawLaw(
        unit=settings.unit,
        units=len(priority_U),
        effective_sample_size=law.effective_sample_size,
        largest_probability=float(law.probability_N.max()) if len(priority_U) else 0.0,
    )


def outcomes_by_age(source: Source) -> dict[int, AgeOutcome]:
    """Outcomes by age in steps, or updates. Empty if the run logged nothing."""
    return _outcomes(read_log(source.rollout_files), read_draws(source.draw_files))


def _outcomes(log: Rollouts, draws: Draws) -> dict[int, AgeOutcome]:
    """Age 0 is fresh rollouts: draws at age 0, and those of rollouts/ that were trained on without
    a draw. Ages at which no token was trained on are left out."""
    fresh = np.isfinite(log.trained_tokens)
    # With pool and FIFO, rollouts drawn in the step that took them are in both logs.
    rows = find_rows(log.rollout_id, draws.rollout_id)
    known = rows >= 0
    both = draws.step[known] == log.logged_step[rows[known]]
    fresh[rows[known][both]] = False
    used = {name: np.append(log[name][fresh], draws[name]) for name in OUTCOMES}
    ages, tokens = np.append(np.zeros(fresh.sum(), np.int64), draws.age), used["trained_tokens"]
    # Empty completions have no tokens to average over.
    valid = (tokens > 0) & np.isfinite(used["log_ratio_mean"])
    ages, tokens = ages[valid], tokens[valid]
    uses, totals = np.bincount(ages), np.bincount(ages, tokens)

    def mean(values: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.bincount(ages, values[valid] * tokens) / totals

    clip, log_ratio, kl = (mean(used[name]) for name in _MEANS)
    square = mean(used["log_ratio_var"] + used["log_ratio_mean"] ** 2)
    return {
        age: AgeOutcome(
            int(uses[age]),
            int(totals[age]),
            *(float(each[age]) for each in (clip, log_ratio, square, kl)),
        )
        for age in np.flatnonzero(uses).tolist()
    }


_MEANS = ("clip_fraction", "log_ratio_mean", "approx_kl")
