"""Paper B's design theory as a calculator: how long to keep rollouts and how often to reuse them.

Symbols (Arnal et al., arXiv 2604.08706; `docs/planning.md` explains them in words):

    x = N/R   staleness horizon: training steps that a rollout stays in the buffer
    y = B/R   replay ratio: how often a rollout is trained on in its life
    μ         cost of generating one rollout / cost of training on it once
    ρ         coupling of the samples, 0 (independent) to 1 (no gain from more of them)
    σ²(s)     variance of one sample's gradient at age s; σ̄²(x) its mean over ages 0..x

    J(x, y) = σ̄²(x) · (1 + y/μ) · (1/y + 1/x + ρ)     compute to reach a given accuracy

For given x the best y is √(μ / (ρ + 1/x)); x minimises σ̄²(x) · (√(1/μ) + √(ρ + 1/x))².
Everything here is pure Python; nothing is read or printed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from grpo_replay.errors import UsageError

FLAT_TOLERANCE = 0.05
"""Designs whose J is within this share of the best are called as good as the best."""

_LOG_X_LOWEST, _LOG_X_HIGHEST, _LOG_X_STEPS = -9.0, 12.0, 420
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


class Growth(Protocol):
    """How the variance of one sample's gradient grows with its age."""

    def mean_variance(self, x: float) -> float:
        """σ̄²(x), the mean of σ²(s) over ages 0 < s ≤ x; inf where it overflows."""
        ...

    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PowerGrowth:
    """σ(s) = (s/τ)^a. τ scales J and leaves the optimum where it is."""

    exponent: float
    tau: float = 1.0

    def mean_variance(self, x: float) -> float:
        return (x / self.tau) ** (2 * self.exponent) / (2 * self.exponent + 1)

    def describe(self) -> str:
        return f"σ(s) ∝ s^{self.exponent:.3g}"


@dataclass(frozen=True, slots=True)
class RatioGrowth:
    """σ²(s) = exp(k·s^b), relative to a fresh sample: the second moment of an importance weight
    whose logarithm is normal with variance k·s^b (b = 1: the policy diffuses, 2: it drifts)."""

    scale: float  # k, nats² at age 1
    exponent: float  # b

    def variance(self, age_steps: float) -> float:
        return _exp(self.scale * age_steps**self.exponent)

    def mean_variance(self, x: float) -> float:
        # Midpoint rule in u = s/x: the integrand is smooth and rises, 256 cells give 1e-5.
        cells = 256
        return sum(self.variance(x * (cell + 0.5) / cells) for cell in range(cells)) / cells

    def describe(self) -> str:
        return f"σ²(s) = exp({self.scale:.3g}·s^{self.exponent:.3g})"


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf


Kind = Literal["interior", "store_everything", "fresh_only"]


@dataclass(frozen=True, slots=True)
class Optimum:
    """Where J is least. `interior`: at finite x and y. `store_everything`: J falls for ever as x
    grows (x is inf). `fresh_only`: J falls all the way to x = 0 (x and y are 0), so no amount of
    storing pays."""

    x: float
    y: float
    kind: Kind


def check_inputs(mu: float, rho: float) -> None:
    """Raises UsageError for a μ that is not positive and finite, or a ρ outside [0, 1]."""
    if not (math.isfinite(mu) and mu > 0):
        raise UsageError(
            f"--mu {mu}: μ is the cost of generating one rollout over the cost of training on it "
            "once, a positive number (paper B measured 5.28 and 6.84)"
        )
    if not 0 <= rho <= 1:
        raise UsageError(
            f"--rho {rho}: ρ is the coupling between samples, from 0 (independent) to 1"
        )


def check_growth(exponent: float) -> None:
    """Raises UsageError for a growth exponent that is negative or not finite."""
    if not (math.isfinite(exponent) and exponent >= 0):
        raise UsageError(
            f"--growth {exponent}: a of σ(s) = (s/τ)^a is 0 or more; negative would mean that old "
            "rollouts are better than fresh ones"
        )


def objective(x: float, y: float, mu: float, rho: float, growth: Growth) -> float:
    """J(x, y), in arbitrary units: only ratios of it mean something."""
    return growth.mean_variance(x) * (1 + y / mu) * (1 / y + 1 / x + rho)


def best_replay_ratio(x: float, mu: float, rho: float) -> float:
    """y* = √(μ / (ρ + 1/x)) for a given horizon; inf if x is inf and ρ is 0."""
    coupling = rho + (0.0 if math.isinf(x) else 1 / x)
    return math.sqrt(mu / coupling) if coupling > 0 else math.inf


