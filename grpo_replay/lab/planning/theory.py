"""Paper B's design theory as a calculator: how long to keep rollouts and how often to reuse them.

Symbols (Arnal et al., arXiv 2604.08706; docs/report.md explains them in words): x = N/R is the
staleness horizon in draws (steps, or the updates of a FIFO buffer), y = B/R the replay ratio, μ the
cost of generating one rollout over that of training on it once, ρ the coupling of the samples (0:
independent; 1: no gain from more of them), σ²(s) the variance of one sample's gradient at age s,
and σ̄²(x) its mean over ages 0..x.

    J(x, y) = σ̄²(x) · (1 + y/μ) · (1/y + 1/x + ρ)

J is the compute that bounds the mean squared gradient by a given value. It does not predict
accuracy. Its last factor, the bracket, is R times the variance of a batch's mean, for one sample's
variance of 1. It is 1 without replay; it differs for batches drawn with replacement, without it, or
beside all fresh rollouts (below). For given x the best y is √(μ / (ρ + 1/x)); x minimises
σ̄²(x) · (√(1/μ) + √(ρ + 1/x))².

Groups whose rewards are all equal are dropped before they are stored. With a survival share s, a
step of R generated rollouts therefore adds B' = s·R, and generating one survivor costs μ/s. Designs
apply the theory to survivors: x = N/B', y = uses per survivor, and μ/s in place of μ.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from grpo_replay.lab.planning.expected import drawn_rollouts, stored_when_drawn
from grpo_replay.recipe import ReplaySection

FLAT_TOLERANCE = 0.05
"""Relative difference in J below which two designs count as equally good."""

_LOG_X_RANGE = (-9.0, 12.0)  # log10 of x in training steps
_GRID_POINTS = 421
_REFINEMENTS = 4  # each divides the spacing of the grid by 210; J resolves no finer in float64
_CELLS = 256


@dataclass(frozen=True, slots=True)
class PowerGrowth:
    """σ(s) = s^a. A unit of age other than the step would scale J and not move the optimum."""

    exponent: float

    def mean_variance(self, x: float) -> float:
        """Returns σ̄²(x), the mean of σ²(s) over ages 0 < s ≤ x; inf on overflow."""
        with np.errstate(over="ignore"):
            return float(np.power(x, 2 * self.exponent) / (2 * self.exponent + 1))

    def slower_and_faster(self) -> "tuple[PowerGrowth, PowerGrowth]":
        """Returns two other growths, to see how much the cost depends on this one."""
        return PowerGrowth(self.exponent / 2), PowerGrowth(self.exponent * 1.5)

    def describe(self) -> str:
        """Returns the formula, with its number."""
        return f"σ(s) ∝ s^{self.exponent:.3g}"


@dataclass(frozen=True, slots=True)
class RatioGrowth:
    """σ²(s) = exp(k·s^b), relative to a fresh sample: the second moment of an importance weight
    whose logarithm is normal with variance k·s^b. b = 1 means that the policy diffuses, b = 2 that
    it drifts."""

    scale: float  # k, nats² at age 1
    exponent: float  # b

    def mean_variance(self, x: float) -> float:
        """Returns σ̄²(x), the mean of σ²(s) over ages 0 < s ≤ x; inf on overflow."""
        # Midpoint rule in u = s/x: the integrand is smooth and increasing, 256 cells give 1e-5.
        ages = x * ((np.arange(_CELLS) + 0.5) / _CELLS)
        with np.errstate(over="ignore"):
            return float(np.exp(self.scale * ages**self.exponent).mean())

    def slower_and_faster(self) -> "tuple[RatioGrowth, RatioGrowth]":
        half, double = self.scale / 2, self.scale * 2
        return RatioGrowth(half, self.exponent), RatioGrowth(double, self.exponent)

    def describe(self) -> str:
        """Returns the formula, with its numbers."""
        return f"σ²(s) = exp({self.scale:.3g}·s^{self.exponent:.3g})"


NO_GROWTH = PowerGrowth(0.0)

Growth = PowerGrowth | RatioGrowth
"""The growth of the variance of one sample's gradient with its age."""


def objective(x: float, y: float, mu: float, rho: float, growth: Growth) -> float:
    """Returns J(x, y) of batches drawn uniformly with replacement, in arbitrary units: only ratios
    of J are meaningful."""
    return growth.mean_variance(x) * (1 + y / mu) * (1 / y + 1 / x + rho)


