"""`grpo-replay plan`: would replay pay, how long to keep rollouts, how often to train on them."""

from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_replay.cli.options import PlanOptions
from grpo_replay.errors import UsageError
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.estimate import RunEstimates, estimate_from_run
from grpo_replay.lab.planning.plan import Plan, Settings, break_even_text, make_plan
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.run_directory import is_of_another_trainer
from grpo_replay.terminal.console import open_console, print_json
from grpo_replay.terminal.text_table import TextTable

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
"""The sentence about our own runs that docs/make_results.py computes."""


def run(options: PlanOptions) -> int:
    """Print the plan. Raises UsageError for missing, contradictory or ignored options."""
    if options.recipe is options.from_run is options.mu is None:
        raise UsageError("plan needs a RECIPE, --from-run DIR or --mu; try --mu 5.28 --growth 0.2")
    if (options.overrides and not options.recipe) or (options.recipe and options.from_run):
        raise UsageError("plan takes a RECIPE, which --set changes, or the one of --from-run DIR")
    recipe = load_recipe(options.recipe, options.overrides) if options.recipe else None
    estimates, in_host = RunEstimates(), False
    if options.from_run is not None:
        source = open_source(options.from_run)
        recipe, estimates = source.recipe, estimate_from_run(source)
        in_host = is_of_another_trainer(Path(options.from_run))
    given = {name: value for name in ("mu", "rho", "growth", "survival")
             if (value := getattr(options, name)) is not None}  # fmt: skip
    plan = make_plan(recipe, estimates, given)
    if options.as_json:
        print_json(plan.to_json())
    else:
        print_plan(plan, open_console(), in_host)
    return 0


def print_plan(plan: Plan, console: Console, in_host: bool) -> None:
    """Print the verdict, the table of designs, the assumptions and the settings. `in_host` prints
    the settings for a run of another trainer."""
    inputs, designs = plan.inputs, plan.designs
    console.print(plan.verdict_text(), style="bold", soft_wrap=True)
    console.print(f"Measured on our tasks: {MEASURED} Here μ is {inputs.mu:.3g}.")
    rows = [
        (name, *(cell.format(design).replace("inf", "∞") for design in designs.values()))
        for name, cell in ROWS.items()
    ]
    rows.append(("pays above μ, predicted", *map(break_even_text, designs.values())))
    TextTable(("", *designs), rows).print(console)
    for name, source in inputs.sources.items():
        value = getattr(inputs, name)
        shown = inputs.growth.describe() if name == "growth" else f"{value:,.4g}"
        console.print(f"{'μ' if name == 'mu' else name} {shown}: {source}", style="dim")
    text = _host_arguments(plan.settings) if in_host else _set_words(plan.settings)
    console.print(f"best FIFO, computed and not run: {text}", soft_wrap=True)
    console.print(MEANS, style="dim")


def _host_arguments(settings: Settings) -> str:
    """Returns the settings as the `ReplayConfig` of a host."""
    rounded = {key: round(value, 2) if isinstance(value, float) else value
               for key, value in settings["replay"].items() if key != "preset"}  # fmt: skip
    arguments = ", ".join(f"{key}={value!r}" for key, value in rounded.items())
    return f'ReplayConfig.of("{settings["replay"]["preset"]}", {arguments})'


def _set_words(settings: Settings) -> str:
    """Returns the settings as words of `--set`."""
    return " ".join(
        f"--set {section}.{key}={_recipe_value(value)}"
        for section, values in settings.items()
        for key, value in values.items()
    )


def _recipe_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.2f}" if isinstance(value, float) else str(value)
