"""Candidates for a draw, and draws of single rollouts or whole queries."""

from dataclasses import dataclass, fields, replace

import numpy as np

from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.priorities import (
    draw_law,
    draw_with_replacement,
    draw_without_replacement,
)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The rollouts that can be drawn: priority p (float64 [N], before the exponent), group id
    (int64 [N]) and whether it was ever drawn (bool [N]). Rollouts of a group are adjacent."""

    priority_N: np.ndarray
    group_id_N: np.ndarray
    used_N: np.ndarray

    def __add__(self, other: "Candidates") -> "Candidates":
        return Candidates(
            *(
                np.concatenate([getattr(self, field.name), getattr(other, field.name)])
                for field in fields(self)
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class Picks:
    """Indices into the candidates in the order drawn, each with its first-draw probability (that of
    its query when `replay.unit` is query), and effective sample size and entropy of the
    distribution. `unused_first` draws from two distributions, one over the rollouts never drawn and
    one over the others; effective sample size and entropy are those of the first one used."""

    indices: np.ndarray  # int64
    probabilities: np.ndarray  # float64
    effective_sample_size: float
    entropy: float


def pick(
    candidates: Candidates, count: int, settings: ReplaySection, rng: np.random.Generator
) -> Picks:
    """Draw `count` units from the candidates: rollouts, or queries with all their rollouts.

    Without replacement at most as many units are drawn as there are candidates. The priority of a
    query is the mean over its rollouts.
    """
    if settings.unit == "rollout" or candidates.group_id_N.size == 0:
        return _pick_units(candidates.priority_N, candidates.used_N, count, settings, rng)
    starts_Q, sizes_Q = query_spans(candidates.group_id_N)
    priority_Q = np.add.reduceat(candidates.priority_N, starts_Q) / sizes_Q
    used_Q = np.logical_or.reduceat(candidates.used_N, starts_Q)
    queries = _pick_units(priority_Q, used_Q, count, settings, rng)
    sizes = sizes_Q[queries.indices]
    return Picks(
        indices=_members(starts_Q[queries.indices], sizes),
        probabilities=np.repeat(queries.probabilities, sizes),
        effective_sample_size=queries.effective_sample_size,
        entropy=queries.entropy,
    )


def query_spans(group_id_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start index and length of each run of equal group ids, int64 [Q] each."""
    if group_id_N.size == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    starts = np.concatenate([[0], np.flatnonzero(group_id_N[1:] != group_id_N[:-1]) + 1])
    return starts, np.diff(starts, append=group_id_N.size)


def check_groups_adjacent(group_id_N: np.ndarray) -> None:
    """Raises ValueError if the rollouts of a group are not adjacent."""
    starts, _ = query_spans(group_id_N)
    ids, runs = np.unique(group_id_N[starts], return_counts=True)
    if (runs > 1).any():
        raise ValueError(
            f"the rollouts of group {ids[runs > 1][0]} are not adjacent: order them by group"
        )


def _pick_units(
    priority_U: np.ndarray,
    used_U: np.ndarray,
    count: int,
    settings: ReplaySection,
    rng: np.random.Generator,
) -> Picks:
    """Draw from all units; with `unused_first` from the units never drawn, then, if those are too
    few, from the others."""
    if not settings.unused_first:
        return _pick_by_law(priority_U, count, settings, rng)
    first, second = np.flatnonzero(~used_U), np.flatnonzero(used_U)
    if first.size == 0:
        first, second = second, first
    head = _pick_by_law(priority_U[first], count, settings, rng)
    tail = _pick_by_law(priority_U[second], count - head.indices.size, settings, rng)
    return replace(
        head,
        indices=np.concatenate([first[head.indices], second[tail.indices]]),
        probabilities=np.concatenate([head.probabilities, tail.probabilities]),
    )


def _pick_by_law(
    priority_U: np.ndarray, count: int, settings: ReplaySection, rng: np.random.Generator
) -> Picks:
    law = draw_law(priority_U, settings.priority_exponent)
    draw = draw_with_replacement if settings.with_replacement else draw_without_replacement
    indices = draw(law, count, rng)
    return Picks(
        indices=indices,
        probabilities=law.weight_N[indices] / law.total if indices.size else np.zeros(0),
        effective_sample_size=law.effective_sample_size,
        entropy=law.entropy,
    )


def _members(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """start, start + 1, … of each run, concatenated."""
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(starts, sizes) + within
