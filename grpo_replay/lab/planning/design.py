"""Converts (x, y) of the theory to buffer settings of a recipe, and back.

Groups whose rewards are all equal are dropped before they are stored. With a survival share s, a
step of R generated rollouts therefore adds B' = s·R, and generating one survivor costs μ/s. The
theory is applied to survivors: x = N/B', y = uses per survivor, and μ/s in place of μ.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_replay.errors import UsageError
from grpo_replay.lab.dry_run.estimates import drawn_rollouts, stored_when_drawn
from grpo_replay.lab.planning.theory import (
    Cost,
    Growth,
    Optimum,
    Verdict,
    break_even_growth,
    check_inputs,
    fresh_anchored_objective,
    judge,
    no_replay_objective,
    objective,
    optimum,
    recommended_design,
    relative_cost,
    without_replacement_objective,
)
from grpo_replay.recipe import BatchSection, ReplaySection
from grpo_replay.replay.compose import relative_compute
from grpo_replay.storage.checkpoint import stored_bytes


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
    sources: dict[str, str]
    growth_others: tuple[Growth, ...] = ()  # that a measurement leaves open
    growth_known: bool = True  # given, or measured at enough ages; not assumed
    oldest_measured: int | None = None  # age at which the run had draws to measure the growth on
    updates_per_step: int = 1  # k of a FIFO buffer: x = N/R counts updates, each with R/k new ones

    @property
    def effective_mu(self) -> float:
        """μ/s: the cost of generating one rollout that survives."""
        return self.mu / self.survival

    @property
    def survivors_per_step(self) -> float:
        return self.survival * self.rollouts_per_step

    @property
    def unit(self) -> str:
        """What x and ages count."""
        return "steps" if self.updates_per_step == 1 else "updates"


@dataclass(frozen=True, slots=True)
class Design:
    """A buffer with horizon x and replay ratio y, and its cost."""

    x: float
    y: float  # uses of a rollout over its life, the fresh use included
    stored_rollouts: float  # expected at rest
    trained_rollouts_per_step: float
    gamma: float  # compute of a step relative to no buffer at equal batch size
    inference_per_trainer: float  # W/T in balance
    age_zero_share: float  # of the rollouts of a batch
    objective: float  # J relative to no replay
    memory_bytes: float
    generated_tokens_per_step: float
    trained_tokens_per_step: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The best FIFO buffer, the design of the recipe, and their verdicts.

    `recommended` is the best FIFO buffer, drawn with replacement, even if no replay is cheaper.
    `current_verdict` is None without a recipe, or if it does not replay.
    """

    inputs: PlanInputs
    optimum: Optimum
    recommended: Design
    verdict: Verdict
    current: Design | None
    current_verdict: Verdict | None
    no_replay: Design
    notes: tuple[str, ...]


def make_plan(
    inputs: PlanInputs, replay: ReplaySection | None, batch: BatchSection | None = None
) -> Plan:
    """The plan for these assumptions. `replay` and `batch` are the recipe's, if there is one.

    Raises UsageError for assumptions out of range.
    """
    _check(inputs)
    mu, rho, growth = inputs.effective_mu, inputs.rho, inputs.growth
    known = inputs.growth_others, inputs.growth_known
    best = optimum(mu, rho, growth)
    x, y = recommended_design(mu, rho, growth)
    notes = explain(inputs, best, x, y)
    if batch is not None and not (replay and replay.replays and replay.stores_first):
        notes += explain_unit(inputs, batch, x, y)
    current = current_verdict = None
    if replay is not None:
        current = current_design(inputs, replay)
        if replay.replays:
            cost = current_cost(inputs, replay)
            current_verdict = judge(cost, mu, rho, growth, *known)
            notes += explain_current(inputs, current, cost, replay)
    return Plan(
        inputs=inputs,
        optimum=best,
        recommended=design_at(inputs, x, y),
        verdict=judge(partial(objective, x, y), mu, rho, growth, *known),
        current=current,
        current_verdict=current_verdict,
        no_replay=_no_replay(inputs),
        notes=tuple(notes),
    )


