"""Is replay cheaper than none, by the theory? And is that certain enough to say?"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from grpo_replay.lab.planning.sensitivity import changed_assumptions
from grpo_replay.lab.planning.theory import Growth, PowerGrowth, no_replay_objective

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
