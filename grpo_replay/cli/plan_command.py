"""`grpo-replay plan`: would replay pay, how long to keep rollouts, how often to train on them."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_replay.cli.options import PlanOptions
from grpo_replay.errors import UsageError
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.estimate import (
    RunEstimates,
    estimate_from_run,
    fit_growth,
    other_growths,
)
from grpo_replay.lab.planning.expected import COST_RATIO, expected_of
from grpo_replay.lab.planning.theory import (
    Design,
    PlanInputs,
    PowerGrowth,
    RatioGrowth,
    best_fifo,
    design_of,
    replay_settings,
)
from grpo_replay.recipe import Recipe, load_recipe
from grpo_replay.storage.atomic import json_values
from grpo_replay.storage.run_directory import is_of_another_trainer
from grpo_replay.terminal.console import open_console, print_json
from grpo_replay.terminal.text_table import TextTable

DEFAULT_RHO = 0.1
DEFAULT_GROWTH = 0.2

Settings = dict[str, dict[str, Any]]
"""Settings of a recipe by section and key."""

ROWS = {
    "x, draws while a rollout is kept": "{0.x:.3g}",
    "y, uses of a rollout": "{0.y:.3g}",
    "rollouts stored": "{0.stored_rollouts:,.0f}",
    "rollouts trained on in a step": "{0.trained_rollouts_per_step:,.0f}",
    "compute, relative to no replay": "{0.verdict.ratio:.2f}",
    "the same if one assumption changes": "{0.verdict.low:.2f} to {0.verdict.high:.2f}",
}
MEANS = (
    "Predicted is paper B's compute to a bound on the mean squared gradient, not to an accuracy; "
    "it does not know what a draw by priority gains."
)
MEASURED = (
    "The μ above which replay takes less compute than GRPO to the highest accuracy that all runs "
    "reach is estimated at 3.3 [1.7, 19] for `ours` on `tiny-long`, and at 5 [1.9, 62] for a FIFO "
    "buffer of two batches on `tiny-buffers`. On SmolLM2 `ours` takes more below μ 1.6; above "
    "that, four seeds do not tell."
)
"""What docs/make_results.py says of our own runs."""


def run(options: PlanOptions) -> int:
    """Print the plan. Raises UsageError for missing, contradictory or ignored options."""
    if options.recipe is options.from_run is options.mu is None:
        raise UsageError("plan needs a RECIPE, --from-run DIR or --mu; try --mu 5.28 --growth 0.2")
    if (options.overrides and not options.recipe) or (options.recipe and options.from_run):
        raise UsageError("plan takes a RECIPE, which --set changes, or the one of --from-run DIR")
    recipe = load_recipe(options.recipe, options.overrides) if options.recipe else None
    estimates = RunEstimates()
    if options.from_run is not None:
        source = open_source(options.from_run)
        recipe, estimates = source.recipe, estimate_from_run(source)
    inputs = plan_inputs(recipe, estimates, options)
    designs = {"best FIFO": best_fifo(inputs)}
    if recipe is not None and recipe.replay.replays:
        designs["this recipe"] = design_of(inputs, recipe.replay)
    best = designs["best FIFO"]
    settings = {"replay": replay_settings(inputs, best.x, best.y)}
    if recipe is not None:
        settings |= other_settings(recipe, inputs.updates_per_step)
    if options.as_json:
        print_json(plan_document(inputs, designs, settings))
    else:
        in_trl = options.from_run is not None and is_of_another_trainer(Path(options.from_run))
        print_plan(inputs, designs, settings, open_console(), in_trl)
    return 0


def other_settings(recipe: Recipe, updates: int) -> Settings:
    """The settings, by section, to change in `recipe` for a FIFO buffer with so many updates per
    step."""
    batch: dict[str, Any] = {}
    if recipe.batch.mini_batch_rollouts is not None:
        batch["mini_batch_rollouts"] = None
    if recipe.batch.updates_per_step != updates:
        batch["updates_per_step"] = updates
    refills = {"max_refills": 0} if recipe.sampling.max_refills else {}
    return {"batch": batch, "sampling": refills}


def plan_inputs(recipe: Recipe | None, estimates: RunEstimates, options: PlanOptions) -> PlanInputs:
    """The assumptions, each with its origin: a given value precedes a measured one, which precedes
    an assumed one."""
    assumed: dict[str, tuple[Any, str]] = {
        "mu": (COST_RATIO["Qwen2.5-7B"], "paper B's 7B model"),
        "rho": (DEFAULT_RHO, "a run cannot tell"),
        "growth": (PowerGrowth(DEFAULT_GROWTH), "measure it with --from-run"),
        "survival": (1.0, "no group is dropped"),
        "rollouts_per_step": (256, "32 prompts of 8"),
    }
    if recipe is not None:
        expected = expected_of(recipe)
        assumed |= {key: (getattr(expected, key), expected.sources[key])
                    for key in ("mu", "survival")}  # fmt: skip
        assumed["rollouts_per_step"] = recipe.rollouts_per_step, "of the recipe"
    inputs = {key: (value, f"assumed: {why}") for key, (value, why) in assumed.items()}
    for key in ("mu", "survival", "rollouts_per_step"):
        if (value := getattr(estimates, key)) is not None:
            inputs[key] = value, "measured in the run"
    points = estimates.growth_points if options.growth is None else ()
    if points:
        few = "" if estimates.growth_known else ": too few"
        drawn = f"{estimates.growth_draws:,} draws of ages {points[0][0]} to {points[-1][0]}{few}"
        # A run that replayed and saw no growth measured a constant variance.
        growth = fit_growth(points) or RatioGrowth(0.0, 1.0)
        inputs["growth"] = growth, f"measured in the run on {drawn}"
    for key in ("mu", "rho", "growth", "survival"):
        if (value := getattr(options, key)) is not None:
            inputs[key] = PowerGrowth(value) if key == "growth" else value, "given"
    return PlanInputs(
        **{name: value for name, (value, _) in inputs.items()},
        sources={name: source for name, (_, source) in inputs.items()},
        growth_others=other_growths(points) if points else (),
        growth_known=options.growth is not None or estimates.growth_known,
        updates_per_step=recipe.draws_per_step if recipe else 1,
    )


def plan_document(
    inputs: PlanInputs, designs: dict[str, Design], settings: Settings
) -> dict[str, Any]:
    """The plan as JSON values; null for a number that is not finite."""
    assumptions = asdict(inputs)
    assumptions["growth"] = inputs.growth.describe()
    assumptions["growth_parameters"] = asdict(inputs.growth)
    return json_values(
        {
            "verdict": verdict(inputs, designs),
            "designs": {name.replace(" ", "_"): asdict(design) for name, design in designs.items()},
            "settings": settings,
            "assumptions": assumptions,
        }
    )


def print_plan(
    inputs: PlanInputs,
    designs: dict[str, Design],
    settings: Settings,
    console: Console,
    in_trl: bool = False,
) -> None:
    """Print the verdict, the table of designs, the assumptions and the settings."""
    console.print(verdict(inputs, designs), style="bold", soft_wrap=True)
    console.print(f"Measured on our tasks: {MEASURED} Here μ is {inputs.mu:.3g}.")
    rows = [
        (name, *(cell.format(design).replace("inf", "∞") for design in designs.values()))
        for name, cell in ROWS.items()
    ]
    thresholds = [_pays(design.pays_above) for design in designs.values()]
    rows.append(("pays above μ, predicted", *thresholds))
    TextTable(("", *designs), rows).print(console)
    for name, source in inputs.sources.items():
        value = getattr(inputs, name)
        shown = inputs.growth.describe() if name == "growth" else f"{value:,.4g}"
        console.print(f"{'μ' if name == 'mu' else name} {shown}: {source}", style="dim")
    if in_trl:
        rounded = {key: round(value, 2) if isinstance(value, float) else value
                   for key, value in settings["replay"].items() if key != "preset"}  # fmt: skip
        arguments = ", ".join(f"{key}={value!r}" for key, value in rounded.items())
        text = f'ReplayConfig.of("{settings["replay"]["preset"]}", {arguments})'
    else:
        text = " ".join(
            f"--set {section}.{key}={_setting(value)}"
            for section, values in settings.items()
            for key, value in values.items()
        )
    console.print(f"best FIFO, computed and not run: {text}", soft_wrap=True)
    console.print(MEANS, style="dim")


def verdict(inputs: PlanInputs, designs: dict[str, Design]) -> str:
    """What the theory predicts for the recipe, or for the best FIFO buffer if there is no recipe
    that replays."""
    name = "this recipe" if "this recipe" in designs else "the best FIFO buffer"
    design = designs.get("this recipe", designs["best FIFO"])
    why = "" if inputs.growth_known else ", because the growth of variance with age is not known"
    answers = {
        "cheaper": "replay is predicted to pay",
        "dearer": "replay is predicted not to pay",
        "undecided": f"the prediction is undecided{why}",
    }
    ratio, low, high = (
        f"{value:.2f}".replace("inf", "∞")
        for value in (design.verdict.ratio, design.verdict.low, design.verdict.high)
    )
    answer = answers[design.verdict.answer]
    sentence = (
        f"{answer}: {name} needs {ratio} times the compute of no replay at μ = {inputs.mu:.3g}"
    )
    if design.verdict.answer == "undecided":
        return sentence + f", {low} to {high} if one assumption changes"
    if design.pays_above is None:
        return sentence
    pays = _pays(design.pays_above)
    return sentence + (", and pays at no μ" if pays == "never" else f", and pays above μ {pays}")


def _pays(mu: float | None) -> str:
    return "–" if mu is None else "never" if math.isinf(mu) else f"{mu:.2g}"


def _setting(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.2f}" if isinstance(value, float) else str(value)
