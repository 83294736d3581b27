"""The interval of an accuracy, from its definition and scipy's t distribution."""

from collections.abc import Sequence

import numpy as np
from scipy import stats


def share_bounds(columns: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Over problems, of the mean over benchmarks: mean ± t·√V with one problem never and one always
    solved added, within 0 and 1; V the sum of s²/n over b², t with Satterthwaite's freedom."""
    added = [[*map(float, column), 0.0, 1.0] for column in columns]
    parts = [(np.var(each, ddof=1) / len(each) / len(added) ** 2, len(each) - 1) for each in added]
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)
    center = np.mean([np.mean(each) for each in added])
    half = stats.t.ppf(0.975, freedom) * variance**0.5
    return float(max(0, center - half)), float(min(1, center + half))