def no_replay_objective(mu: float, growth: Growth) -> float:
    """Returns J without a buffer: R rollouts of age 0, each used once.

    Their mean has variance σ²/R, so the bracket is 1. J(1, 1) is not this: it draws R times with
    replacement from R rollouts, with bracket 2 + ρ. A rollout that is s steps old has an age in
    (s, s + 1], so that ages 0 to x - 1 have the mean σ̄²(x); the variance at age 0 is σ̄²(1).
    """
    return growth.mean_variance(1.0) * (1 + 1 / mu)


def without_replacement_objective(
    x: float, y: float, mu: float, rho: float, growth: Growth
) -> float:
    """Returns J of batches drawn without replacement: B different rollouts of N. y is limited to x,
    because B is at most N.

    The finite-population correction multiplies the variance of the draw, 1/B, by (N - B)/N:
    R·(1/N + (1/B)(1 - B/N)) = 1/x + 1/y - 1/x = 1/y. Two rollouts are of different steps with
    probability 1 - 1/x, and only those are coupled: given the policy, rollouts of one step are
    independent. At x = y = 1 this is no replay.
    """
    y = min(y, x)
    return growth.mean_variance(x) * (1 + y / mu) * (1 / y + rho * (1 - 1 / x))


def fresh_anchored_objective(
    ratio: float,
    ages: float,
    mu: float,
    rho: float,
    growth: Growth,
    with_replacement: bool = False,
) -> float:
    """Returns J of batches that have all R fresh rollouts and `ratio`·R draws of ages 1 to `ages`.

    A batch has y = 1 + ratio, and the share w_0 = 1/y of it has age 0. With m = ratio·R different
    draws, R times the variance of the mean is (σ²(0) + ratio·σ²(stored))/y², plus ρ for the share
    1 - Σ w_s² of pairs that are of different steps. Drawn with replacement from N = ages·R, the
    m(m - 1)/N pairs that are one rollout twice add ratio²/ages·σ²(stored). At ratio 0 this is no
    replay.
    """
    ratio = ratio if with_replacement else min(ratio, ages)
    y, fresh = 1 + ratio, growth.mean_variance(1.0)
    stored = ((ages + 1) * growth.mean_variance(ages + 1) - fresh) / ages
    repeated = ratio / ages if with_replacement else 0.0
    batch = (fresh + ratio * (1 + repeated) * stored) / y**2
    same_step = (1 + ratio**2 / ages) / y**2
    coupled = rho * (1 - same_step) * (fresh + ratio * stored) / y
    return (1 + y / mu) * (batch + coupled)


def best_replay_ratio(x: float, mu: float, rho: float) -> float:
    """Returns y* = √(μ / (ρ + 1/x)) for a given horizon; inf if x is inf and ρ is 0."""
    coupling = rho + 1 / x
    return math.sqrt(mu / coupling) if coupling > 0 else math.inf


def best_objective(x: float, mu: float, rho: float, growth: Growth) -> float:
    """Returns J(x, y*(x)) = σ̄²(x) · (√(1/μ) + √(ρ + 1/x))²."""
    return growth.mean_variance(x) * (math.sqrt(1 / mu) + math.sqrt(rho + 1 / x)) ** 2


def power_law_optimum(mu: float, rho: float, exponent: float) -> tuple[float, float]:
    """Returns (x*, y*) for σ(s) = (s/τ)^a (paper B): y* = (-a + √(a² + μρ(1-2a)))/ρ, rewritten so
    that it also holds for ρ = 0, and x* = y*²/(2a(μ + y*)).

    For a = 0 rollouts never age and x* is inf. For a ≥ 1/2, σ² grows faster than 1/x decreases: the
    infimum is at 0.
    """
    if exponent >= 0.5:
        return 0.0, 0.0
    if exponent == 0:
        return math.inf, best_replay_ratio(math.inf, mu, rho)
    shrink = 1 - 2 * exponent
    y = mu * shrink / (exponent + math.sqrt(exponent**2 + mu * rho * shrink))
    return y * y / (2 * exponent * (mu + y)), y


