"""`grpo-replay plan`: how long to keep rollouts, and how often to train on them."""

import json
from pathlib import Path

from rich.console import Console

from grpo_replay.errors import UsageError
from grpo_replay.inspection.plan_design import PlanInputs, make_plan
from grpo_replay.inspection.plan_estimate import RunEstimates, estimate_from_run
from grpo_replay.inspection.plan_panels import plan_document, print_plan
from grpo_replay.inspection.plan_plot import plot_plan
from grpo_replay.inspection.source import open_source
from grpo_replay.inspection.style import check_plot_path
from grpo_replay.planner import Growth, PowerGrowth, RatioGrowth, check_growth
from grpo_replay.recipe import Recipe, load_recipe

DEFAULT_MU = 5.28
DEFAULT_RHO = 0.1
DEFAULT_GROWTH = 0.2


def run(
    recipe: str | None = None,
    from_run: str | None = None,
    overrides: tuple[str, ...] = (),
    mu: float | None = None,
    rho: float | None = None,
    growth: float | None = None,
    survival: float | None = None,
    plot: str | None = None,
    as_json: bool = False,
) -> None:
    """Print the plan. Raises UsageError for missing or contradicting options."""
    if recipe is not None and from_run is not None:
        raise UsageError(
            "plan takes a RECIPE or --from-run DIR, not both: a run's own recipe is used"
        )
    if recipe is None and from_run is None and mu is None:
        raise UsageError(
            "plan needs a RECIPE, --from-run DIR, or --mu (with --rho and --growth); for example "
            "grpo-replay plan --mu 5.28 --rho 0.1 --growth 0.2"
        )
    if plot is not None:
        check_plot_path(Path(plot), (".png", ".svg"))
    resolved, estimates = _read(recipe, from_run, overrides)
    inputs = _inputs(resolved, estimates, mu, rho, growth, survival)
    plan = make_plan(inputs, None if resolved is None else resolved.replay)
    if plot is not None:
        plot_plan(plan, Path(plot))
    if as_json:
        print(json.dumps(plan_document(plan), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_plan(plan, Console(highlight=False))


def _read(
    recipe: str | None, from_run: str | None, overrides: tuple[str, ...]
) -> tuple[Recipe | None, RunEstimates | None]:
    if from_run is not None:
        source = open_source(from_run)
        return source.recipe, estimate_from_run(source)
    return (None if recipe is None else load_recipe(recipe, overrides)), None


def _inputs(
    recipe: Recipe | None,
    estimates: RunEstimates | None,
    mu: float | None,
    rho: float | None,
    growth: float | None,
    survival: float | None,
) -> PlanInputs:
    """The assumptions: an option given beats the run's estimate, which beats an assumed value."""
    sources: dict[str, str] = {}

    def choose(name: str, given, measured, assumed, why: str):
        for value, source in ((given, "given"), (measured, "measured in the run")):
            if value is not None:
                sources[name] = source
                return value
        sources[name] = f"assumed: {why}"
        return assumed

    if growth is not None:
        check_growth(growth)
    given_growth: Growth | None = None if growth is None else PowerGrowth(growth)
    measured_growth: Growth | None = None
    if estimates is not None and estimates.growth_points:
        # A run that replayed and saw no growth measured that rollouts do not age.
        measured_growth = estimates.growth or RatioGrowth(0.0, 1.0)
    longest = recipe.sampling.max_completion_length if recipe else 2000
    rollouts = recipe.rollouts_per_step if recipe else 256
    from_estimates = (lambda name: getattr(estimates, name)) if estimates else lambda name: None
    return PlanInputs(
        mu=choose("mu", mu, from_estimates("mu"), DEFAULT_MU, "paper B's 7B model"),
        rho=choose("rho", rho, None, DEFAULT_RHO, "a run cannot tell"),
        growth=choose(
            "growth",
            given_growth,
            measured_growth,
            PowerGrowth(DEFAULT_GROWTH),
            "no rollouts replayed to measure it on" if estimates else "measure it with --from-run",
        ),
        survival=choose(
            "survival", survival, from_estimates("survival"), 1.0, "no group is dropped"
        ),
        rollouts_per_step=choose(
            "rollouts_per_step",
            rollouts if recipe else None,
            from_estimates("rollouts_per_step"),
            rollouts,
            "32 prompts of 8",
        ),
        completion_tokens=choose(
            "completion_tokens",
            None,
            from_estimates("completion_tokens"),
            longest / 2,
            "half of the longest" if recipe else "half of 2,000",
        ),
        prompt_tokens=choose(
            "prompt_tokens", None, from_estimates("prompt_tokens"), 128, "typical"
        ),
        composition=recipe.replay.composition if recipe else "buffer_only",
        sources=sources,
    )
