"""`grpo-replay plan`: how long to keep rollouts, and how often to train on them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo_replay.errors import UsageError
from grpo_replay.lab.dry_run.assumptions import COST_RATIO, expected_of
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.curves import plot_curves
from grpo_replay.lab.planning.design import PlanInputs, make_plan
from grpo_replay.lab.planning.estimate import RunEstimates, estimate_from_run, refuse_unknown_mu
from grpo_replay.lab.planning.machines import (
    all_splits,
    print_splits,
    split_document,
    split_machines,
)
from grpo_replay.lab.planning.plan_panels import plan_document, print_plan
from grpo_replay.lab.planning.plot import plot_plan
from grpo_replay.lab.planning.theory import (
    Growth,
    PowerGrowth,
    RatioGrowth,
    check_growth,
    check_inputs,
    cost_ratio_from_counts,
)
from grpo_replay.recipe import Recipe, load_recipe
from grpo_replay.terminal.console import open_console
from grpo_replay.terminal.plot_style import check_plot_path

DEFAULT_MU = COST_RATIO["Qwen2.5-7B"]
DEFAULT_RHO = 0.1
DEFAULT_GROWTH = 0.2

_NO_RECIPE: Mapping[str, tuple[float, str]] = {
    "mu": (DEFAULT_MU, "paper B's 7B model"),
    "survival": (1.0, "no group is dropped"),
    "completion_tokens": (1000.0, "half of 2,000"),
    "prompt_tokens": (128.0, "typical"),
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The command line of `plan`; None where an option was not given."""

    recipe: str | None = None
    from_run: str | None = None
    overrides: tuple[str, ...] = ()
    mu: float | None = None
    rho: float | None = None
    growth: float | None = None
    survival: float | None = None
    workers: int | None = None
    trainers: int | None = None
    generated: int | None = None
    trained: int | None = None
    plot: str | None = None
    curves: str | None = None
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """One parameter: a given value precedes a measured one, which precedes the assumed one."""

    given: T | None
    measured: T | None
    assumed: T
    why: str  # the reason for the assumed value
    given_by: str = "given"

    @property
    def value(self) -> T:
        if self.given is not None:
            return self.given
        return self.assumed if self.measured is None else self.measured

    @property
    def source(self) -> str:
        """The origin of the value, in words."""
        if self.given is not None:
            return self.given_by
        return f"assumed: {self.why}" if self.measured is None else "measured in the run"


def run_command(options: PlanOptions) -> None:
    """Print the plan, print γ by machines, or write the curves, as the options say."""
    o = options
    if o.curves is not None:
        run_curves(o.curves, {
            "RECIPE": o.recipe, "--from-run": o.from_run, "--set": o.overrides, "--mu": o.mu,
            "--rho": o.rho, "--growth": o.growth, "--survival": o.survival,
            "--workers": o.workers, "--plot": o.plot,
        })  # fmt: skip
    elif any(each is not None for each in (o.workers, o.trainers, o.generated, o.trained)):
        run_machines(
            o.recipe, o.from_run, o.overrides, workers=o.workers, trainers=o.trainers,
            generated=o.generated, trained=o.trained, mu=o.mu, as_json=o.as_json,
            ignored={"rho": o.rho, "growth": o.growth, "survival": o.survival, "plot": o.plot},
        )  # fmt: skip
    else:
        run(
            o.recipe, o.from_run, o.overrides, mu=o.mu, rho=o.rho, growth=o.growth,
            survival=o.survival, plot=o.plot, as_json=o.as_json,
        )  # fmt: skip


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
    """Print the plan. Raises UsageError for missing or contradictory options."""
    _check_options(recipe, from_run, overrides, mu)
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
        print_plan(plan, open_console(markup=True))


def _check_options(
    recipe: str | None, from_run: str | None, overrides: tuple[str, ...], mu: float | None
) -> None:
    if recipe is not None and from_run is not None:
        raise UsageError(
            "plan takes a RECIPE or --from-run DIR, not both: a run's own recipe is used"
        )
    if recipe is None and from_run is None and mu is None:
        raise UsageError(
            "plan needs a RECIPE, --from-run DIR, or --mu (with --rho and --growth); for example "
            "grpo-replay plan --mu 5.28 --rho 0.1 --growth 0.2"
        )
    if overrides and recipe is None:
        why = "--from-run uses the run's own recipe" if from_run else "there is no RECIPE to change"
        raise UsageError(f"plan --set {overrides[0]}: {why}; name a RECIPE, or leave --set out")


