"""Converts (x, y) of the theory to buffer settings of a recipe, and back.

Groups whose rewards are all equal are dropped before they are stored. With a survival share s, a
step of R generated rollouts therefore adds B' = s·R, and generating one survivor costs μ/s. The
theory is applied to survivors: x = N/B', y = uses per survivor, and μ/s in place of μ.
"""

import math
from dataclasses import dataclass
from typing import Any

from grpo_replay.errors import UsageError
from grpo_replay.lab.planning.sensitivity import (
    FlatRange,
    SensitivityRow,
    flat_range_x,
    flat_range_y,
    sensitivity,
)
from grpo_replay.lab.planning.theory import (
    Growth,
    Optimum,
    PowerGrowth,
    best_objective,
    check_inputs,
    objective,
    optimum,
    recommended_design,
)
from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.relative_cost import relative_compute
from grpo_replay.storage.stored_sizes import stored_bytes


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Assumptions of the plan. `sources` says where each number comes from."""

    mu: float
    rho: float
    growth: Growth
    survival: float  # share of generated rollouts whose group is kept, in (0, 1]
    rollouts_per_step: int  # R, generated
    completion_tokens: float  # mean of one rollout
    prompt_tokens: float
    composition: str
    sources: dict[str, str]

    @property
    def effective_mu(self) -> float:
        """μ/s: the cost of generating one rollout that survives."""
        return self.mu / self.survival

    @property
    def survivors_per_step(self) -> float:
        return self.survival * self.rollouts_per_step


@dataclass(frozen=True, slots=True)
class Design:
    """A buffer with horizon x and replay ratio y: its settings and its cost."""

    x: float
    y: float
    max_age_steps: int | None
    ratio: float
    capacity_rollouts: int
    stored_rollouts: float  # expected at rest
    trained_rollouts_per_step: float
    uses_per_rollout: float  # expected over its life, the fresh use included
    gamma: float  # compute of a step relative to no buffer at equal batch size
    inference_per_trainer: float  # W/T in balance
    objective: float  # J relative to the best design
    memory_bytes: float
    generated_tokens_per_step: float
    trained_tokens_per_step: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Optimum, recommended design, design of the recipe, and sensitivity."""

    inputs: PlanInputs
    optimum: Optimum
    recommended: Design
    current: Design | None
    no_replay: Design
    flat_x: FlatRange
    flat_y: FlatRange
    sensitivity: tuple[SensitivityRow, ...]
    notes: tuple[str, ...]


def make_plan(inputs: PlanInputs, replay: ReplaySection | None) -> Plan:
    """The plan for these assumptions. `replay` has the settings of the recipe, if there is one.

    Raises UsageError for assumptions out of range.
    """
    _check(inputs)
    mu, rho, growth = inputs.effective_mu, inputs.rho, inputs.growth
    best = optimum(mu, rho, growth)
    x, y = recommended_design(mu, rho, growth)
    scale = best_objective(x, mu, rho, growth)
    current = None if replay is None else current_design(inputs, replay, scale)
    no_replay = _design(inputs, 1.0, 1.0, scale, None, 0.0, 0, stored=0.0)
    notes = explain(inputs, best, x, y)
    if current is not None and replay is not None and replay.replays:
        notes += explain_current(inputs, current, no_replay, replay.priority)
    return Plan(
        inputs=inputs,
        optimum=best,
        recommended=design_at(inputs, x, y, scale),
        current=current,
        no_replay=no_replay,
        flat_x=flat_range_x(x, mu, rho, growth),
        flat_y=flat_range_y(x, y, mu, rho, growth),
        sensitivity=sensitivity(x, y, mu, rho, growth),
        notes=tuple(notes),
    )


def _check(inputs: PlanInputs) -> None:
    check_inputs(inputs.mu, inputs.rho)
    if not 0 < inputs.survival <= 1:
        raise UsageError(
            f"--survival {inputs.survival}: the share of rollouts whose group is kept must be "
            "above 0 and at most 1 (paper A measured 0.34 to 0.49)"
        )


def design_at(inputs: PlanInputs, x: float, y: float, scale: float) -> Design:
    """The design with horizon x and replay ratio y. `scale` is J of the best design."""
    survivors = inputs.survivors_per_step
    preset = "fifo" if inputs.composition == "buffer_only" else "ours"
    settings = replay_settings(inputs, x, y)[preset]
    max_age = settings["max_age_steps"]
    stored = x * survivors if max_age is None else max_age * survivors
    return _design(
        inputs, x, y, scale, max_age, settings["ratio"], settings["capacity_rollouts"], stored
    )


def replay_settings(inputs: PlanInputs, x: float, y: float) -> dict[str, dict[str, Any]]:
    """Replay settings that give (x, y), for paper B's FIFO and for paper A's buffer.

    FIFO stores the rollouts of a step before it draws, so N = x·B' and B/R = y·s. The
    fresh-anchored buffer trains on fresh rollouts once (age 0) and stores them afterwards, so ages
    are 1 to x - 1 and r = y - 1. The capacity of FIFO is at least the rollouts of one step, which
    recipes require.
    """
    survivors = inputs.survivors_per_step
    max_age = max(1, round(x) - 1)
    return {
        "fifo": {
            "preset": "fifo",
            "capacity_rollouts": max(math.ceil(x * survivors), inputs.rollouts_per_step),
            "ratio": y * inputs.survival,
            "max_age_steps": None,
            # x and y are per survivor; the preset itself drops no groups.
            "drop_zero_variance": inputs.survival < 1,
        },
        "ours": {
            "preset": "ours",
            # Large enough that only the age limit evicts, even if no group is dropped.
            "capacity_rollouts": (max_age + 1) * inputs.rollouts_per_step,
            "ratio": max(0.0, y - 1),
            "max_age_steps": max_age,
        },
    }


