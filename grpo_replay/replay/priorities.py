"""Priorities and draw probabilities (paper A, section 4): `P(i) = p_i^α / Σ_j p_j^α`.

Computed in float64 from logarithms, so that no exponent overflows.
"""

import math
from dataclasses import dataclass

import numpy as np

from grpo_replay.errors import RecipeError


def rollout_priorities(
    kind: str, advantage_N: np.ndarray, group_std_N: np.ndarray, epsilon: float
) -> np.ndarray:
    """p_i before the exponent, float64 [N]: `|A_i| + ε`, `σ_g + ε`, or 1.

    `kind` is `replay.priority`: abs_advantage, group_std or uniform.
    """
    if kind == "abs_advantage":
        return np.abs(np.asarray(advantage_N, dtype=np.float64)) + epsilon
    if kind == "group_std":
        return np.asarray(group_std_N, dtype=np.float64) + epsilon
    if kind == "uniform":
        return np.ones(len(advantage_N), dtype=np.float64)
    raise ValueError(f"priority {kind!r}: expected abs_advantage, group_std or uniform")


@dataclass(frozen=True, slots=True, eq=False)
class DrawLaw:
    """The distribution of the first draw from N candidates.

    `log_weight_N` is `α (ln p_i - max_j ln p_j)`: its maximum is 0, and it is -inf for candidates
    that are never drawn. `weight_N` is its exponential, `total` the sum of the weights.
    """

    log_weight_N: np.ndarray
    weight_N: np.ndarray
    total: float

    @property
    def probability_N(self) -> np.ndarray:
        """P(i), float64 [N]. 0 for log-weights below -745, where exp underflows."""
        return self.weight_N / self.total

    @property
    def effective_sample_size(self) -> float:
        """`1 / Σ P²`: N if uniform, 1 if one candidate has all the mass, 0 without candidates."""
        # No BLAS dot product: its rounding depends on the number of threads.
        return self.total**2 / float(np.square(self.weight_N).sum()) if self.total else 0.0

    @property
    def entropy(self) -> float:
        """`-Σ P ln P` in nats: ln N if uniform, 0 without candidates."""
        if not self.total:
            return 0.0
        finite = np.where(self.weight_N > 0, self.log_weight_N, 0.0)
        return math.log(self.total) - float((self.weight_N * finite).sum()) / self.total


def draw_law(priority_N: np.ndarray, exponent: float) -> DrawLaw:
    """The distribution `P ∝ p^α`. With α = 0 it is exactly uniform, zero priorities included. With
    α > 0 a candidate of priority 0 is never drawn.

    Raises RecipeError if α > 0 and all priorities are 0; only `replay.priority_epsilon: 0` allows
    that.
    """
    priority_N = np.asarray(priority_N, dtype=np.float64)
    if priority_N.size and not (np.isfinite(priority_N).all() and priority_N.min() >= 0):
        bad = int(np.flatnonzero(~(np.isfinite(priority_N) & (priority_N >= 0)))[0])
        raise ValueError(f"priority {bad} is {priority_N[bad]}: expected a finite number ≥ 0")
    if exponent == 0 or priority_N.size == 0:
        return DrawLaw(np.zeros_like(priority_N), np.ones_like(priority_N), float(priority_N.size))
    with np.errstate(divide="ignore"):
        log_priority_N = np.log(priority_N)
    largest = log_priority_N.max()
    if largest == -np.inf:
        raise RecipeError(
            f"replay.priority_epsilon 0: all {priority_N.size} priorities are 0, so no draw has a "
            "probability; set replay.priority_epsilon to 1e-6"
        )
    log_weight_N = exponent * (log_priority_N - largest)
    weight_N = np.exp(log_weight_N)
    return DrawLaw(log_weight_N, weight_N, float(weight_N.sum()))


def draw_without_replacement(law: DrawLaw, count: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct indices in the order drawn, int64 [≤ count]; fewer if fewer can be drawn.

    The distribution is that of successive draws, each from the remaining candidates with
    renormalised probabilities, as in `Generator.choice(replace=False, p=P)`. Implemented as
    Gumbel-top-k (Efraimidis–Spirakis): the `count` smallest keys `ln E_i - ln w_i`, in increasing
    order, with E_i exponential. Candidates of weight 0 have key infinity and are never drawn.
    """
    count = min(count, int(np.count_nonzero(law.log_weight_N > -np.inf)))
    if count <= 0:
        return np.zeros(0, dtype=np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        key_N = np.log(rng.standard_exponential(law.log_weight_N.size)) - law.log_weight_N
    first = np.argpartition(key_N, count - 1)[:count]
    return first[np.argsort(key_N[first], kind="stable")].astype(np.int64, copy=False)


def draw_with_replacement(law: DrawLaw, count: int, rng: np.random.Generator) -> np.ndarray:
    """Indices of independent draws, int64 [count]; empty without candidates."""
    if count <= 0 or law.total == 0:
        return np.zeros(0, dtype=np.int64)
    cumulative_N = np.cumsum(law.weight_N)
    targets = rng.random(count) * cumulative_N[-1]
    indices = np.searchsorted(cumulative_N, targets, side="right")
    # Rounding can place a target at the end of the range.
    last = int(np.flatnonzero(law.weight_N)[-1])
    return np.minimum(indices, last).astype(np.int64, copy=False)
