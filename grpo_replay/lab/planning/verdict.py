"""Is replay cheaper than none, by the theory, and is that certain enough to say? How far may a
design be from the optimum, and what does a wrong assumption cost?
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from grpo_replay.lab.planning.theory import (
    FLAT_TOLERANCE,
    Growth,
    PowerGrowth,
    RatioGrowth,
    best_objective,
    no_replay_objective,
    objective,
    recommended_design,
)

Cost = Callable[[float, float, Growth], float]
"""J of a design for a given μ (per survivor), ρ and growth."""

STEEPEST = 2.0
"""The largest exponent a that `break_even_growth` tries."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Compute of a design relative to no replay, and what can be said of it.

    `low` and `high` are the extremes over the assumptions and every single change of one
    (`changed_assumptions`). The answer is `undecided` if 1 is between them.
    """

    ratio: float
    low: float
    high: float
    answer: Literal["cheaper", "dearer", "undecided"]

    def describe(self) -> str:
        """The verdict as the end of a sentence about a design."""
        if math.isinf(self.ratio):
            return "has no finite cost: its oldest rollouts are all noise"
        words = {
            "cheaper": "replay is cheaper than none",
            "dearer": "replay is dearer than none",
            "undecided": "the theory cannot decide, one changed assumption turns it round",
        }
        return (
            f"costs {self.ratio:.2f} times the compute of no replay ({self.low:.2f} to "
            f"{self.high:.2f}): {words[self.answer]}"
        )


def judge(cost: Cost, mu: float, rho: float, growth: Growth) -> Verdict:
    """The verdict on a design, of cost `cost`, under these assumptions."""
    tried = [("as assumed", mu, rho, growth), *changed_assumptions(mu, rho, growth)]
    ratios = [relative_cost(cost, *each[1:]) for each in tried]
    low, high = min(ratios), max(ratios)
    if low > 1:
        return Verdict(ratios[0], low, high, "dearer")
    return Verdict(ratios[0], low, high, "cheaper" if high < 1 else "undecided")


def relative_cost(cost: Cost, mu: float, rho: float, growth: Growth) -> float:
    """J of a design over J without replay."""
    return cost(mu, rho, growth) / no_replay_objective(mu, growth)


def break_even_growth(cost: Cost, mu: float, rho: float) -> float | None:
    """The exponent a of σ(s) ∝ s^a below which the design is cheaper than no replay.

    None if it is dearer even for rollouts that never lose value (a = 0).
    """
    low, high = 0.0, STEEPEST
    if relative_cost(cost, mu, rho, PowerGrowth(low)) > 1:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        dearer = relative_cost(cost, mu, rho, PowerGrowth(middle)) > 1
        low, high = (low, middle) if dearer else (middle, high)
    return low


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Interval within which J stays within 5 % of its value at the design."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SensitivityRow:
    """The optimum under one changed assumption, and the cost of keeping the design instead."""

    change: str
    x: float
    y: float
    extra_compute: float  # J(kept design)/J(new optimum) - 1, a fraction


def flat_range_x(x: float, mu: float, rho: float, growth: Growth) -> FlatRange:
    """Horizons about as good as x, each with its own best y; high is inf if J stays flat."""
    limit = (1 + FLAT_TOLERANCE) * best_objective(x, mu, rho, growth)
    return _flat_range(lambda at: best_objective(at, mu, rho, growth), x, limit)


def flat_range_y(x: float, y: float, mu: float, rho: float, growth: Growth) -> FlatRange:
    """Replay ratios about as good as y at this horizon."""
    limit = (1 + FLAT_TOLERANCE) * objective(x, y, mu, rho, growth)
    return _flat_range(lambda at: objective(x, at, mu, rho, growth), y, limit)


def _flat_range(function: Callable[[float], float], start: float, limit: float) -> FlatRange:
    return FlatRange(
        _boundary(function, start, limit, factor=1 / 1.25), _boundary(function, start, limit, 1.25)
    )


def _boundary(
    function: Callable[[float], float], start: float, limit: float, factor: float
) -> float:
    """Where the function first exceeds the limit, going from `start` by powers of `factor`; 0 or
    inf if it never does. Found by bisection."""
    inside = start
    for _ in range(120):
        outside = inside * factor
        if function(outside) > limit:
            break
        inside = outside
    else:
        return 0.0 if factor < 1 else math.inf
    for _ in range(60):
        middle = math.sqrt(inside * outside)
        inside, outside = (inside, middle) if function(middle) > limit else (middle, outside)
    return inside


def changed_assumptions(
    mu: float, rho: float, growth: Growth
) -> list[tuple[str, float, float, Growth]]:
    """(name, μ, ρ, growth) of every single change of an assumption that the plan tries."""
    rhos = [other for other in (0.0, min(1.0, 3 * rho + 0.1)) if other != rho]
    return [
        ("μ halved", mu / 2, rho, growth),
        ("μ doubled", mu * 2, rho, growth),
        *((f"ρ = {other:.2g}", mu, other, growth) for other in rhos),
        *((name, mu, rho, other) for name, other in _other_growths(growth)),
    ]


def sensitivity(
    x: float, y: float, mu: float, rho: float, growth: Growth
) -> tuple[SensitivityRow, ...]:
    """Extra cost of the design (x, y) if μ, ρ or the growth differ from the assumption."""
    rows = []
    for change, its_mu, its_rho, its_growth in changed_assumptions(mu, rho, growth):
        best_x, best_y = recommended_design(its_mu, its_rho, its_growth)
        kept = objective(x, y, its_mu, its_rho, its_growth)
        extra = kept / objective(best_x, best_y, its_mu, its_rho, its_growth) - 1
        rows.append(SensitivityRow(change, best_x, best_y, extra))
    return tuple(rows)


def _other_growths(growth: Growth) -> list[tuple[str, Growth]]:
    if isinstance(growth, PowerGrowth):
        lower, higher = growth.exponent / 2, growth.exponent * 1.5
        return [
            (f"a = {exponent:.3g}", PowerGrowth(exponent, growth.tau))
            for exponent in (lower, higher)
            if exponent != growth.exponent
        ]
    if isinstance(growth, RatioGrowth):
        return [
            (f"variance growth {word}", RatioGrowth(growth.scale * factor, growth.exponent))
            for word, factor in (("halved", 0.5), ("doubled", 2.0))
        ]
    return []
