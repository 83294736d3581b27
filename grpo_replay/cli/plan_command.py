"""`grpo-replay plan`: would replay pay, how long to keep rollouts, how often to train on them."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console

from grpo_replay.cli.options import PlanOptions
from grpo_replay.errors import UsageError
from grpo_replay.lab.dry_run.estimates import COST_RATIO, expected_of
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.design import (
    Design,
    PlanInputs,
    best_fifo,
    design_of,
    no_replay,
    replay_settings,
)
from grpo_replay.lab.planning.estimate import RunEstimates, estimate_from_run
from grpo_replay.lab.planning.theory import (
    Growth,
    PowerGrowth,
    RatioGrowth,
    Verdict,
    check_growth,
)
from grpo_replay.recipe import Recipe, load_recipe
from grpo_replay.storage.atomic import json_values
from grpo_replay.terminal.console import open_console, plain_table, print_json, print_table

DEFAULT_RHO = 0.1
DEFAULT_GROWTH = 0.2

_NO_RECIPE = {
    "mu": (COST_RATIO["Qwen2.5-7B"], "paper B's 7B model"),
    "survival": (1.0, "no group is dropped"),
}

MEANS = (
    "J is paper B's compute to a bound on the mean squared gradient; it predicts no accuracy, and "
    "does not know what a draw by priority gains."
)

_ROWS: dict[str, Callable[[Design], str]] = {
    "x, steps that a rollout is kept": lambda each: f"{each.x:.3g}",
    "y, uses of a rollout": lambda each: f"{each.y:.3g}",
    "rollouts stored": lambda each: f"{each.stored_rollouts:,.0f}",
    "rollouts trained on in a step": lambda each: f"{each.trained_rollouts_per_step:,.0f}",
    "γ, compute per rollout trained on": lambda each: f"{each.gamma:.2f}",
    "W/T, generators per trainer": lambda each: f"{each.inference_per_trainer:.2f}",
    "J, compute to equal progress": lambda each: _amount(each.verdict.ratio),
    "J if one assumption changes": lambda each: _range(each.verdict),
    "pays above μ": lambda each: _pays(each.pays_above),
}


def run(options: PlanOptions) -> int:
    """Print the plan. Raises UsageError for missing, contradictory or ignored options."""
    _check_options(options)
    recipe = load_recipe(options.recipe, options.overrides) if options.recipe else None
    estimates = None
    if options.from_run is not None:
        source = open_source(options.from_run)
        recipe, estimates = source.recipe, estimate_from_run(source, options.mu is None)
    inputs = plan_inputs(recipe, estimates, options)
    designs = {"no replay": no_replay(inputs), "best FIFO": best_fifo(inputs)}
    if recipe is not None and recipe.replay.replays:
        designs["this recipe"] = design_of(inputs, recipe.replay)
    if options.as_json:
        print_json(plan_document(inputs, designs))
    else:
        print_plan(inputs, designs, open_console())
    return 0


def _check_options(options: PlanOptions) -> None:
    recipe, from_run = options.recipe, options.from_run
    if recipe is not None and from_run is not None:
        raise UsageError(
            "plan takes a RECIPE or --from-run DIR, not both: a run's own recipe is used"
        )
    if recipe is None and from_run is None and options.mu is None:
        raise UsageError(
            "plan needs a RECIPE, --from-run DIR, or --mu (with --rho and --growth); for example "
            "grpo-replay plan --mu 5.28 --rho 0.1 --growth 0.2"
        )
    if options.overrides and recipe is None:
        raise UsageError(f"plan --set {options.overrides[0]} changes a RECIPE, and none is named")


def plan_inputs(
    recipe: Recipe | None, estimates: RunEstimates | None, options: PlanOptions
) -> PlanInputs:
    """The assumptions, each with its origin: a given value precedes a measured one, which precedes
    an assumed one."""
    seen, given = estimates or RunEstimates(), options.survival
    if given is not None and given < 1 and recipe and not recipe.replay.drop_zero_variance:
        raise UsageError(
            f"--survival {given}: replay.drop_zero_variance is false in this recipe, so every "
            "rollout is stored; leave --survival out"
        )
    assumed = dict(_NO_RECIPE)
    if recipe is not None:
        expected = expected_of(recipe)
        assumed = {name: (getattr(expected, name), expected.sources[name]) for name in assumed}
    generated = recipe.rollouts_per_step if recipe and not estimates else None
    growth, growth_source = _growth(options.growth, estimates)
    table: dict[str, tuple[Any, str]] = {
        "mu": _choice(options.mu, seen.mu, *assumed["mu"]),
        "rho": _choice(options.rho, None, DEFAULT_RHO, "a run cannot tell"),
        "growth": (growth, growth_source),
        "survival": _choice(given, seen.survival, *assumed["survival"]),
        "rollouts_per_step": (
            (generated, "of the recipe")
            if generated
            else _choice(None, seen.rollouts_per_step, 256, "32 prompts of 8")
        ),
    }
    measured = options.growth is None and bool(seen.growth_points)
    return PlanInputs(
        **{name: value for name, (value, _) in table.items()},
        sources={name: source for name, (_, source) in table.items()},
        growth_others=seen.growth_others if measured else (),
        growth_known=options.growth is not None or seen.growth_known,
        updates_per_step=recipe.draws_per_step if recipe else 1,
    )


def _choice(given: Any, measured: Any, assumed: Any, why: str) -> tuple[Any, str]:
    if given is not None:
        return given, "given"
    return (assumed, f"assumed: {why}") if measured is None else (measured, "measured in the run")


def _growth(given: float | None, estimates: RunEstimates | None) -> tuple[Growth, str]:
    if given is not None:
        check_growth(given)
        return PowerGrowth(given), "given"
    if estimates is None or not estimates.growth_points:
        return PowerGrowth(DEFAULT_GROWTH), "assumed: measure it with --from-run"
    ages = [age for age, _ in estimates.growth_points]
    few = "" if estimates.growth_known else ": too few"
    drawn = f"{estimates.growth_draws:,} draws of ages {min(ages)} to {max(ages)}{few}"
    # A run that replayed and saw no growth measured a constant variance.
    return estimates.growth or RatioGrowth(0.0, 1.0), f"measured in the run on {drawn}"


def plan_document(inputs: PlanInputs, designs: dict[str, Design]) -> dict[str, Any]:
    """The plan as JSON values, null for what is not finite."""
    best, assumptions = designs["best FIFO"], asdict(inputs)
    assumptions["growth"] = inputs.growth.describe()
    assumptions["growth_parameters"] = asdict(inputs.growth)
    return json_values(
        {
            "verdict": verdict(inputs, designs),
            "designs": {name.replace(" ", "_"): asdict(each) for name, each in designs.items()},
            "replay_settings": replay_settings(inputs, best.x, best.y),
            "assumptions": assumptions,
        }
    )


def print_plan(inputs: PlanInputs, designs: dict[str, Design], console: Console) -> None:
    """Print the verdict, the table of designs, the assumptions and the settings."""
    console.print(verdict(inputs, designs), style="bold", soft_wrap=True)
    rows = [(name, *map(cell, designs.values())) for name, cell in _ROWS.items()]
    print_table(console, plain_table("", ("", *designs), rows))
    named = {"mu": f"{inputs.mu:.3g}", "rho": f"{inputs.rho:.3g}"}
    named |= {"growth": inputs.growth.describe(), "survival": f"{inputs.survival:.3g}"}
    for name, value in (*named.items(), ("rollouts_per_step", f"{inputs.rollouts_per_step:,}")):
        console.print(f"{name} {value}: {inputs.sources.get(name, '')}", style="dim")
    settings = replay_settings(inputs, designs["best FIFO"].x, designs["best FIFO"].y)
    words = " ".join(f"--set replay.{key}={_setting(value)}" for key, value in settings.items())
    console.print(f"best FIFO: {words}", soft_wrap=True)
    console.print(MEANS, style="dim")


def verdict(inputs: PlanInputs, designs: dict[str, Design]) -> str:
    """What the theory says of the recipe, or without one that replays of the best FIFO buffer."""
    name = "this recipe" if "this recipe" in designs else "best FIFO"
    found, where = designs[name].verdict, designs[name].pays_above
    why = "" if inputs.growth_known else ", because the growth of variance with age is not known"
    words = {
        "cheaper": "replay pays",
        "dearer": "replay does not pay",
        "undecided": f"undecided{why}",
    }
    whose = "this recipe" if name == "this recipe" else "the best FIFO buffer"
    said = f"{words[found.answer]}: {whose} needs {_amount(found.ratio)} times the compute of no "
    said += f"replay at μ = {inputs.mu:.3g}"
    if where is None:
        return said
    return said + (", and pays at no μ" if math.isinf(where) else f", and pays above μ {where:.2g}")


def _range(found: Verdict) -> str:
    return "–" if found.low == found.high else f"{_amount(found.low)} to {_amount(found.high)}"


def _amount(ratio: float) -> str:
    return "∞" if math.isinf(ratio) else f"{ratio:.2f}"


def _pays(mu: float | None) -> str:
    return "–" if mu is None else f"{mu:.2g}".replace("inf", "never")


def _setting(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.2f}" if isinstance(value, float) else str(value)
