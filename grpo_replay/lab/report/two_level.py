"""Intervals over seeds and problems, and the number of seeds that would decide a comparison.

    S  seeds     N  problems of a benchmark

A result is a mean over benchmarks of means over problems and seeds. Both are samples: another seed
trains another model, and another set of problems asks other questions. Seeds and problems are
crossed (every model answers every problem), so the variance of the mean is that of the two-way
random-effects model

    x_sp = mean + seed_s + problem_p + rest_sp

estimated as V = V_seeds + V_problems - V_rest, because the first two both contain the rest. It is
the two-way clustered variance of Cameron, Gelbach and Miller (2011), with the degrees of freedom of
Satterthwaite (1946). One or two seeds say too little of other seeds for an interval; with a single
problem the variance is V_seeds. `evaluation.statistics` has the same interval over problems alone.
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
    share_interval,
    t_interval,
    with_unsolved_and_solved,
)

FEWEST_SEEDS = 3
"""Minimum number of seeds for an interval."""

MOST_SEEDS = 1000
"""The largest number of seeds that `seeds_to_tell` returns."""


def sampled_over(values_SN: Sequence[np.ndarray]) -> str | None:
    """Returns what an interval of these values covers, seeds or also problems; None if there is
    none. The values are [S, N] for each benchmark."""
    if len(values_SN[0]) < FEWEST_SEEDS:
        return None
    return "seeds and problems" if _have_problems(values_SN) else "seeds"


def two_level_accuracy_interval(values_SN: Sequence[np.ndarray]) -> Interval | None:
    """Compute the 95 % interval, over seeds and problems, of the mean of accuracies, an [S, N] for
    each benchmark; None for fewer than `FEWEST_SEEDS`."""
    if len(values_SN[0]) < FEWEST_SEEDS:
        return None
    widened = values_SN
    if _have_problems(values_SN):
        widened = [with_unsolved_and_solved(benchmark_SN) for benchmark_SN in values_SN]
    estimate = _variance(widened)
    return share_interval(_mean(values_SN), _mean(widened), estimate.variance, estimate.freedom)


def two_level_difference_interval(values_SN: Sequence[np.ndarray]) -> Interval | None:
    """Compute the 95 % interval of the mean of differences between accuracies; None for fewer than
    `FEWEST_SEEDS`. If they do not vary, the variance is that of `with_unsolved_and_solved`."""
    if len(values_SN[0]) < FEWEST_SEEDS:
        return None
    estimate = _variance(values_SN)
    if estimate.variance < EQUAL**2 and _have_problems(values_SN):
        widened = [with_unsolved_and_solved(benchmark_SN, least=-1.0) for benchmark_SN in values_SN]
        estimate = _variance(widened)
    return t_interval(_mean(values_SN), estimate)


def _have_problems(values_SN: Sequence[np.ndarray]) -> bool:
    return all(benchmark_SN.shape[1] > 1 for benchmark_SN in values_SN)


def _variance(values_SN: Sequence[np.ndarray]) -> Component:
    return (two_level_variance if _have_problems(values_SN) else _over_seeds)(values_SN)


def seeds_to_tell(values_SN: Sequence[np.ndarray]) -> float | None:
    """Estimate the smallest number of seeds with which the interval of the mean difference excludes
    0, if mean and variances stay the same. More seeds shrink V_seeds and V_rest, not V_problems.
    Infinite if more than `MOST_SEEDS`; None for a single seed."""
    seeds = len(values_SN[0])
    if seeds < 2:
        return None
    per_seed, constant = seeds * _over_seeds(values_SN).variance, 0.0
    if _have_problems(values_SN):
        rest = _rest(values_SN).variance
        constant = max(0.0, _over_problems(values_SN).variance - rest)
        per_seed = max(per_seed, seeds * rest)  # as in `two_level_variance`
    for count in range(FEWEST_SEEDS, MOST_SEEDS + 1):
        quantile = stdtrit(count - 1, (1 + CONFIDENCE) / 2)
        if quantile * math.sqrt(per_seed / count + constant) < abs(_mean(values_SN)):
            return count
    return math.inf


def two_level_variance(values_SN: Sequence[np.ndarray]) -> Component:
    """Compute V_seeds + V_problems - V_rest, with Satterthwaite's degrees of freedom.

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


def _mean(values_SN: Sequence[np.ndarray]) -> float:
    return float(np.mean([benchmark_SN.mean() for benchmark_SN in values_SN]))


def _over_seeds(values_SN: Sequence[np.ndarray]) -> Component:
    """The variance of the mean over seeds, of each seed's mean over problems and benchmarks."""
    mean_S = np.mean([benchmark_SN.mean(axis=1) for benchmark_SN in values_SN], axis=0)
    seeds = len(mean_S)
    if np.ptp(mean_S) < EQUAL:  # the variance of equal floats is not always 0
        return Component(0.0, seeds - 1)
    return Component(float(np.var(mean_S, ddof=1)) / seeds, seeds - 1)


def _over_problems(values_SN: Sequence[np.ndarray]) -> Component:
    """Returns the variance of the mean over problems, of each problem's mean over seeds."""
    means = [benchmark_SN.mean(axis=0) for benchmark_SN in values_SN]
    return Component.of_mean([Component.over_problems(mean_N) for mean_N in means])


def _rest(values_SN: Sequence[np.ndarray]) -> Component:
    """Computes the variance of the mean of residuals, which neither seed nor problem explains."""
    parts = []
    for x_SN in values_SN:
        seeds, problems = x_SN.shape
        rest_SN = x_SN - x_SN.mean(axis=0) - x_SN.mean(axis=1, keepdims=True) + x_SN.mean()
        freedom = (seeds - 1) * (problems - 1)
        parts.append(Component(float((rest_SN**2).sum()) / freedom / x_SN.size, freedom))
    return Component.of_mean(parts)
