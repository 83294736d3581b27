"""Computes every number of a report: the document that `--json` prints (docs/report.md). Verdict,
table and figures are views of it.

Accuracies and rates are fractions. `low` and `high` are always the quartiles over seeds, `interval`
is always a 95 % interval, and a cost that was not reached is infinite.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import numpy as np

from grpo_replay.errors import UsageError
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.statistics import EQUAL, Interval, problem_table
from grpo_replay.lab.planning.estimate import measured_mu
from grpo_replay.lab.report.collect import Arm, Experiment
from grpo_replay.lab.report.costs import (
    FEWEST_EVALUATIONS,
    GENERATED,
    Axis,
    Pairs,
    break_even,
    cost_to_reach,
    course,
    frontier,
    main_axis,
    measured_mu_of,
    rollouts_to_reach,
    usable_axes,
)
from grpo_replay.lab.report.finished_run import FinishedRun, Outcome, evaluation_at
from grpo_replay.lab.report.two_level import (
    sampled_over,
    seeds_to_tell,
    two_level_accuracy_interval,
    two_level_difference_interval,
)
from grpo_replay.storage.stored_recipe import shareable

Document = dict[str, Any]

STEP_SUMS = {
    "generated_tokens": "cost/generated_tokens",
    "trained_tokens": "cost/trained_tokens",
    "training_seconds": "step_time",
}

GAIN_SHARES = (0.5, 0.75, 0.9)
"""Default targets: shares of the way from the base to the baseline's median final accuracy."""

FEW_EVALUATIONS = (
    f"no cost to an accuracy of {{}}: a run has fewer than {FEWEST_EVALUATIONS} evaluations, the "
    "base's included (eval.every_steps)"
)


def default_outcome(experiment: Experiment, metric: str = "avg_at_k") -> Outcome:
    """Return the outcome to show: the mean over benchmarks; the first benchmark if they differ in
    samples or temperature, as paper B's pass@1 and pass@k do: their mean would mix quantities."""
    sampled = experiment.runs[0].final.sampled.benchmarks
    settings = experiment.runs[0].final.settings["benchmarks"]
    kinds = {(bench.k, settings.get(name, {}).get("temperature"))
             for name, bench in sampled.items()}  # fmt: skip
    return Outcome("mean" if len(kinds) == 1 else next(iter(sampled)), metric)


def measure(
    experiment: Experiment,
    targets: Sequence[float] = (),
    given_mu: Sequence[float] = (),
    outcome: Outcome | None = None,
) -> Document:
    """Compute the report's document: what each arm reached, at which cost, against the baseline.
    `targets` are accuracies as fractions; default: `GAIN_SHARES`. `outcome` is by default
    `default_outcome`. Raises UsageError for an unknown benchmark."""
    first, outcome = experiment.runs[0].final, outcome or default_outcome(experiment)
    known = ["mean", *first.sampled.benchmarks]
    if outcome.benchmark not in known:
        raise UsageError(
            f"--benchmark {outcome.benchmark}: not evaluated; there are: {', '.join(known)}"
        )
    costs = usable_axes(experiment.runs, given_mu)
    main = main_axis(costs)
    targets = targets or default_targets(experiment.baseline, outcome)
    coarse = [arm.name for arm in experiment.arms if _is_coarse(arm)]
    few = [FEW_EVALUATIONS.format(", ".join(coarse))] if coarse else []
    runs = {arm.name: list(arm.runs.values()) for arm in experiment.arms}
    return {
        "name": experiment.name,
        "baseline": experiment.baseline.name,
        "benchmarks": _titles(first),
        "shown": {"benchmark": outcome.benchmark, "metric": outcome.metric},
        "graded_by": shareable(first.verifier),
        "mu": {"measured": measured_mu_of(experiment.runs), "given": list(given_mu)},
        "axes": {axis.key: axis.label for axis in costs},
        "main_axis": main.key,
        "equal_rollouts": len({GENERATED.total(run)[-1] for run in experiment.runs}) == 1,
        "notes": [*experiment.notes, *few],
        "arms": [
            _arm(arm, experiment.baseline, costs, targets, outcome) for arm in experiment.arms
        ],
        "frontier": frontier(runs, main, outcome),
    }


def _titles(report: EvaluationReport) -> dict[str, str]:
    described = report.settings["benchmarks"]
    return {name: described.get(name, {}).get("title", name) for name in report.sampled.benchmarks}


def shown_title(document: Document) -> str:
    """Returns the title of the outcome shown, such as `avg@k, mean over benchmarks`."""
    titles, shown = document["benchmarks"], document["shown"]
    several = shown["benchmark"] == "mean" and len(titles) > 1
    name = next(iter(titles)) if shown["benchmark"] == "mean" else shown["benchmark"]
    subject = "mean over benchmarks" if several else titles[name]
    return f"{shown['metric'].replace('_at_', '@')}, {subject}"