def numeric_optimum(mu: float, rho: float, growth: Growth) -> tuple[float, float]:
    """Finds the horizon x* and replay ratio y* that minimise J for any growth, by refinement of
    a grid over log x. A minimum at an end of the grid (1e-9 or 1e12 steps) means x* = 0 (no replay)
    or inf (never discard)."""
    low, high = _LOG_X_RANGE
    for _ in range(_REFINEMENTS):
        grid = np.linspace(low, high, _GRID_POINTS)
        best = int(np.argmin([best_objective(10.0**log_x, mu, rho, growth) for log_x in grid]))
        if best == 0:
            return 0.0, 0.0
        if best == _GRID_POINTS - 1:
            return math.inf, best_replay_ratio(math.inf, mu, rho)
        low, high = grid[best - 1], grid[best + 1]
    x = float(10.0 ** grid[best])
    return x, best_replay_ratio(x, mu, rho)


def optimum(mu: float, rho: float, growth: Growth) -> tuple[float, float]:
    """Returns (x*, y*) in closed form where there is one, else numerically."""
    if isinstance(growth, PowerGrowth):
        return power_law_optimum(mu, rho, growth.exponent)
    return numeric_optimum(mu, rho, growth)


def recommended_design(
    mu: float, rho: float, growth: Growth, min_x: float = 1.0
) -> tuple[float, float]:
    """Returns a finite (x, y) to run with: the optimum, limited to what a buffer can do.

    x is at least `min_x`, so that the buffer has room for all rollouts of a step. If the optimum is
    infinite, J decreases for all x: then x is the smallest horizon whose J, (√(1/μ) + √(ρ + 1/x))²
    for variance that does not grow, is within 5 % of the limit.
    """
    x, _ = optimum(mu, rho, growth)
    if math.isinf(x):
        limit = math.sqrt(1 + FLAT_TOLERANCE) * (math.sqrt(1 / mu) + math.sqrt(rho))
        x = 1 / ((limit - math.sqrt(1 / mu)) ** 2 - rho)
    x = max(x, min_x)
    return x, best_replay_ratio(x, mu, rho)


Cost = Callable[[float, float, Growth], float]
"""J of a design as a function of μ (per survivor), ρ and growth."""


@dataclass(frozen=True, slots=True)
class CostVerdict:
    """Compute of a design relative to no replay, and whether that is certain to be less or more.

    `low` and `high` are the extremes over the assumptions and every single change of one: μ halved
    and doubled, ρ = 0 and 3ρ + 0.1, the growth slower and faster, and others that its measurement
    leaves open. If the growth is only assumed, another change is that rollouts do not age, which
    favours replay most: a design can be `dearer` in spite of it, but not `cheaper`. The answer is
    `undecided` if the extremes lie on both sides of 1.
    """

    ratio: float
    low: float
    high: float
    answer: Literal["cheaper", "dearer", "undecided"]


def judge(
    cost: Cost,
    mu: float,
    rho: float,
    growth: Growth,
    other_growths: Sequence[Growth] = (),
    cost_without_aging: Cost | None = None,
) -> CostVerdict:
    """Judges a design by its cost under these assumptions and single changes of them. A measurement
    admits `other_growths`. If the growth is only assumed, `cost_without_aging` is the cost of the
    design that one would choose if rollouts did not age; None if the growth is known."""
    tried = [(mu, rho, growth), (mu / 2, rho, growth), (mu * 2, rho, growth)]
    tried += [(mu, other_rho, growth) for other_rho in (0.0, min(1.0, 3 * rho + 0.1))]
    tried += [(mu, rho, other) for other in (*growth.slower_and_faster(), *other_growths)]
    ratios = [relative_cost(cost, *assumptions) for assumptions in tried]
    if cost_without_aging is not None:
        ratios.append(relative_cost(cost_without_aging, mu, rho, NO_GROWTH))
    low, high = min(ratios), max(ratios)
    if low > 1:
        return CostVerdict(ratios[0], low, high, "dearer")
    is_cheaper = cost_without_aging is None and high < 1
    return CostVerdict(ratios[0], low, high, "cheaper" if is_cheaper else "undecided")


def relative_cost(cost: Cost, mu: float, rho: float, growth: Growth) -> float:
    """Returns J of a design over J without replay."""
    return cost(mu, rho, growth) / no_replay_objective(mu, growth)


