"""Chooses the rollouts of a page: all of a small run; of a large one the extremes and whole
groups."""

from dataclasses import dataclass

import numpy as np

from grpo_replay.lab.inspection.compute import Records
from grpo_replay.lab.inspection.rollout_columns import Rollouts, find_rows

MOST_ROLLOUTS = 2_000
MOST_TOKENS = 1_000_000
FEWEST_ROLLOUTS = 100
"""A page shows at most `MOST_ROLLOUTS`; fewer if their completions have more than `MOST_TOKENS` in
total, but at least `FEWEST_ROLLOUTS`."""

_SHARE_OF_EXTREMES = 20
"""The sample has one rollout in this many for each kind of extreme."""


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """Draws, outcomes and storage of each of the N rollouts of a run."""

    rows: Rollouts
    draws_N: np.ndarray  # number of draws
    clip_fraction_N: np.ndarray  # the largest over all uses; NaN without one
    approx_kl_N: np.ndarray  # nats per token, likewise
    oldest_use_N: np.ndarray  # age at the oldest use by a draw; -1 without a draw
    stored_N: np.ndarray  # bool: stored after the inspected step


def rollout_facts(records: Records) -> RolloutFacts:
    """Collect the facts of every rollout of a log, or of a lone snapshot, where outcomes are
    unknown."""
    log, draws = records.log, records.draws
    if not len(log):
        count = len(records.stored)
        drawn = records.stored.times_used if count else np.zeros(0, np.int64)
        unknown = np.full(count, np.nan)
        oldest = np.full(count, -1)
        return RolloutFacts(
            records.stored, drawn, unknown, unknown, oldest, np.ones(count, np.bool_)
        )
    clip_fraction, approx_kl = log.clip_fraction.copy(), log.approx_kl.copy()
    np.fmax.at(clip_fraction, draws.row, draws.clip_fraction)
    np.fmax.at(approx_kl, draws.row, draws.approx_kl)
    oldest = np.full(len(log), -1)
    np.maximum.at(oldest, draws.row, draws.age)
    stored = np.zeros(len(log), np.bool_)
    rows = find_rows(log.rollout_id, records.stored.rollout_id)
    stored[rows[rows >= 0]] = True
    drawn = np.bincount(draws.row, minlength=len(log))
    return RolloutFacts(log, drawn, clip_fraction, approx_kl, oldest, stored)


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows of `RolloutFacts.rows` to show, ascending, with reasons and a note."""

    rows: np.ndarray
    reasons: dict[int, str]  # by row, for extremes
    note: str


def choose_rollouts(facts: RolloutFacts) -> Sample:
    """Choose the rollouts that a page shows: all, if it holds them, else the most extreme of each
    kind, with the reason, and whole groups evenly spaced over the run."""
    rows = facts.rows
    mean_tokens = float(rows.completion_tokens.mean()) if len(rows) else 0.0
    fitting = int(MOST_TOKENS / max(mean_tokens, 1.0))
    limit = max(FEWEST_ROLLOUTS, min(MOST_ROLLOUTS, fitting))
    if len(rows) <= limit:
        return Sample(np.arange(len(rows)), {}, f"All {len(rows):,} rollouts.")
    reasons: dict[int, str] = {}
    for name, values in _extremes(facts).items():
        for row in _largest(values, limit // _SHARE_OF_EXTREMES):
            reasons[row] = f"{reasons[row]}, {name}" if row in reasons else f"shown as {name}"
    chosen = np.array(sorted(reasons), dtype=np.int64)
    chosen = np.union1d(chosen, _whole_groups(rows, chosen, limit - len(chosen)))
    note = (
        f"{len(chosen):,} of {len(rows):,} rollouts: the {limit // _SHARE_OF_EXTREMES} most "
        f"extreme of each kind ({', '.join(_extremes(facts))}), and whole groups at equal "
        "distances over the run."
    )
    return Sample(chosen, reasons, note)


def _extremes(facts: RolloutFacts) -> dict[str, np.ndarray]:
    """Returns the quantities, by name, whose largest values are extremes if above 0."""
    return {
        "most replayed": facts.draws_N,
        "largest |advantage|": np.abs(facts.rows.advantage),
        "largest KL": facts.approx_kl_N,
        "most clipped": facts.clip_fraction_N,
        "oldest at a use": facts.oldest_use_N,
    }


def _largest(values: np.ndarray, count: int) -> list[int]:
    """Returns the rows of the `count` largest values above 0, the first rows of equal ones."""
    order = np.argsort(-np.nan_to_num(values), kind="stable")[:count]
    return [int(row) for row in order if values[row] > 0]


def _whole_groups(rows: Rollouts, chosen: np.ndarray, room: int) -> np.ndarray:
    """Returns rows of groups evenly spaced in the log, at most `room` not yet `chosen`."""
    _, first, group_of, sizes = np.unique(
        rows.group_id, return_index=True, return_inverse=True, return_counts=True
    )
    by_time = np.argsort(first)
    count = max(1, min(len(by_time), int(room / sizes.mean())))
    groups = by_time[np.linspace(0, len(by_time) - 1, count).round().astype(int)]
    new = np.setdiff1d(np.flatnonzero(np.isin(group_of, groups)), chosen)
    return new[:room]