def best_objective(x: float, mu: float, rho: float, growth: Growth) -> float:
    """J(x, y*(x)) = σ̄²(x) · (√(1/μ) + √(ρ + 1/x))²."""
    return growth.mean_variance(x) * (math.sqrt(1 / mu) + math.sqrt(rho + 1 / x)) ** 2


def power_law_optimum(mu: float, rho: float, exponent: float) -> Optimum:
    """The closed form for σ(s) = (s/τ)^a (paper B).

    y* = (-a + √(a² + μρ(1-2a)))/ρ, written so that ρ = 0 needs no case of its own, and
    x* = y*²/(2a(μ + y*)). At a = 0 rollouts never age and x* is inf; from a = 1/2 on, 1/x falls
    more slowly than σ² grows and the infimum is at 0. Raises UsageError for values out of range.
    """
    check_inputs(mu, rho)
    check_growth(exponent)
    if exponent >= 0.5:
        return Optimum(0.0, 0.0, "fresh_only")
    if exponent == 0:
        return Optimum(math.inf, best_replay_ratio(math.inf, mu, rho), "store_everything")
    shrink = 1 - 2 * exponent
    y = mu * shrink / (exponent + math.sqrt(exponent**2 + mu * rho * shrink))
    return Optimum(y * y / (2 * exponent * (mu + y)), y, "interior")


def numeric_optimum(mu: float, rho: float, growth: Growth) -> Optimum:
    """The optimum for any growth: a grid over log x, refined by golden section.

    A minimum at an end of the grid (1e-9 to 1e12 steps) is reported as what it means.
    """
    check_inputs(mu, rho)
    width = (_LOG_X_HIGHEST - _LOG_X_LOWEST) / _LOG_X_STEPS
    grid = [_LOG_X_LOWEST + width * i for i in range(_LOG_X_STEPS + 1)]
    values = [best_objective(10**log_x, mu, rho, growth) for log_x in grid]
    best = min(range(len(grid)), key=values.__getitem__)
    if best == 0:
        return Optimum(0.0, 0.0, "fresh_only")
    if best == _LOG_X_STEPS:
        return Optimum(math.inf, best_replay_ratio(math.inf, mu, rho), "store_everything")
    log_x = _golden_section(
        lambda at: best_objective(10**at, mu, rho, growth), grid[best - 1], grid[best + 1]
    )
    x = 10**log_x
    return Optimum(x, best_replay_ratio(x, mu, rho), "interior")


def _golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum in [low, high] is least, to 1e-10."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-10:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2


def optimum(mu: float, rho: float, growth: Growth) -> Optimum:
    """The closed form where there is one, else the numerical optimum."""
    if isinstance(growth, PowerGrowth):
        return power_law_optimum(mu, rho, growth.exponent)
    return numeric_optimum(mu, rho, growth)


def recommended_design(mu: float, rho: float, growth: Growth) -> tuple[float, float]:
    """A finite (x, y) to run with: the optimum, held to what a buffer can do.

    x is at least 1 (a step's own rollouts are all there when it trains). Where J falls for ever,
    x is the smallest horizon whose J is within 5 % of the limit.
    """
    best = optimum(mu, rho, growth)
    x = max(best.x, 1.0)
    if math.isinf(x):
        x = max(_nearly_unbounded(mu, rho), 1.0)
    return x, best_replay_ratio(x, mu, rho)


def _nearly_unbounded(mu: float, rho: float) -> float:
    """x with (√(1/μ) + √(ρ + 1/x))² = (1 + 5 %) · its limit: for variance that does not grow."""
    limit = math.sqrt(1 + FLAT_TOLERANCE) * (math.sqrt(1 / mu) + math.sqrt(rho))
    return 1 / ((limit - math.sqrt(1 / mu)) ** 2 - rho)


def balanced_replay_ratio(mu: float, workers: int, trainers: int) -> float:
    """y = μ·T/W: uses of a rollout when W inference workers and T trainers never wait."""
    return mu * trainers / workers


def cost_ratio_from_counts(trained: float, generated: float, workers: int, trainers: int) -> float:
    """μ = (K_train/T)/(K_gen/W): rollouts that one trainer trained on over rollouts that one worker
    generated in the same time, both always busy."""
    return (trained / trainers) / (generated / workers)


def relative_compute(y: float, mu: float) -> float:
    """γ = (1 + W/T)/(1 + μ): compute of one step relative to no buffer at equal batch size.

    With inference workers and trainers in balance, W/T = μ/y; the deterministic form's
    (B + μR)/(B + μB) is the same number. Where groups are dropped, y and μ are those of survivors
    (B/B' and μR/B'), as everywhere in `planning.design`: without a buffer γ is then 1.
    """
    return (1 + mu / y) / (1 + mu)
