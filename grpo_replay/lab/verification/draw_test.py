"""A statistical test that the draws follow the stated distribution.

Order the candidates of a step in any way that does not depend on the draw. If draw j is from the
remaining candidates with weights w, then `u_j = (W_j + v w_j) / Σ w` is uniform on (0, 1) and
independent of earlier draws. W_j is the remaining weight below the drawn candidate, w_j its own
weight, and v an independent uniform number. This is Rosenblatt's transform, randomised for a
discrete distribution; without replacement, earlier draws are removed. A Kolmogorov-Smirnov test
compares all u of a run with the uniform distribution.
"""

import math

import numpy as np

FALSE_ALARM = 1e-6
"""Probability that a correct run fails, over both orders together."""

_SEED = 20260604
_BLOCK = 512  # draws compared with all earlier ones at once: limits memory
_RESOLVED = 1e-6  # share of the weight left below which differences of sums have lost their digits


class DrawTest:
    """Collects a run's draws under two orders of the candidates. The order by priority detects a
    wrong exponent or priority; the order by age detects a preference for old or new rollouts."""

    ORDERS = ("priority", "age")

    def __init__(self) -> None:
        self._rng = np.random.default_rng(_SEED)
        self._uniforms: dict[str, list[np.ndarray]] = {order: [] for order in self.ORDERS}

    def add(self, log_weight_U: np.ndarray, drawn: np.ndarray, with_replacement: bool) -> None:
        """Add a step: logarithms of the weights of all units, oldest first, and indices of the
        draws in order."""
        orders = {
            "priority": np.argsort(log_weight_U, kind="stable"),
            "age": np.arange(len(log_weight_U)),
        }
        for name, order in orders.items():
            rank = np.empty(len(order), dtype=np.int64)
            rank[order] = np.arange(len(order))
            v = self._rng.random(len(drawn))
            self._uniforms[name].append(
                rosenblatt(log_weight_U[order], rank[drawn], v, with_replacement)
            )

    def p_values(self) -> dict[str, tuple[int, float]]:
        """Number of draws and Kolmogorov-Smirnov p-value by order."""
        pooled = {
            order: np.concatenate([np.zeros(0), *self._uniforms[order]]) for order in self.ORDERS
        }
        return {order: (u.size, uniform_p_value(u)) for order, u in pooled.items()}


def rosenblatt(
    log_weight_U: np.ndarray, ranks_K: np.ndarray, v_K: np.ndarray, with_replacement: bool
) -> np.ndarray:
    """u_j in [0, 1] of K draws, given their ranks in the order of `log_weight_U`. K² operations.

    Without replacement, draws from a remainder of little weight (a large exponent) are computed
    from the remaining weights alone, K·U operations at most.
    """
    weight_U = np.exp(log_weight_U - log_weight_U.max())
    own_K = weight_U[ranks_K]
    below_K = (np.cumsum(weight_U) - weight_U)[ranks_K]
    left_K = np.full(len(ranks_K), weight_U.sum())
    if not with_replacement:
        below_K = below_K - _taken_below(ranks_K, own_K)
        left_K = left_K - np.concatenate([[0.0], np.cumsum(own_K)[:-1]])
        for j in np.flatnonzero(left_K < _RESOLVED * weight_U.sum()):
            below_K[j], own_K[j], left_K[j] = _among_remaining(log_weight_U, ranks_K, int(j))
    # By rounding, the last of many draws can have slightly less than its own weight left.
    left_K = np.maximum(left_K, np.maximum(below_K, 0.0) + own_K)
    return np.clip((below_K + v_K * own_K) / left_K, 0.0, 1.0)


def _among_remaining(
    log_weight_U: np.ndarray, ranks_K: np.ndarray, draw: int
) -> tuple[float, float, float]:
    """Weight below the drawn unit, its own, and all, of the units that earlier draws have left.
    Relative to the largest of them, which may be as small as it likes."""
    log_left_U = log_weight_U.copy()
    log_left_U[ranks_K[:draw]] = -np.inf
    left_U = np.exp(log_left_U - log_left_U.max())
    rank = ranks_K[draw]
    return float(left_U[:rank].sum()), float(left_U[rank]), float(left_U.sum())


def _taken_below(ranks_K: np.ndarray, own_K: np.ndarray) -> np.ndarray:
    """For each draw, the total weight of earlier draws with a lower rank."""
    taken = np.zeros(len(ranks_K))
    for start in range(0, len(ranks_K), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(ranks_K)))
        earlier = np.arange(rows[-1] + 1)
        lower = ranks_K[earlier][None, :] < ranks_K[rows][:, None]
        taken[rows] = (lower & (earlier[None, :] < rows[:, None])) @ own_K[earlier]
    return taken


def uniform_p_value(u_N: np.ndarray) -> float:
    """Kolmogorov-Smirnov p-value of u against the uniform distribution on (0, 1), with Stephens'
    correction for finite N. 1 if N is 0."""
    if u_N.size == 0:
        return 1.0
    ordered, n = np.sort(u_N), u_N.size
    above = (np.arange(1, n + 1) / n - ordered).max()
    below = (ordered - np.arange(n) / n).max()
    distance = max(above, below) * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    if distance < 0.2:
        return 1.0
    terms = [(-1) ** (k - 1) * math.exp(-2 * (k * distance) ** 2) for k in range(1, 101)]
    return min(1.0, max(0.0, 2 * math.fsum(terms)))