def _check(inputs: PlanInputs) -> None:
    check_inputs(inputs.mu, inputs.rho)
    if not 0 < inputs.survival <= 1:
        raise UsageError(
            f"--survival {inputs.survival}: the share of rollouts whose group is kept must be "
            "above 0 and at most 1 (paper A measured 0.34 to 0.49)"
        )


def design_at(inputs: PlanInputs, x: float, y: float) -> Design:
    """The FIFO buffer with horizon x and replay ratio y, drawn with replacement."""
    return _design(inputs, x, y, partial(objective, x, y), 1 / x, _stored_at(inputs, x))


def _stored_at(inputs: PlanInputs, x: float) -> float:
    """N of a horizon of x updates."""
    return x * inputs.survivors_per_step / inputs.updates_per_step


def replay_settings(inputs: PlanInputs, x: float, y: float) -> dict[str, Any]:
    """Replay settings of the FIFO buffer with (x, y).

    FIFO stores the rollouts of a step before it draws, so N = x·B'/k and B/R = y·s. The capacity is
    at least the rollouts of one step, which recipes require.
    """
    capacity = math.ceil(_stored_at(inputs, x))
    return {
        "preset": "fifo",
        "capacity_rollouts": max(capacity, inputs.rollouts_per_step),
        "ratio": y * inputs.survival,
        "max_age_steps": None,
        # x and y are per survivor; the preset itself drops no groups.
        "drop_zero_variance": inputs.survival < 1,
    }


def current_design(inputs: PlanInputs, replay: ReplaySection) -> Design:
    """The design of the recipe: horizon, uses per rollout, ages of its batches and J."""
    if not replay.replays:
        return _no_replay(inputs)
    steps = _stored_steps(inputs, replay)
    x, y = _horizon_and_uses(inputs, replay)
    age_zero = 1 / y if replay.anchors_fresh else 1 / x
    cost, stored = current_cost(inputs, replay), steps * inputs.survivors_per_step
    return _design(inputs, x, y, cost, age_zero, stored)


def current_cost(inputs: PlanInputs, replay: ReplaySection) -> Cost:
    """J of the recipe's own batches. Draws by priority are treated as uniform."""
    steps = _stored_steps(inputs, replay)
    if replay.anchors_fresh:
        return partial(
            fresh_anchored_objective, replay.ratio, steps, with_replacement=replay.with_replacement
        )
    x, y = _horizon_and_uses(inputs, replay)
    return partial(objective if replay.with_replacement else without_replacement_objective, x, y)


def _horizon_and_uses(inputs: PlanInputs, replay: ReplaySection) -> tuple[float, float]:
    """x and y of the recipe's own batches; in other than FIFO's, fresh rollouts are of age 0."""
    steps, draws = _stored_steps(inputs, replay), inputs.updates_per_step
    survivors = inputs.survivors_per_step
    uses = drawn_rollouts(replay, inputs.rollouts_per_step, survivors, draws) / survivors
    if replay.stores_first:
        return steps * draws, uses
    return steps + 1, 1 + uses


def _stored_steps(inputs: PlanInputs, replay: ReplaySection) -> float:
    """Steps of survivors that the buffer holds when it is drawn from."""
    return stored_when_drawn(replay, inputs.survivors_per_step) / inputs.survivors_per_step


def _no_replay(inputs: PlanInputs) -> Design:
    return _design(
        inputs, 1.0, 1.0, lambda mu, _, growth: no_replay_objective(mu, growth), 1.0, stored=0.0
    )


def _design(
    inputs: PlanInputs, x: float, y: float, cost: Cost, age_zero_share: float, stored: float
) -> Design:
    mu = inputs.effective_mu
    trained = y * inputs.survivors_per_step
    return Design(
        x=x,
        y=y,
        stored_rollouts=stored,
        trained_rollouts_per_step=trained,
        gamma=relative_compute(y, mu),
        inference_per_trainer=mu / y,
        age_zero_share=age_zero_share,
        objective=relative_cost(cost, mu, inputs.rho, inputs.growth),
        memory_bytes=stored_bytes(stored, inputs.prompt_tokens, inputs.completion_tokens),
        generated_tokens_per_step=inputs.rollouts_per_step * inputs.completion_tokens,
        trained_tokens_per_step=trained * inputs.completion_tokens,
    )


