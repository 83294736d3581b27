"""The answer of `plan`: assumptions and their sources, designs, settings, and a verdict."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from grpo_replay.lab.planning.estimate import RunEstimates, alternative_growths, fit_growth
from grpo_replay.lab.planning.expected import COST_RATIO, expected_of
from grpo_replay.lab.planning.theory import (
    Design,
    PlanInputs,
    PowerGrowth,
    RatioGrowth,
    best_fifo,
    fifo_settings,
    recipe_design,
)
from grpo_replay.recipe import Recipe
from grpo_replay.storage.atomic import json_values

DEFAULT_RHO = 0.1
DEFAULT_GROWTH = 0.2

Settings = dict[str, dict[str, Any]]
"""Settings of a recipe by section and key."""

SourcedValues = dict[str, tuple[Any, str]]
"""Fields of `PlanInputs`: (value, source in words)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The best FIFO buffer under some assumptions, and beside it the buffer of a recipe."""

    inputs: PlanInputs
    fifo: Design
    recipe: Design | None  # None without a recipe that replays
    settings: Settings  # of the best FIFO buffer; with a recipe also what must change beside it

    @property
    def designs(self) -> dict[str, Design]:
        """The designs by name."""
        recipe = {} if self.recipe is None else {"this recipe": self.recipe}
        return {"best FIFO": self.fifo, **recipe}

    def verdict_text(self) -> str:
        """Returns what the theory predicts for the recipe's buffer, else for the FIFO buffer."""
        name = "the best FIFO buffer" if self.recipe is None else "this recipe"
        design = self.recipe or self.fifo
        why = ", because the growth of variance with age is not known"
        answers = {
            "cheaper": "replay is predicted to pay",
            "dearer": "replay is predicted not to pay",
            "undecided": f"the prediction is undecided{'' if self.inputs.growth_known else why}",
        }
        ratio, low, high = (
            f"{value:.2f}".replace("inf", "∞")
            for value in (design.verdict.ratio, design.verdict.low, design.verdict.high)
        )
        sentence = (
            f"{answers[design.verdict.answer]}: {name} needs {ratio} times the compute of no "
            f"replay at μ = {self.inputs.mu:.3g}"
        )
        if design.verdict.answer == "undecided":
            return f"{sentence}, {low} to {high} if one assumption changes"
        if design.pays_above is None:
            return sentence
        pays = break_even_text(design)
        return f"{sentence}, and pays {'at no μ' if pays == 'never' else f'above μ {pays}'}"

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values; null for a number that is not finite."""
        assumptions = asdict(self.inputs)
        assumptions["growth"] = self.inputs.growth.describe()
        assumptions["growth_parameters"] = asdict(self.inputs.growth)
        designs = {name.replace(" ", "_"): asdict(design) for name, design in self.designs.items()}
        document = {
            "verdict": self.verdict_text(),
            "designs": designs,
            "settings": self.settings,
            "assumptions": assumptions,
        }
        return json_values(document)


def make_plan(recipe: Recipe | None, estimates: RunEstimates, given: Mapping[str, float]) -> Plan:
    """Plans for a recipe, or without one for assumptions alone. `estimates` are measured in a run.
    `given` may have mu, rho, survival, and growth (the exponent of `PowerGrowth`)."""
    inputs = plan_inputs(recipe, estimates, given)
    fifo = best_fifo(inputs)
    settings = {"replay": fifo_settings(inputs, fifo)}
    design = None
    if recipe is not None:
        settings |= settings_beside(recipe, inputs.updates_per_step)
        design = recipe_design(inputs, recipe.replay) if recipe.replays else None
    return Plan(inputs, fifo, design, settings)


def plan_inputs(
    recipe: Recipe | None, estimates: RunEstimates, given: Mapping[str, float]
) -> PlanInputs:
    """Returns the assumptions of a plan. A given value replaces a measured one, which replaces an
    assumed one."""
    points = () if "growth" in given else estimates.growth_points
    given_values = {name: (PowerGrowth(value) if name == "growth" else value, "given")
                    for name, value in given.items()}  # fmt: skip
    values = _assumed_values(recipe) | _measured_values(estimates) | given_values
    return PlanInputs(
        **{name: value for name, (value, _) in values.items()},
        sources={name: source for name, (_, source) in values.items()},
        growth_others=alternative_growths(points) if points else (),
        growth_known="growth" in given or estimates.growth_known,
        updates_per_step=recipe.draws_per_step if recipe else 1,
    )


def _assumed_values(recipe: Recipe | None) -> SourcedValues:
    values: SourcedValues = {
        "mu": (COST_RATIO["Qwen2.5-7B"], "paper B's 7B model"),
        "rho": (DEFAULT_RHO, "a run cannot tell"),
        "growth": (PowerGrowth(DEFAULT_GROWTH), "measure it with --from-run"),
        "survival": (1.0, "no group is dropped"),
        "rollouts_per_step": (256, "32 prompts of 8"),
    }
    if recipe is not None:
        expected = expected_of(recipe)
        values["mu"] = expected.mu, expected.sources["mu"]
        values["survival"] = expected.survival, expected.sources["survival"]
        values["rollouts_per_step"] = recipe.rollouts_per_step, "of the recipe"
    return {name: (value, f"assumed: {source}") for name, (value, source) in values.items()}


def _measured_values(estimates: RunEstimates) -> SourcedValues:
    values: SourcedValues = {
        name: (value, "measured in the run")
        for name in ("mu", "survival", "rollouts_per_step")
        if (value := getattr(estimates, name)) is not None
    }
    if points := estimates.growth_points:
        # A run that replayed and saw no growth measured a constant variance.
        growth = fit_growth(points) or RatioGrowth(0.0, 1.0)
        draws = f"{estimates.growth_draws:,} draws of ages {points[0][0]} to {points[-1][0]}"
        too_few = "" if estimates.growth_known else ": too few"
        values["growth"] = growth, f"measured in the run on {draws}{too_few}"
    return values


def settings_beside(recipe: Recipe, updates: int) -> Settings:
    """Returns the settings of `batch` and `sampling` to change in `recipe` for a FIFO buffer with
    so many `updates` per step."""
    batch: dict[str, Any] = {}
    if recipe.batch.mini_batch_rollouts is not None:
        batch["mini_batch_rollouts"] = None
    if recipe.batch.updates_per_step != updates:
        batch["updates_per_step"] = updates
    refills = {"max_refills": 0} if recipe.sampling.max_refills else {}
    return {"batch": batch, "sampling": refills}


def break_even_text(design: Design) -> str:
    """Returns the μ above which a design pays, "never", or "–" if it uses no rollout twice."""
    mu = design.pays_above
    return "–" if mu is None else "never" if math.isinf(mu) else f"{mu:.2g}"