def shown_target(document: Document) -> float | None:
    """Returns the accuracy whose cost tables and figures show; None without a target."""
    return next((arm["reach"][-1]["accuracy"] for arm in document["arms"] if arm["reach"]), None)


def default_targets(baseline: Arm, outcome: Outcome) -> list[float]:
    """Return accuracies between those of base model and baseline; empty if nothing was learnt."""
    runs = list(baseline.runs.values())
    bases = [outcome.of(run.base) for run in runs if run.base is not None]
    if not bases:
        return []
    start = median(bases)
    gain = median(outcome.of(run.final) for run in runs) - start
    return [round(start + share * gain, 3) for share in GAIN_SHARES] if gain > 0 else []


def _is_coarse(arm: Arm) -> bool:
    return any(len(run.evaluations) < FEWEST_EVALUATIONS for run in arm.runs.values())


def _arm(
    arm: Arm, baseline: Arm, costs: Sequence[Axis], targets: Sequence[float], outcome: Outcome
) -> Document:
    """Compute an arm's part of the document; differences and equal costs are against the baseline.
    Costs to targets are left out if evaluations are too few to interpolate."""
    runs = list(arm.runs.values())
    shared = arm.paired_with(baseline)
    pairs = [] if arm is baseline else shared
    targets = [] if _is_coarse(arm) or _is_coarse(baseline) else targets
    metric = outcome.metric
    final = [Accuracies.of(run.final, metric) for run in runs]
    gains = [
        Accuracies.of(run.final, metric).plus(Accuracies.of(other.final, metric), -1)
        for run, other in pairs
    ]
    return {
        "name": arm.name,
        "seeds": list(arm.runs),
        "missing": [{"seed": seed, "reason": why} for seed, why in arm.missing.items()],
        "tuned": arm.tuned,
        "final": estimates(final, two_level_accuracy_interval) if final else None,
        "difference": differences(pairs, gains) if pairs else None,
        "quantities": quantities(runs, costs, outcome),
        "equal_cost": _equal_costs(pairs, costs, outcome),
        "reach": [reach_target(target, runs, shared, costs, outcome) for target in targets if runs],
    }


def spread(values: Sequence[float]) -> Document:
    """Mean, median and quartiles over seeds."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"mean": float(np.mean(values)), "median": middle, "low": low, "high": high}


def quantities(
    runs: Sequence[FinishedRun], costs: Sequence[Axis], outcome: Outcome
) -> dict[str, Document]:
    """Compute the spread of each quantity over the runs that have it, such as μ, seconds and total
    tokens; one that no run has is left out."""
    columns: dict[str, Sequence[float | None]] = {
        "wall_seconds": [run.wall_seconds for run in runs],
        "mu": [measured_mu(run.lines) for run in runs],
        "base": [outcome.of(run.base) if run.base else None for run in runs],
    }
    for name, metric in STEP_SUMS.items():
        totals = [float(run.running_total(metric)[-1]) for run in runs]
        columns[name] = [None if np.isnan(total) else total for total in totals]
    for axis in costs:
        if axis.key.startswith("compute"):
            columns[axis.key] = [float(axis.total(run)[-1]) for run in runs]
    columns |= course(runs, main_axis(costs), outcome)
    return {
        name: {**spread(known), "runs": len(known)}
        for name, values in columns.items()
        if (known := [value for value in values if value is not None])
    }


def reach_target(
    accuracy: float,
    runs: Sequence[FinishedRun],
    pairs: Pairs,
    costs: Sequence[Axis],
    outcome: Outcome,
) -> Document:
    """Compute the cost at which the runs' outcome first reaches `accuracy`: the median over seeds,
    and the ratio to the baseline's cost over the seeds in which both reached it."""
    other_pairs = [(a, b) for a, b in pairs if a is not b]
    cost_by_axis = {}
    for axis in costs:
        spent = [cost_to_reach(run, accuracy, axis, outcome) for run in runs]
        paired = [[cost_to_reach(run, accuracy, axis, outcome) for run in pair] for pair in pairs]
        ratios = [ours / base for ours, base in paired if np.isfinite([ours, base]).all() and base]
        ratio = median(ratios) if ratios else None
        cost_by_axis[axis.key] = {
            "median": median(spent), "ratio": ratio, "ratio_seeds": len(ratios),
        }  # fmt: skip
    return {
        "accuracy": accuracy,
        "reached": sum(max(run.curve(outcome)[1]) >= accuracy for run in runs),
        "runs": len(runs),
        "costs": cost_by_axis,
        "break_even": break_even(rollouts_to_reach(other_pairs, accuracy, outcome)),
    }


