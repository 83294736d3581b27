"""Designs of a buffer, (x, y) of the theory, and what they cost.

Groups whose rewards are all equal are dropped before they are stored. With a survival share s, a
step of R generated rollouts therefore adds B' = s·R, and generating one survivor costs μ/s. The
theory is applied to survivors: x = N/B', y = uses per survivor, and μ/s in place of μ.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_replay.lab.dry_run.estimates import drawn_rollouts, stored_when_drawn
from grpo_replay.lab.planning.theory import (
    Cost,
    Growth,
    Verdict,
    break_even_mu,
    fresh_anchored_objective,
    judge,
    no_replay_objective,
    objective,
    recommended_design,
    without_replacement_objective,
)
from grpo_replay.recipe import ReplaySection


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Assumptions of the plan. `sources` says where each number comes from."""

    mu: float
    rho: float
    growth: Growth
    survival: float  # share of generated rollouts whose group is kept, in (0, 1]
    rollouts_per_step: int  # R, generated
    sources: dict[str, str]
    growth_others: tuple[Growth, ...] = ()  # that a measurement leaves open
    growth_known: bool = True  # given, or measured at enough ages; not assumed
    updates_per_step: int = 1  # k of a FIFO buffer: x = N/R counts updates, each with R/k new ones

    @property
    def effective_mu(self) -> float:
        """μ/s: the cost of generating one rollout that survives."""
        return self.mu / self.survival

    @property
    def survivors_per_step(self) -> float:
        return self.survival * self.rollouts_per_step


@dataclass(frozen=True, slots=True)
class Design:
    """A buffer with horizon x and replay ratio y, and its cost. `pays_above` is the μ from which on
    it costs less than no replay; None for no replay."""

    x: float
    y: float  # uses of a rollout over its life, the fresh use included
    stored_rollouts: float  # expected at rest
    trained_rollouts_per_step: float
    verdict: Verdict  # on J relative to no replay
    pays_above: float | None


def best_fifo(inputs: PlanInputs) -> Design:
    """The best FIFO buffer, drawn with replacement, even if no replay is cheaper."""
    x, y = recommended_design(inputs.effective_mu, inputs.rho, inputs.growth)
    return _design(inputs, x, y, partial(objective, x, y), _stored_at(inputs, x))


def no_replay(inputs: PlanInputs) -> Design:
    return _design(inputs, 1.0, 1.0, lambda mu, _, growth: no_replay_objective(mu, growth), 0.0)


def design_of(inputs: PlanInputs, replay: ReplaySection) -> Design:
    """The design of a recipe that replays: its own batches, with draws by priority treated as
    uniform."""
    survivors, draws = inputs.survivors_per_step, inputs.updates_per_step
    steps = stored_when_drawn(replay, survivors) / survivors
    uses = drawn_rollouts(replay, inputs.rollouts_per_step, survivors, draws) / survivors
    x, y = (steps * draws, uses) if replay.stores_first else (steps + 1, 1 + uses)
    cost: Cost
    if replay.anchors_fresh:
        ratio, drawn_again = replay.ratio, replay.with_replacement
        cost = partial(fresh_anchored_objective, ratio, steps, with_replacement=drawn_again)
    else:
        of_draw = objective if replay.with_replacement else without_replacement_objective
        cost = partial(of_draw, x, y)
    return _design(inputs, x, y, cost, steps * survivors)


def _design(inputs: PlanInputs, x: float, y: float, cost: Cost, stored: float) -> Design:
    mu, rho, growth = inputs.effective_mu, inputs.rho, inputs.growth
    even = break_even_mu(cost, y, rho, growth) * inputs.survival if stored and y > 1 else None
    return Design(
        x=x,
        y=y,
        stored_rollouts=stored,
        trained_rollouts_per_step=y * inputs.survivors_per_step,
        verdict=judge(cost, mu, rho, growth, inputs.growth_others, inputs.growth_known),
        pays_above=even,
    )


def _stored_at(inputs: PlanInputs, x: float) -> float:
    """N of a FIFO buffer with a horizon of x updates."""
    return x * inputs.survivors_per_step / inputs.updates_per_step


def replay_settings(inputs: PlanInputs, x: float, y: float) -> dict[str, Any]:
    """Replay settings of the FIFO buffer with (x, y), which stores the rollouts of a step before it
    draws: N = x·B'/k and B/R = y·s. The capacity is at least the rollouts of one step."""
    return {
        "preset": "fifo",
        "capacity_rollouts": max(math.ceil(_stored_at(inputs, x)), inputs.rollouts_per_step),
        "ratio": y * inputs.survival,
        "max_age_steps": None,
        "drop_zero_variance": inputs.survival < 1,
    }