def explain(inputs: PlanInputs, best: Optimum, x: float, y: float) -> list[str]:
    """Explanations of edge cases; empty for an ordinary optimum."""
    notes = _explain_optimum(best, x, y)
    if not inputs.growth_known:
        notes.append(
            "No verdict is given, because all hangs on how fast the variance grows with age "
            f"({inputs.sources.get('growth', 'assumed')}). A run that replays for a while measures "
            "it: --from-run DIR."
        )
    if inputs.oldest_measured is not None and x > inputs.oldest_measured + 1:
        notes.append(
            f"x = {x:.3g} is beyond the ages at which the run had draws, up to "
            f"{inputs.oldest_measured}: the growth there is extrapolated."
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
    step = inputs.rollouts_per_step
    if _stored_at(inputs, x) <= step - 1:
        kept = step * inputs.updates_per_step / inputs.survivors_per_step
        notes.append(
            f"A buffer has room for the {step} rollouts of a step at least, even if few of them "
            f"survive: it keeps them for {kept:.3g} {inputs.unit}, not {x:.3g}."
        )
    return notes


def _explain_optimum(best: Optimum, x: float, y: float) -> list[str]:
    """Why there is no best size, or none within a step's rollouts."""
    if best.kind == "fresh_only":
        return [
            "The variance of old rollouts grows so fast (a ≥ 1/2) that a smaller buffer is always "
            "better: there is no best size. Keep only the rollouts of the current step (x = 1) "
            f"and use each {y:.2g} times."
        ]
    if best.kind == "store_everything":
        return [
            "With a = 0 rollouts never lose value, so a larger buffer is always better: memory "
            f"decides. From x = {x:.3g} on, a larger buffer gains less than 5 %."
        ]
    if best.x < 1:
        return [
            f"The optimum, x = {best.x:.2g}, is less than one step of rollouts, so replaying "
            "across steps does not pay here. x = 1 is used."
        ]
    return []


def explain_unit(inputs: PlanInputs, batch: BatchSection, x: float, y: float) -> list[str]:
    """A note if FIFO makes several draws in a step of a recipe whose x counts steps."""
    settings = replay_settings(inputs, x, y)
    draws = batch.updates_of(settings["ratio"] * inputs.rollouts_per_step)
    if draws < 2:
        return []
    return [
        f"x counts steps here, as the ages of this recipe do. With the settings above it makes "
        f"{draws} updates a step with a draw each, and plans its x in updates: {x * draws:.3g}."
    ]


def explain_current(
    inputs: PlanInputs, current: Design, cost: Cost, replay: ReplaySection
) -> list[str]:
    """What the theory leaves out for this recipe, and why it finds it dearer than no replay."""
    notes = []
    if math.isinf(current.objective):
        notes.append(
            f"This recipe keeps rollouts for {current.x:.3g} steps; by this theory the last of "
            f"them are all noise ({inputs.growth.describe()}), and J has no finite value."
        )
    elif current.objective > 1:
        limit = break_even_growth(cost, inputs.effective_mu, inputs.rho)
        pays = "" if limit is None else f" It pays if a is below {limit:.2g}."
        notes.append(
            f"This recipe costs {current.objective - 1:.0%} more than no replay by this theory, if "
            f"{inputs.growth.describe()} ({inputs.sources.get('growth', 'given')}).{pays}"
        )
    if not replay.stores_first:
        notes.append(
            "x*, y* and the settings above are those of a FIFO buffer, not of this recipe: y* is "
            f"no value for the replay.ratio of a {replay.composition} batch. Paper A measured "
            "r = 0.5 against 1 (16.58 and 15.99 % avg at 1.7B) and τ_max = 10 against 1, 30 and "
            "60 (16.58; 16.49, 16.01 and 15.28 %)."
        )
    if replay.priority != "uniform":
        notes.append(f"What {replay.priority} gains by selecting rollouts is not in the theory.")
    return notes