def break_even_mu(cost: Cost, y: float, rho: float, growth: Growth) -> float:
    """Returns the μ (per survivor) above which a design that uses a rollout y > 1 times costs less
    than no replay: 0 if it always does, inf if it never does.

    The relative cost is K·(μ + y)/(μ + 1). K does not depend on μ: it is the noise of the design's
    batches relative to fresh ones.
    """
    noise = relative_cost(cost, 1.0, rho, growth) * 2 / (1 + y)
    if noise * y <= 1:
        return 0.0
    return math.inf if noise >= 1 else (noise * y - 1) / (1 - noise)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Assumptions of a plan. `sources` says for every field where the number comes from."""

    mu: float
    rho: float
    growth: Growth
    survival: float  # share of generated rollouts whose group is kept, in (0, 1]
    rollouts_per_step: int  # R, generated
    sources: dict[str, str]
    growth_others: tuple[Growth, ...] = ()  # further ones that a measurement admits
    growth_known: bool = True  # given, or measured at enough ages; not assumed
    updates_per_step: int = 1  # k of a FIFO buffer: x = N/R counts updates, with R/k new rollouts

    @property
    def effective_mu(self) -> float:
        """μ/s: the cost of generating one rollout that survives."""
        return self.mu / self.survival

    @property
    def survivors_per_step(self) -> float:
        """B' = s·R."""
        return self.survival * self.rollouts_per_step


@dataclass(frozen=True, slots=True)
class Design:
    """A buffer with horizon x and replay ratio y, and its cost. `pays_above` is the μ above which
    it costs less than no replay; None if it uses no rollout twice."""

    x: float
    y: float  # uses of a rollout over its life, the fresh use included
    stored_rollouts: float  # expected once the buffer has filled
    trained_rollouts_per_step: float
    verdict: CostVerdict  # on J relative to no replay
    pays_above: float | None


def best_fifo(inputs: PlanInputs) -> Design:
    """Returns the best FIFO buffer, drawn with replacement, even if no replay is cheaper."""
    mu, rho = inputs.effective_mu, inputs.rho
    min_x = inputs.updates_per_step / inputs.survival  # capacity_rollouts is at least R
    x, y = recommended_design(mu, rho, inputs.growth, min_x)
    stored = x * inputs.survivors_per_step / inputs.updates_per_step  # N
    without_aging = partial(objective, *recommended_design(mu, rho, NO_GROWTH, min_x))
    return _design(inputs, x, y, stored, partial(objective, x, y), without_aging)


def recipe_design(inputs: PlanInputs, replay: ReplaySection) -> Design:
    """Returns the buffer of a recipe that replays, with the batches of that recipe; draws by
    priority are treated as uniform."""
    survivors, draws = inputs.survivors_per_step, inputs.updates_per_step
    steps = stored_when_drawn(replay, survivors) / survivors
    uses = drawn_rollouts(replay, inputs.rollouts_per_step, survivors, draws) / survivors
    x, y = (steps * draws, uses) if replay.stores_first else (steps + 1, 1 + uses)
    cost: Cost
    if replay.anchors_fresh:
        ratio, drawn_again = replay.ratio, replay.with_replacement
        cost = partial(fresh_anchored_objective, ratio, steps, with_replacement=drawn_again)
    else:
        j = objective if replay.with_replacement else without_replacement_objective
        cost = partial(j, x, y)
    return _design(inputs, x, y, steps * survivors, cost, cost_without_aging=cost)


def _design(
    inputs: PlanInputs, x: float, y: float, stored: float, cost: Cost, cost_without_aging: Cost
) -> Design:
    """Returns the design with horizon `x`, `y` uses of a rollout and `stored` rollouts, judged by
    its `cost`. `cost_without_aging` is used if the growth is only assumed (`judge`)."""
    mu, rho, growth = inputs.effective_mu, inputs.rho, inputs.growth
    without_aging = None if inputs.growth_known else cost_without_aging
    # `survival` converts a μ per survivor into one per generated rollout.
    pays_above = break_even_mu(cost, y, rho, growth) * inputs.survival if y > 1 else None
    return Design(
        x=x,
        y=y,
        stored_rollouts=stored,
        trained_rollouts_per_step=y * inputs.survivors_per_step,
        verdict=judge(cost, mu, rho, growth, inputs.growth_others, without_aging),
        pays_above=pays_above,
    )


def fifo_settings(inputs: PlanInputs, design: Design) -> dict[str, Any]:
    """Returns the `replay` settings of a FIFO buffer, which stores the rollouts of a step before it
    draws: N = x·B'/k and B/R = y·s."""
    return {
        "preset": "fifo",
        "capacity_rollouts": math.ceil(design.stored_rollouts - 1e-6),
        "ratio": design.y * inputs.survival,
        "max_age_steps": None,
        "drop_zero_variance": inputs.survival < 1,
    }
