"""avg@k, unbiased pass@j, and the bootstrap over problems. Pure numpy.

    N  problems of a benchmark     K  samples per problem     B  bootstrap resamples

A problem, not a sample, is the unit of resampling: the samples of one problem are not independent.
"""

from math import comb

import numpy as np

CONFIDENCE = 0.95


def pass_at(correct: int, samples: int, j: int) -> float:
    """The probability that j of `samples` completions, drawn without replacement, hold a correct
    one: 1 - C(n-c, j) / C(n, j), with n = samples and c = correct (Chen et al. 2021, eq. 1)."""
    if not (0 <= correct <= samples and 1 <= j <= samples):
        raise ValueError(f"pass@{j} of {correct} correct among {samples} samples")
    return 1.0 - comb(samples - correct, j) / comb(samples, j)


def pass_at_each(correct_N: np.ndarray, samples: int) -> np.ndarray:
    """pass@j of every problem, [N, K]; column j-1 is pass@j."""
    table = [[pass_at(c, samples, j) for j in range(1, samples + 1)] for c in range(samples + 1)]
    return np.array(table)[correct_N]


def standard_error(values_N: np.ndarray) -> float | None:
    """The standard error of the mean over problems; None for fewer than two."""
    if len(values_N) < 2:
        return None
    return float(np.std(values_N, ddof=1) / np.sqrt(len(values_N)))


def bootstrap_weights(problems: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """[B, N]: in each resample, how often each problem was drawn, divided by N. A mean over the
    resampled problems is `weights @ values_N`."""
    return rng.multinomial(problems, np.full(problems, 1 / problems), size=resamples) / problems


def interval(values_B: np.ndarray) -> tuple[float, float]:
    """The percentile interval of bootstrap values, at `CONFIDENCE`."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values_B, [tail, 100 - tail])
    return float(low), float(high)


def two_sided_p_value(difference: float, differences_B: np.ndarray) -> float:
    """How often a bootstrap difference, centred on zero as the null hypothesis has it, is at least
    as large as the one observed; (1 + count) / (1 + B), so never 0."""
    # Rounding must not decide ties such as 0 against 0.
    as_extreme = np.abs(differences_B - difference) >= abs(difference) - 1e-12
    return float((1 + np.count_nonzero(as_extreme)) / (1 + len(differences_B)))
