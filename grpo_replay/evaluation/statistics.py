"""avg@k, unbiased pass@j, the bootstrap over problems and the sign-flip test. Pure numpy.

    N  problems of a benchmark     K  samples per problem     B  bootstrap resamples

A problem, not a sample, is the unit of resampling: the samples of one problem are not independent.
"""

import numpy as np

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
