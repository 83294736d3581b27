"""Computes an `Inspection` from a source."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from grpo_replay.lab.inspection.buffer_summary import (
    TREND_LABELS,
    AgeOutcome,
    Inspection,
    LastUse,
    Occupancy,
    Population,
    find_warnings,
    staleness_rows,
)
from grpo_replay.lab.inspection.rebuild import stored_after
from grpo_replay.lab.inspection.rollout_columns import (
    OUTCOMES,
    Draws,
    Rollouts,
    draws_of_stored,
    read_log_and_draws,
)
from grpo_replay.lab.inspection.source import Source
from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.snapshot import read_snapshot_facts

_MEANS = ("clip_fraction", "log_ratio_mean", "approx_kl", "ratio_mean", "ratio_squared_mean")


@dataclass(frozen=True, slots=True)
class Records:
    """The rollouts and draws of a source, and the replay settings of its step."""

    settings: ReplaySection
    stored: Rollouts  # after the inspected step, oldest first
    log: Rollouts  # every rollout up to it; empty for a lone snapshot
    draws: Draws


def read_records(source: Source) -> Records:
    """Read a source's replay settings, stored rollouts, rollout log and draws; the last two are
    empty for a snapshot alone. Raises SnapshotError if a file cannot be read."""
    facts = read_snapshot_facts(source.snapshot) if source.snapshot else {}
    if source.recipe is not None:
        settings, group_size = source.recipe.replay, source.recipe.sampling.group_size
    else:
        settings = ReplaySection.model_validate(facts["settings"])
        group_size = facts["group_size"]
    log, draws = read_log_and_draws(source)
    return Records(settings, stored_after(source, settings, group_size, log), log, draws)


def summarise(source: Source, records: Records | None = None) -> Inspection:
    """Compute the inspection of a source, from its `records` if they have been read already. Raises
    SnapshotError if a file cannot be read."""
    records = records or read_records(source)
    settings, stored, log, draws = records.settings, records.stored, records.log, records.draws
    step, replayed = source.step, draws_of_stored(draws, settings)
    updates = source.recipe.draws_per_step if source.recipe else 1
    inspection = Inspection(
        path=str(source.path),
        step=step,
        updates_per_step=updates,
        recipe_name=source.recipe.name if source.recipe else None,
        settings=settings.model_dump(mode="json"),
        replays=settings.replays,
        rebuilt=settings.replays and source.snapshot is None,
        occupancy=_occupancy(stored, log, settings, step),
        staleness=staleness_rows(stored.birth_step, replayed.age, step, updates),
        uses_over_run=uses_over_run(log, draws, settings),
        last_use=steps_since_last_use(log, draws, settings) if len(draws) else None,
        populations=tuple(
            population(name, rows)
            for name, rows in (
                ("generated", log),
                ("kept", log[log.kept]),
                ("stored", stored),
                ("replayed", log[replayed.row]),
            )
            if len(rows)
        ),
        by_age=_outcomes(log, draws),
        trends={
            name: points
            for name in TREND_LABELS
            if settings.replays or not name.startswith(("replay/", "buffer/"))
            if (points := source.points_of(name))
        },
        replayed_rollouts=len(replayed),
        warnings=(),
    )
    return replace(inspection, warnings=tuple(find_warnings(inspection)))


def _occupancy(stored: Rollouts, log: Rollouts, settings: ReplaySection, step: int) -> Occupancy:
    """Counts what is stored after `step`; what to expect is known with a log only."""
    survivors = expected = None
    if len(log):
        window = min(settings.max_age_steps or step, step)
        recent = int((log.kept & (log.birth_step > step - window)).sum())
        survivors = recent / window
        expected = min(recent, settings.capacity_rollouts) if settings.replays else None
    return Occupancy(
        stored_rollouts=len(stored),
        stored_groups=len(np.unique(stored.group_id)),
        stored_tokens=int(stored.completion_tokens.sum()),
        survivors_per_step=survivors,
        expected_rollouts=expected,
    )


def population(name: str, rows: Rollouts) -> Population:
    """Compute the statistics of a non-empty set of rollouts."""
    rollouts_of_prompt = Counter(rows.prompt_id.tolist())
    have_advantages = bool(rows.kept.all())
    return Population(
        name=name,
        rollouts=len(rows),
        prompts=len(rollouts_of_prompt),
        largest_prompt_share=max(rollouts_of_prompt.values()) / len(rows),
        positive_share=float((rows.advantage > 0).mean()) if have_advantages else None,
        abs_advantage_mean=float(np.abs(rows.advantage).mean()) if have_advantages else None,
        tokens_mean=float(rows.completion_tokens.mean()),
        truncated_share=float(rows.truncated.mean()),
    )


def count_values(values: np.ndarray) -> dict[int, int]:
    """Returns the number of occurrences of each distinct value, in ascending order of the value."""
    return dict(sorted(Counter(values.tolist()).items()))


def uses_over_run(log: Rollouts, draws: Draws, settings: ReplaySection) -> dict[int, int]:
    """Count the survivors in the log by their number of uses.

    Each draw is a use, also in shadow. Training as fresh in the birth step is a use, too; with the
    pool and FIFO that happens only during warm-up.
    """
    as_fresh = settings.trains_on_all_fresh(log.logged_step)
    return count_values((np.bincount(draws.row, minlength=len(log)) + as_fresh)[log.kept])


def steps_since_last_use(log: Rollouts, draws: Draws, settings: ReplaySection) -> LastUse:
    """Count updates between a rollout's consecutive uses (paper B); steps if each makes one draw.

    If all fresh rollouts are trained on (fresh-anchored, and during warm-up), the gap of a first
    draw starts at the step that took the rollout: the step of its birth, in asynchronous runs a
    later one. Otherwise a first draw counts as new.
    """
    draws = draws[np.lexsort((draws.update, draws.row))].view(np.recarray)
    first = np.append(True, draws.row[1:] != draws.row[:-1])
    taken = log.logged_step[draws.row]
    trained_when_taken = settings.anchors_fresh | (taken <= settings.warmup_steps)
    since_taken = draws.age - (taken - log.birth_step[draws.row])
    gaps = np.where(first, since_taken, np.append(0, np.diff(draws.update)))
    new = first & ~trained_when_taken
    return LastUse(int(new.sum()), count_values(gaps[~new]))


def outcomes_by_age(source: Source) -> dict[int, AgeOutcome]:
    """Outcomes by age, in steps or updates; empty if the run logged nothing."""
    return _outcomes(*read_log_and_draws(source))


def _outcomes(log: Rollouts, draws: Draws) -> dict[int, AgeOutcome]:
    """Computes token-weighted outcomes by age. Age 0 has the fresh rollouts: draws at age 0, and
    rollouts trained on without a draw. Ages without a trained token are left out."""
    fresh = log.tokens >= 0
    # With pool and FIFO, rollouts drawn in the step that took them are in both logs.
    fresh[draws.row[draws.step == log.logged_step[draws.row]]] = False
    used = {name: np.append(log[name][fresh], draws[name]) for name in OUTCOMES}
    ages, tokens = np.append(np.zeros(fresh.sum(), np.int64), draws.age), used["tokens"]
    # Empty completions have no tokens to average over.
    valid = (tokens > 0) & np.isfinite(used["log_ratio_mean"])
    ages, tokens = ages[valid], tokens[valid]
    uses, totals = np.bincount(ages), np.bincount(ages, tokens)

    def mean(values: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.bincount(ages, values[valid] * tokens) / totals

    clip, log_ratio, kl, ratio, ratio_squared = (mean(used[name]) for name in _MEANS)
    square = mean(used["log_ratio_var"] + used["log_ratio_mean"] ** 2)
    with np.errstate(invalid="ignore"):
        ess = ratio**2 / ratio_squared
    return {
        age: AgeOutcome(
            int(uses[age]),
            int(totals[age]),
            *(float(column[age]) for column in (clip, log_ratio, square, kl, ess)),
        )
        for age in np.flatnonzero(uses).tolist()
    }
