"""Intervals over seeds and problems, the paired test over seeds, and how many seeds would tell.

    S  seeds     N  problems of a benchmark

A result is a mean over benchmarks of means over problems and seeds. Both are samples: another seed
trains another model, and another set of problems asks other questions. Seeds and problems are
crossed (every model answers every problem), so the variance of the mean is that of the two-way
random-effects model

    x_sp = mean + seed_s + problem_p + rest_sp

estimated as V = V_seeds + V_problems - V_rest, because the first two both contain the rest. It is
the two-way clustered variance of Cameron, Gelbach and Miller (2011), with the degrees of freedom of
Satterthwaite (1946). The interval of a difference is mean ± t·√V; that of an accuracy is of
`share_interval`. One or two seeds say too little of other seeds for an interval.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from grpo_replay.evaluation.statistics import (
    CONFIDENCE,
    EQUAL,
    Component,
    Interval,
    accuracy_interval,
    difference_interval,
    share_interval,
    sign_flip_p_value,
    t_interval,
    with_both_answers,
)

FEWEST_SEEDS = 3
"""With fewer there is no interval over seeds."""

MOST_SEEDS = 1000
"""More are not asked for."""

FLIPS = 20_000
"""Random sign flips of the test over seeds, with more than 14 seeds; fewer are enumerated."""


def accuracy_over_seeds(values_SN: Sequence[np.ndarray]) -> tuple[Interval | None, str | None]:
    """The 95 % interval of the mean of accuracies, one [S, N] per benchmark, and what it is over.

    If a benchmark has one problem, it is over seeds alone. None for fewer than `FEWEST_SEEDS`.
    """
    if len(values_SN[0]) < FEWEST_SEEDS:
        return None, None
    mean = _mean(values_SN)
    if all(each.shape[1] > 1 for each in values_SN):
        widened = [with_both_answers(each) for each in values_SN]
        found = two_level_variance(widened)
        bounds = share_interval(mean, _mean(widened), found.variance, found.freedom)
        return bounds, "seeds and problems"
    found = _over_seeds(values_SN)
    if found.variance == 0:
        return (mean, mean), "seeds"
    return share_interval(mean, mean, found.variance, found.freedom), "seeds"


def accuracy_over_problems(values_SN: Sequence[np.ndarray]) -> tuple[Interval | None, str | None]:
    """The same for one model, [1, N] per benchmark: over problems alone."""
    bounds = accuracy_interval([each[0] for each in values_SN])
    return bounds, None if bounds is None else "problems"


def difference_over_seeds(values_SN: Sequence[np.ndarray]) -> tuple[Interval | None, str | None]:
    """The 95 % interval of the mean of differences between accuracies, and what it is over. If no
    difference varies, that of `with_both_answers`."""
    if len(values_SN[0]) < FEWEST_SEEDS:
        return None, None
    if all(each.shape[1] > 1 for each in values_SN):
        found = two_level_variance(values_SN)
        if found.variance < EQUAL**2:
            found = two_level_variance([with_both_answers(each, least=-1.0) for each in values_SN])
        return t_interval(_mean(values_SN), found), "seeds and problems"
    return t_interval(_mean(values_SN), _over_seeds(values_SN)), "seeds"


def difference_over_problems(values_SN: Sequence[np.ndarray]) -> tuple[Interval | None, str | None]:
    """The same for two models, [1, N] per benchmark: over problems alone."""
    bounds = difference_interval([each[0] for each in values_SN])
    return bounds, None if bounds is None else "problems"


def seeds_to_tell(values_SN: Sequence[np.ndarray]) -> float | None:
    """The number of seeds from which on the interval of the mean of these differences would not
    hold 0, if mean and variances stayed as they are: seeds and the rest shrink with their number,
    problems do not. Infinite if more than `MOST_SEEDS`; None for a single seed."""
    seeds = len(values_SN[0])
    if seeds < 2:
        return None
    shrinking = seeds * _over_seeds(values_SN).variance
    staying = 0.0
    if all(each.shape[1] > 1 for each in values_SN):
        staying = max(0.0, _over_problems(values_SN).variance - _rest(values_SN).variance)
    for count in range(FEWEST_SEEDS, MOST_SEEDS + 1):
        quantile = stdtrit(count - 1, (1 + CONFIDENCE) / 2)
        if quantile * math.sqrt(shrinking / count + staying) < abs(_mean(values_SN)):
            return count
    return math.inf


def _mean(values_SN: Sequence[np.ndarray]) -> float:
    return float(np.mean([each.mean() for each in values_SN]))


def two_level_variance(values_SN: Sequence[np.ndarray]) -> Component:
    """V_seeds + V_problems - V_rest, with Satterthwaite's degrees of freedom.

    Neither V_seeds nor V_problems exceeds V in expectation, so V is at least as large as both, and
    has at least as many degrees of freedom as the one with fewer.
    """
    over_seeds, over_problems = _over_seeds(values_SN), _over_problems(values_SN)
    rest = _rest(values_SN)
    fewest = min(over_seeds.freedom, over_problems.freedom)
    total = over_seeds.variance + over_problems.variance - rest.variance
    variance = max(total, over_seeds.variance, over_problems.variance)
    if variance == 0:
        return Component(0.0, fewest)
    shares = sum(part.share for part in (over_seeds, over_problems, rest))
    return Component(variance, max(variance**2 / shares, fewest))


def sign_flip_over_seeds(difference_S: np.ndarray) -> float | None:
    """Two-sided p-value of the mean difference over seeds; None for fewer than two seeds.

    If the two arms are equal on these problems, the difference at each seed is equally likely with
    either sign. Other problems are not part of the test; they are of the interval.
    """
    if len(difference_S) < 2:
        return None
    return sign_flip_p_value([difference_S], FLIPS, np.random.default_rng(len(difference_S)))


def _over_seeds(values_SN: Sequence[np.ndarray]) -> Component:
    """The variance of the mean over seeds, of each seed's mean over problems and benchmarks."""
    mean_S = np.mean([each.mean(axis=1) for each in values_SN], axis=0)
    seeds = len(mean_S)
    if np.ptp(mean_S) < EQUAL:  # the variance of equal floats is not always 0
        return Component(0.0, seeds - 1)
    return Component(float(np.var(mean_S, ddof=1)) / seeds, seeds - 1)


def _over_problems(values_SN: Sequence[np.ndarray]) -> Component:
    """The variance of the mean over problems, of each one's mean over seeds."""
    parts = [Component.over_problems(each.mean(axis=0)) for each in values_SN]
    return Component.of_mean(parts)


def _rest(values_SN: Sequence[np.ndarray]) -> Component:
    """The variance of the mean of what neither seed nor problem explains."""
    found = []
    for each in values_SN:
        seeds, problems = each.shape
        rest = each - each.mean(axis=0) - each.mean(axis=1, keepdims=True) + each.mean()
        freedom = (seeds - 1) * (problems - 1)
        found.append(Component(float((rest**2).sum()) / freedom / each.size, freedom))
    return Component.of_mean(found)
