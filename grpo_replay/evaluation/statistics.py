"""avg@k, unbiased pass@j, and the bootstrap over problems. Pure numpy.

    N  problems of a benchmark     K  samples per problem     B  bootstrap resamples

A problem, not a sample, is the unit of resampling: the samples of one problem are not independent.
"""

import numpy as np

CONFIDENCE = 0.95


def pass_at_each(correct_N: np.ndarray, samples: int) -> np.ndarray:
    """pass@j of every problem, [N, K]; column j-1 is pass@j.

    The probability that j of K completions, drawn without replacement, hold a correct one:
    1 - C(K-c, j) / C(K, j), c of them correct (Chen et al. 2021, eq. 1), as a product over draws.
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
