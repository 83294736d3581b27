"""avg@k, unbiased pass@j, intervals over problems and the sign-flip test.

    N  problems of a benchmark     K  samples per problem     B  bootstrap resamples

A problem, not a sample, is the unit of resampling: the samples of one problem are not independent.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv, ndtri, stdtrit

CONFIDENCE = 0.95

EXACT_PROBLEMS = 14
"""Enumerate all sign flips up to this many differing problems; beyond it, draw them at random."""

_FLIPS_AT_ONCE = 1000


def pass_at_each(correct_N: np.ndarray, samples: int) -> np.ndarray:
    """pass@j of every problem, [N, K]; column j-1 is pass@j.

    The probability that j of K completions, drawn without replacement, include a correct one:
    1 - C(K-c, j) / C(K, j) with c correct (Chen et al. 2021, eq. 1), as a product over draws.
    """
    if correct_N.min() < 0 or correct_N.max() > samples:
        raise ValueError(f"pass@j of {correct_N.tolist()} correct among {samples} samples")
    drawn_K = np.arange(samples)
    wrong_left_NK = np.maximum(samples - correct_N[:, None] - drawn_K, 0)
    return 1.0 - np.cumprod(wrong_left_NK / (samples - drawn_K), axis=1)


def standard_error(values_N: np.ndarray) -> float | None:
    """The standard error of the mean over problems; None for fewer than two."""
    if len(values_N) < 2:
        return None
    return float(np.std(values_N, ddof=1) / np.sqrt(len(values_N)))


def bootstrap_draws(problems: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [B, N]: the number of times each problem is drawn in each resample."""
    return rng.multinomial(problems, np.full(problems, 1 / problems), size=resamples)


def resampled_mean(draws_BN: np.ndarray, values_N: np.ndarray) -> np.ndarray:
    """[B]: the mean over the resampled problems. NaN for a single problem."""
    problems = draws_BN.shape[1]
    if problems == 1:
        return np.full(len(draws_BN), np.nan)
    return draws_BN @ values_N / problems


def interval(values_B: np.ndarray) -> tuple[float, float] | None:
    """The percentile interval of bootstrap values at `CONFIDENCE`; None if any is NaN."""
    if np.isnan(values_B).any():
        return None
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values_B, [tail, 100 - tail])
    return float(low), float(high)


def with_both_answers(values_N: np.ndarray) -> np.ndarray:
    """[…, N + 2]: the values with two more problems, one never and one always solved.

    A variance estimated from these is never 0. Where all problems agree, every problem counts as
    about one observation, however many samples it has.
    """
    ends = [np.full((*values_N.shape[:-1], 1), end) for end in (0.0, 1.0)]
    return np.concatenate([values_N, *ends], axis=-1)


def accuracy_interval(values_N: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """The interval over problems of the mean over benchmarks of accuracies, one [N] each.

    None if a benchmark has a single problem.
    """
    if any(len(each) < 2 for each in values_N):
        return None
    widened = [with_both_answers(each) for each in values_N]
    variance = sum(np.var(each, ddof=1) / len(each) for each in widened) / len(widened) ** 2
    mean, center = (float(np.mean([v.mean() for v in each])) for each in (values_N, widened))
    return share_interval(mean, center, float(variance))


def share_interval(
    share: float, center: float, variance: float, freedom: float = math.inf
) -> tuple[float, float]:
    """The interval of Clopper and Pearson (1934) of a share of as many independent observations as
    have this variance, so never outside [0, 1]: Korn and Graubard (1998).

    `variance` and `center` are of the mean of `with_both_answers`; their effective number of
    observations is center·(1 - center)/variance, less for few degrees of freedom.
    """
    tail = (1 - CONFIDENCE) / 2
    few = ndtri(tail) / (ndtri(tail) if math.isinf(freedom) else stdtrit(freedom, tail))
    count = center * (1 - center) / variance * few**2
    right = share * count
    wrong = count - right
    low = 0.0 if share <= 0 else float(betaincinv(right, wrong + 1, tail))
    high = 1.0 if share >= 1 else float(betaincinv(right + 1, wrong, 1 - tail))
    return low, high


def sign_flip_p_value(differences: list[np.ndarray], flips: int, rng: np.random.Generator) -> float:
    """Two-sided p-value of the mean over benchmarks of the mean differences, one [N] per benchmark.

    Under the null hypothesis A and B are exchangeable on every problem, so each difference is
    equally likely with either sign. The p-value is the fraction of sign flips whose mean is at
    least as large as the observed one. With `flips` random flips it is (1 + count) / (1 + flips),
    so never 0. Up to `EXACT_PROBLEMS` differing problems, all flips are enumerated and the test is
    exact.
    """
    shares = np.concatenate([each / len(each) for each in differences])
    shares = shares[shares != 0]
    # Rounding must not decide ties.
    limit = abs(shares.sum()) - 1e-9 * np.abs(shares).sum()
    if len(shares) <= EXACT_PROBLEMS:
        sums = np.zeros(1)
        for share in shares:
            sums = np.concatenate([sums + share, sums - share])
        return float(np.mean(np.abs(sums) >= limit))
    as_large = 0
    for start in range(0, flips, _FLIPS_AT_ONCE):
        size = (min(_FLIPS_AT_ONCE, flips - start), len(shares))
        signs = 2.0 * rng.integers(0, 2, size, dtype=np.int8) - 1.0
        as_large += int(np.count_nonzero(np.abs(signs @ shares) >= limit))
    return float((1 + as_large) / (1 + flips))
