"""The interval of an accuracy, from its definition and scipy's beta distribution."""

from collections.abc import Sequence

import numpy as np
from scipy import stats


def share_bounds(columns: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Over problems, of the mean over benchmarks: Clopper and Pearson's bounds, for as many
    observations as have the variance with one problem never and one always solved added."""
    added = [[*map(float, column), 0.0, 1.0] for column in columns]
    variance = sum(np.var(each, ddof=1) / len(each) for each in added) / len(added) ** 2
    center = np.mean([np.mean(each) for each in added])
    count = center * (1 - center) / variance
    return beta_bounds(float(np.mean([np.mean(each) for each in columns])), count)


def beta_bounds(share: float, count: float) -> tuple[float, float]:
    right = share * count
    low = 0.0 if share == 0 else stats.beta.ppf(0.025, right, count - right + 1)
    high = 1.0 if share == 1 else stats.beta.ppf(0.975, right + 1, count - right)
    return float(low), float(high)