@dataclass(frozen=True, slots=True)
class Accuracies:
    """The accuracies of a run, or the differences of two runs: `means` by benchmark and `mean`;
    `values` [N] on every problem, by benchmark (None without per-sample rows)."""

    means: dict[str, float]
    values: dict[str, np.ndarray] | None

    @classmethod
    def of(cls, report: EvaluationReport, key: str) -> "Accuracies":
        """Returns the accuracies of an evaluation; `key` is `avg_at_k` or `pass_at_k`."""
        means = {name: getattr(bench, key) for name, bench in report.sampled.benchmarks.items()}
        return cls({**means, "mean": getattr(report.sampled.mean, key)}, _on_problems(report, key))

    def plus(self, other: "Accuracies", weight: float) -> "Accuracies":
        """self + weight · other."""
        means = {name: mean + weight * other.means[name] for name, mean in self.means.items()}
        if self.values is None or other.values is None:
            return Accuracies(means, None)
        values = {name: own_N + weight * other.values[name] for name, own_N in self.values.items()}
        return Accuracies(means, values)


@cache
def _on_problems(report: EvaluationReport, key: str) -> dict[str, np.ndarray] | None:
    """Computes the accuracy on every problem, [N] by benchmark; None without per-sample rows.
    Cached by the report's identity."""
    if report.samples is None:
        return None
    tables = {name: problem_table(report.samples, name) for name in report.sampled.benchmarks}
    column = "passed_N" if key == "pass_at_k" else "accuracy_N"
    return {name: getattr(table, column) for name, table in tables.items()}


def estimates(
    runs: Sequence[Accuracies],
    interval_of: Callable[[Sequence[np.ndarray]], Interval | None],
) -> dict[str, Document]:
    """Compute the spread over seeds, and the interval of the mean, of `runs`: accuracies or
    differences, one for each seed. Keys are the benchmarks, and `mean` for the mean over them."""
    by_name = {}
    for name in runs[0].means:
        values, values_SN = [run.means[name] for run in runs], _by_benchmark(runs, name)
        by_name[name] = {
            **spread(values), "values": values, "interval": interval_of(values_SN),
            "interval_over": sampled_over(values_SN),
        }  # fmt: skip
    return by_name


def _by_benchmark(runs: Sequence[Accuracies], name: str) -> list[np.ndarray]:
    """Returns values [S, N] of a benchmark, of each for `mean`; [S, 1] without per-sample rows."""
    known = [run.values for run in runs if run.values is not None]
    if len(known) == len(runs):
        benchmarks = list(known[0]) if name == "mean" else [name]
        return [np.array([values[benchmark] for values in known]) for benchmark in benchmarks]
    return [np.array([[run.means[name]] for run in runs])]


def differences(pairs: Pairs, runs: Sequence[Accuracies]) -> dict[str, Document]:
    """Summarise arm minus baseline, by benchmark and `mean`; `runs` are the pairs' differences."""
    by_name = estimates(runs, two_level_difference_interval)
    for name, estimate in by_name.items():
        estimate |= {
            "seeds": [run.seed for run, _ in pairs],
            "seeds_better": sum(value > EQUAL for value in estimate["values"]),
            "seeds_to_tell": seeds_to_tell(_by_benchmark(runs, name)),
        }
    return by_name


def _equal_costs(pairs: Pairs, costs: Sequence[Axis], outcome: Outcome) -> dict[str, Document]:
    """Compares arm and baseline at equal cost, by axis: when both runs of a pair have spent the
    total of the cheaper one. Steps are not a cost; runs with few evaluations are left out."""
    usable = [
        pair
        for pair in pairs
        if all(run.base and len(run.evaluations) >= FEWEST_EVALUATIONS for run in pair)
    ]
    return {
        axis.key: equal_cost(usable, axis, outcome.metric)
        for axis in costs
        if usable and axis.key != "steps"
    }


def equal_cost(pairs: Pairs, axis: Axis, metric: str) -> Document:
    """Compares pairs at equal cost on one axis: what was spent, and the difference by benchmark and
    `mean`, as `differences` has it."""
    spent, gains = [], []
    for pair in pairs:
        cost = min(float(axis.total(run)[max(run.evaluations)]) for run in pair)
        ours, base = (accuracies_at(run, axis, cost, metric) for run in pair)
        spent.append(cost)
        gains.append(ours.plus(base, -1))
    return {"spent": {**spread(spent), "runs": len(spent)}, "difference": differences(pairs, gains)}


def accuracies_at(run: FinishedRun, axis: Axis, cost: float, metric: str) -> Accuracies:
    """Interpolate the accuracies of a run when it had spent `cost` linearly between evaluations."""
    steps = sorted(run.evaluations)
    position = float(np.interp(cost, axis.total(run)[steps], np.arange(len(steps))))
    before = min(int(position), len(steps) - 2)
    first, second = (
        Accuracies.of(evaluation_at(run, step), metric) for step in steps[before : before + 2]
    )
    return first.plus(second.plus(first, -1), position - before)
