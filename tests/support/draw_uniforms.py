"""Draws as numbers that are uniform on (0, 1) if the draws follow the stated law.

Order the candidates in any way that does not depend on the draw. If a draw is from the remaining
candidates with weights w, then `u = (W + v w) / Σ w` is uniform on (0, 1) and independent of
earlier draws. W is the remaining weight below the drawn candidate, w its own weight, and v an
independent uniform number. This is Rosenblatt's transform, randomised for a discrete distribution;
without replacement, earlier draws are removed.
"""

import numpy as np


def rosenblatt(
    weight_U: np.ndarray, drawn_K: np.ndarray, with_replacement: bool, rng: np.random.Generator
) -> np.ndarray:
    """u of each of K draws, given the weights of the candidates and the drawn indices in order."""
    left_U = np.array(weight_U, dtype=np.float64)
    found = np.empty(len(drawn_K))
    for k, drawn in enumerate(drawn_K):
        found[k] = (left_U[:drawn].sum() + rng.random() * left_U[drawn]) / left_U.sum()
        if not with_replacement:
            left_U[drawn] = 0.0
    return found