def current_design(inputs: PlanInputs, replay: ReplaySection, scale: float) -> Design:
    """The design of the recipe, as (x, y)."""
    survivors = inputs.survivors_per_step
    capacity_steps = replay.capacity_rollouts / survivors
    age_limit = math.inf if replay.max_age_steps is None else float(replay.max_age_steps)
    if not replay.replays:
        x = y = 1.0
        stored = 0.0
    elif replay.composition == "buffer_only":
        x = max(1.0, min(capacity_steps, age_limit + 1))
        y = replay.ratio / inputs.survival
        stored = x * survivors
    else:
        steps = min(capacity_steps, age_limit)
        x, y, stored = steps + 1, 1 + replay.ratio, steps * survivors
    return _design(
        inputs, x, y, scale, replay.max_age_steps, replay.ratio, replay.capacity_rollouts, stored
    )


def _design(
    inputs: PlanInputs,
    x: float,
    y: float,
    scale: float,
    max_age: int | None,
    ratio: float,
    capacity: int,
    stored: float,
) -> Design:
    mu = inputs.effective_mu
    trained = y * inputs.survivors_per_step
    return Design(
        x=x,
        y=y,
        max_age_steps=max_age,
        ratio=ratio,
        capacity_rollouts=capacity,
        stored_rollouts=stored,
        trained_rollouts_per_step=trained,
        uses_per_rollout=y,
        gamma=relative_compute(y, mu),
        inference_per_trainer=mu / y,
        objective=objective(x, y, mu, inputs.rho, inputs.growth) / scale,
        memory_bytes=stored_bytes(stored, inputs.prompt_tokens, inputs.completion_tokens),
        generated_tokens_per_step=inputs.rollouts_per_step * inputs.completion_tokens,
        trained_tokens_per_step=trained * inputs.completion_tokens,
    )


def explain(inputs: PlanInputs, best: Optimum, x: float, y: float) -> list[str]:
    """Explanations of edge cases; empty for an ordinary optimum."""
    notes = []
    if best.kind == "fresh_only":
        notes.append(
            "The variance of old rollouts grows so fast (a ≥ 1/2) that a smaller buffer is always "
            "better: there is no best size. Keep only the rollouts of the current step (x = 1) "
            f"and use each {y:.2g} times."
        )
    elif best.kind == "store_everything":
        notes.append(
            "With a = 0 rollouts never lose value, so a larger buffer is always better: memory "
            f"decides. From x = {x:.3g} on, a larger buffer gains less than 5 %."
        )
    elif best.x < 1:
        notes.append(
            f"The optimum, x = {best.x:.2g}, is less than one step of rollouts, so replaying "
            "across steps does not pay here. x = 1 is used."
        )
    if inputs.rho == 0:
        notes.append(
            "ρ = 0 assumes that samples stay independent when they are reused: the most "
            "optimistic case for replay. Try ρ = 0.1 as well."
        )
    if inputs.effective_mu < 1:
        notes.append(
            "μ < 1: generating a rollout costs less than training on it, so reuse saves little. "
            "Replay can still help by selecting rollouts, which this theory does not model."
        )
    if y < 1:
        notes.append(
            f"y* = {y:.2g} < 1: train on fewer rollouts than are generated; some are never used."
        )
    return notes


def explain_current(
    inputs: PlanInputs, current: Design, no_replay: Design, priority: str
) -> list[str]:
    """Why the theory finds the recipe's own design worse than no replay; empty if it does not.

    J is the product of the noise of a sample, σ̄²(x), and of what reuse saves.
    """
    ratio = current.objective / no_replay.objective
    if ratio <= 1:
        return []
    growth = inputs.growth
    if math.isinf(ratio):
        return [
            f"This recipe keeps rollouts for {current.x:.3g} steps; by this theory the last of "
            f"them are all noise ({growth.describe()}), and J has no finite value."
        ]
    noise = growth.mean_variance(current.x) / growth.mean_variance(1.0)
    text = (
        f"This recipe costs {ratio - 1:.0%} more than no replay by this theory: keeping rollouts "
        f"for {current.x:.3g} steps makes a sample's gradient {noise:.2f} times as noisy, if "
        f"{growth.describe()} ({inputs.sources.get('growth', 'given')}), and reuse saves a factor "
        f"of {noise / ratio:.2f}."
    )
    if isinstance(growth, PowerGrowth) and current.x > 1:
        limit = math.log(noise / ratio) / (2 * math.log(current.x))
        text += f" It pays if a is below {limit:.2g}: measure a run's growth with --from-run."
    if priority != "uniform":
        text += f" What {priority} gains by selecting rollouts is not in the theory."
    return [text]
