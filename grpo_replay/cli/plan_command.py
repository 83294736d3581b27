"""`grpo-replay plan`: how long to keep rollouts, and how often to train on them."""

from collections.abc import Mapping
from typing import Any

from grpo_replay.cli.options import PlanOptions
from grpo_replay.errors import UsageError
from grpo_replay.lab.dry_run.estimates import COST_RATIO, expected_of
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.inspection.views import warn_of_gaps
from grpo_replay.lab.planning.design import PlanInputs, make_plan
from grpo_replay.lab.planning.estimate import RunEstimates, estimate_from_run, refuse_unknown_mu
from grpo_replay.lab.planning.plan_panels import (
    plan_document,
    print_plan,
    print_splits,
    split_document,
    splits,
)
from grpo_replay.lab.planning.theory import (
    Growth,
    PowerGrowth,
    RatioGrowth,
    check_growth,
    check_inputs,
)
from grpo_replay.recipe import Recipe, load_recipe
from grpo_replay.terminal.console import open_console, print_json

DEFAULT_MU = COST_RATIO["Qwen2.5-7B"]
DEFAULT_RHO = 0.1
DEFAULT_GROWTH = 0.2

_NO_RECIPE: Mapping[str, tuple[float, str]] = {
    "mu": (DEFAULT_MU, "paper B's 7B model"),
    "survival": (1.0, "no group is dropped"),
    "completion_tokens": (1000.0, "half of 2,000"),
    "prompt_tokens": (128.0, "typical"),
}


def _choice(
    given: Any, measured: Any, assumed: Any, why: str, given_by: str = "given"
) -> tuple[Any, str]:
    """A parameter and its origin in words: a given value precedes a measured one, which precedes
    the assumed one, for which `why` is the reason."""
    if given is not None:
        return given, given_by
    return (assumed, f"assumed: {why}") if measured is None else (measured, "measured in the run")


def run(options: PlanOptions) -> int:
    """Print the plan or γ by machines, as the options say.

    Raises UsageError for missing, contradictory or ignored options.
    """
    if options.workers is not None or options.trainers is not None:
        _machines(options)
    else:
        _plan(options)
    return 0


def _plan(options: PlanOptions) -> None:
    _check_options(options)
    recipe, estimates = _read(options)
    sections = (recipe.replay, recipe.batch) if recipe else (None, None)
    plan = make_plan(_inputs(recipe, estimates, options), *sections)
    if options.as_json:
        print_json(plan_document(plan))
    else:
        print_plan(plan, open_console(markup=True))


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
        why = "--from-run uses the run's own recipe" if from_run else "there is no RECIPE to change"
        raise UsageError(
            f"plan --set {options.overrides[0]}: {why}; name a RECIPE, or leave --set out"
        )


def _machines(options: PlanOptions) -> None:
    """Print γ for every split of W + T machines into workers and trainers."""
    workers, trainers = _check_machine_options(options)
    recipe, estimates = _read(options)
    mu, source = options.mu, "given"
    if mu is None:
        inputs = _inputs(recipe, estimates, options)
        mu, source = inputs.mu, inputs.sources["mu"]
    check_inputs(mu, DEFAULT_RHO)
    buffer = _buffer_of(recipe)
    rows = splits(mu, workers + trainers, *buffer)
    asked = rows[trainers - 1]
    if options.as_json:
        print_json(split_document(mu, source, asked, rows))
    else:
        print_splits(mu, source, asked, rows, open_console(markup=True))


def _check_machine_options(options: PlanOptions) -> tuple[int, int]:
    """W and T."""
    for name in ("rho", "growth", "survival"):
        if (value := getattr(options, name)) is not None:
            raise UsageError(
                f"plan --{name} {value}: γ by workers and trainers does not depend on it; leave it "
                "out, or leave --workers and --trainers out"
            )
    if options.workers is None or options.trainers is None:
        raise UsageError("plan: --workers and --trainers are given together (paper B's W and T)")
    return options.workers, options.trainers


def _buffer_of(recipe: Recipe | None) -> tuple[int | None, float | None]:
    """N and the rollouts per update of a FIFO recipe; None for other recipes."""
    if recipe is None or not (recipe.replays and recipe.replay.stores_first):
        return None, None
    drawn = recipe.replay.ratio * recipe.rollouts_per_step
    return recipe.replay.capacity_rollouts, drawn / recipe.draws_per_step


def _read(options: PlanOptions) -> tuple[Recipe | None, RunEstimates | None]:
    if options.from_run is not None:
        source = open_source(options.from_run)
        warn_of_gaps(source)
        return source.recipe, estimate_from_run(source)
    if options.recipe is None:
        return None, None
    return load_recipe(options.recipe, options.overrides), None


def _inputs(
    recipe: Recipe | None, estimates: RunEstimates | None, options: PlanOptions
) -> PlanInputs:
    """The parameters of the plan, each with its origin."""
    seen, survival = estimates or RunEstimates(), options.survival
    refuse_unknown_mu(estimates, options.mu)
    if survival is not None and survival < 1 and recipe and not recipe.replay.drop_zero_variance:
        raise UsageError(
            f"--survival {survival}: replay.drop_zero_variance is false in this recipe, so every "
            "rollout is stored; leave --survival out"
        )
    assumed = _NO_RECIPE
    if recipe is not None:
        expected = expected_of(recipe)
        assumed = {name: (getattr(expected, name), why) for name, why in expected.sources.items()}
    generated = recipe.rollouts_per_step if recipe and not estimates else None
    table: dict[str, tuple[Any, str]] = {
        #                  given, measured, assumed and why
        "mu": _choice(options.mu, seen.mu, *assumed["mu"]),
        "rho": _choice(options.rho, None, DEFAULT_RHO, "a run cannot tell"),
        "growth": _growth(options.growth, estimates),
        "survival": _choice(survival, seen.survival, *assumed["survival"]),
        "rollouts_per_step": _choice(
            generated, seen.rollouts_per_step, 256, "32 prompts of 8", given_by="from the recipe"
        ),
        "completion_tokens": _choice(None, seen.completion_tokens, *assumed["completion_tokens"]),
        "prompt_tokens": _choice(None, seen.prompt_tokens, *assumed["prompt_tokens"]),
    }
    measured = options.growth is None and bool(seen.growth_points)
    return PlanInputs(
        **{name: value for name, (value, _) in table.items()},
        sources={name: source for name, (_, source) in table.items()},
        growth_others=seen.growth_others if measured else (),
        growth_known=options.growth is not None or seen.growth_known,
        oldest_measured=max(age for age, _ in seen.growth_points) if measured else None,
        updates_per_step=recipe.draws_per_step if recipe else 1,
    )


def _growth(given: float | None, estimates: RunEstimates | None) -> tuple[Growth, str]:
    if given is not None:
        check_growth(given)
    measured: Growth | None = None
    if estimates is not None and estimates.growth_points:
        # A run that replayed and saw no growth measured a constant variance.
        measured = estimates.growth or RatioGrowth(0.0, 1.0)
    growth, source = _choice(
        None if given is None else PowerGrowth(given),
        measured,
        PowerGrowth(DEFAULT_GROWTH),
        "no rollouts replayed to measure it on" if estimates else "measure it with --from-run",
    )
    if estimates and growth is measured:
        ages = [age for age, _ in estimates.growth_points]
        source += f" on {estimates.growth_draws:,} draws of ages {min(ages)} to {max(ages)}"
        source += "" if estimates.growth_known else ": too few"
    return growth, source