def run_curves(path: str, ignored: Mapping[str, Any] | None = None) -> None:
    """Write figures of the optimum over the theory's parameters.

    Raises UsageError for another file type, and if one of the `ignored` options has a value.
    """
    for name, value in (ignored or {}).items():
        if value:
            raise UsageError(f"plan --curves covers all μ, a and ρ: leave {name} out")
    check_plot_path(Path(path), (".png", ".svg"))
    plot_curves(Path(path))


def run_machines(
    recipe: str | None = None,
    from_run: str | None = None,
    overrides: tuple[str, ...] = (),
    *,
    workers: int | None,
    trainers: int | None,
    generated: int | None = None,
    trained: int | None = None,
    mu: float | None = None,
    as_json: bool = False,
    ignored: Mapping[str, Any] | None = None,
) -> None:
    """Print γ for every split of W + T machines into workers and trainers.

    Raises UsageError for missing or contradictory options, and if one of the `ignored` options,
    on which γ does not depend, has a value.
    """
    _check_machine_options(workers, trainers, generated, trained, mu, ignored or {})
    assert workers is not None and trainers is not None
    resolved, estimates = _read(recipe, from_run, overrides)
    source = "given"
    if generated is not None and trained is not None:
        mu = cost_ratio_from_counts(trained, generated, workers, trainers)
        source = f"({trained:,}/{trainers})/({generated:,}/{workers})"
    elif mu is None:
        inputs = _inputs(resolved, estimates, None, None, None, None)
        mu, source = inputs.mu, inputs.sources["mu"]
    check_inputs(mu, DEFAULT_RHO)
    buffer = _buffer_of(resolved)
    asked = split_machines(mu, workers, trainers, *buffer)
    splits = all_splits(mu, workers + trainers, *buffer)
    if as_json:
        document = split_document(mu, source, asked, splits)
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_splits(mu, source, asked, splits, open_console(markup=True))


def _check_machine_options(
    workers: int | None,
    trainers: int | None,
    generated: int | None,
    trained: int | None,
    mu: float | None,
    ignored: Mapping[str, Any],
) -> None:
    for name, value in ignored.items():
        if value is not None:
            raise UsageError(
                f"plan --{name} {value}: γ by workers and trainers does not depend on it; leave it "
                "out, or leave --workers and --trainers out"
            )
    if workers is None or trainers is None:
        raise UsageError("plan: --workers and --trainers are given together (paper B's W and T)")
    if (generated is None) != (trained is None):
        raise UsageError("plan: --generated and --trained are given together (K_gen and K_train)")
    if mu is not None and generated is not None:
        raise UsageError("plan: μ comes from --mu or from --generated and --trained, not from both")


def _buffer_of(recipe: Recipe | None) -> tuple[int | None, float | None]:
    """N and the rollouts per update of a FIFO recipe; None for other recipes."""
    if recipe is None or not recipe.replays or recipe.replay.composition != "buffer_only":
        return None, None
    drawn = recipe.replay.ratio * recipe.rollouts_per_step
    return recipe.replay.capacity_rollouts, drawn / recipe.batch.updates_of(drawn)


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
    """The parameters of the plan, each with its origin."""
    seen = estimates or RunEstimates()
    refuse_unknown_mu(estimates, mu)
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
    table: dict[str, Choice[Any]] = {
        #                  given, measured, assumed and why
        "mu": Choice(mu, seen.mu, *assumed["mu"]),
        "rho": Choice(rho, None, DEFAULT_RHO, "a run cannot tell"),
        "growth": _growth(growth, estimates),
        "survival": Choice(survival, seen.survival, *assumed["survival"]),
        "rollouts_per_step": Choice(
            generated, seen.rollouts_per_step, 256, "32 prompts of 8", given_by="from the recipe"
        ),
        "completion_tokens": Choice(None, seen.completion_tokens, *assumed["completion_tokens"]),
        "prompt_tokens": Choice(None, seen.prompt_tokens, *assumed["prompt_tokens"]),
    }
    return PlanInputs(
        **{name: choice.value for name, choice in table.items()},
        composition=recipe.replay.composition if recipe else "buffer_only",
        sources={name: choice.source for name, choice in table.items()},
    )


def _growth(given: float | None, estimates: RunEstimates | None) -> Choice[Growth]:
    if given is not None:
        check_growth(given)
    measured: Growth | None = None
    if estimates is not None and estimates.growth_points:
        # A run that replayed and saw no growth measured a constant variance.
        measured = estimates.growth or RatioGrowth(0.0, 1.0)
    return Choice(
        None if given is None else PowerGrowth(given),
        measured,
        PowerGrowth(DEFAULT_GROWTH),
        "no rollouts replayed to measure it on" if estimates else "measure it with --from-run",
    )
