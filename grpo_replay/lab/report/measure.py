"""Computes every number of a report: the document that `--json` prints (docs/report.md), of which
the verdict, the table and the figures are views.

Accuracies and rates are fractions. `low` and `high` are always the quartiles over seeds, `interval`
is always a 95 % interval, and a cost that was not reached is infinite.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import numpy as np

from grpo_replay.errors import UsageError, did_you_mean
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.statistics import EQUAL, Interval, problem_table
from grpo_replay.lab.report.collect import Arm, Experiment
from grpo_replay.lab.report.costs import (
    GENERATED,
    Axis,
    Pairs,
    axes,
    break_even,
    cost_to_reach,
    course,
    frontier,
    main_axis,
    mu_of,
    rollouts_to_reach,
)
from grpo_replay.lab.report.finished_run import FinishedRun, Outcome, evaluation_at
from grpo_replay.lab.report.two_level import (
    accuracy_over_problems,
    accuracy_over_seeds,
    difference_over_problems,
    difference_over_seeds,
    seeds_to_tell,
    sign_flip_over_seeds,
)
from grpo_replay.storage.recipe_history import shareable
from grpo_replay.storage.rollout_log import mean_over_steps

Document = dict[str, Any]
FORMAT = 1

STEP_MEANS = {
    "clip_fraction_fresh": "fresh/clip_fraction",
    "clip_fraction_replayed": "replay/clip_fraction",
    "replay_ratio": "replay/ratio",
}
STEP_SUMS = {
    "generated_tokens": "cost/generated_tokens",
    "trained_tokens": "cost/trained_tokens",
    "training_seconds": "step_time",
}

GAIN_SHARES = (0.5, 0.75, 0.9)
"""Default targets: shares of the way from the base to the baseline's median final accuracy."""

FEWEST_EVALUATIONS = 4
"""Of a run, the base's included, to interpolate its accuracy at a cost: between fewer, a straight
line lies far below a curve that rises early."""


def default_outcome(experiment: Experiment, metric: str = "avg_at_k") -> Outcome:
    """The mean over benchmarks; the first of them if they differ in their samples or temperature,
    as paper B's pass@1 and pass@k do, whose mean would mix two quantities."""
    sampled = experiment.runs[0].final.sampled.benchmarks
    settings = experiment.runs[0].final.settings["benchmarks"]
    kinds = {(each.k, settings.get(name, {}).get("temperature")) for name, each in sampled.items()}
    return Outcome("mean" if len(kinds) == 1 else next(iter(sampled)), metric)


def measure(
    experiment: Experiment,
    targets: Sequence[float] = (),
    given_mu: Sequence[float] = (),
    outcome: Outcome | None = None,
) -> Document:
    """The document. `targets` are accuracies as fractions; default: `GAIN_SHARES`. The default
    outcome is `default_outcome`. Raises UsageError for a benchmark that was not evaluated."""
    first, outcome = experiment.runs[0].final, outcome or default_outcome(experiment)
    known = ["mean", *first.sampled.benchmarks]
    if outcome.benchmark not in known:
        raise UsageError(
            f"--benchmark {outcome.benchmark}: not evaluated"
            f"{did_you_mean(outcome.benchmark, known)}; there are: {', '.join(known)}"
        )
    costs = usable_axes(experiment, given_mu)
    main = main_axis(costs)
    targets = targets or default_targets(experiment.baseline, outcome)
    trained = {arm.name: list(arm.runs.values()) for arm in experiment.arms if arm.recipe}
    return {
        "format": FORMAT,
        "name": experiment.name,
        "baseline": experiment.baseline.name,
        "benchmarks": _titles(first),
        "shown": {"benchmark": outcome.benchmark, "metric": outcome.metric},
        "graded_by": shareable(first.verifier),
        "mu": {"measured": measured_mu_of(experiment), "given": list(given_mu)},
        "axes": {axis.key: axis.label for axis in costs},
        "main_axis": None if main is None else main.key,
        "equal_rollouts": _equal_rollouts(experiment),
        "notes": list(experiment.notes),
        "arms": [
            _arm(arm, experiment.baseline, costs, targets, outcome) for arm in experiment.arms
        ],
        "frontier": [] if main is None else frontier(trained, main, outcome),
    }


def _titles(report: EvaluationReport) -> dict[str, str]:
    described = report.settings["benchmarks"]
    return {name: described.get(name, {}).get("title", name) for name in report.sampled.benchmarks}


def measured_mu_of(experiment: Experiment) -> float | None:
    """The median over all runs of the μ that each measured; None if none did."""
    known = [mu for run in experiment.runs if (mu := mu_of(run)) is not None]
    return median(known) if known else None


def usable_axes(experiment: Experiment, given_mu: Sequence[float]) -> list[Axis]:
    """The costs that every run logged."""
    trained = [run for run in experiment.runs if run.recipe is not None]
    machines = [run.recipe.replay.machines for run in trained if run.recipe]
    of_machines = median(mu) if (mu := [each.mu for each in machines if each]) else None
    return [
        axis
        for axis in axes(measured_mu_of(experiment), given_mu, of_machines)
        if trained and all(np.isfinite(axis.total(run)[-1]) for run in trained)
    ]


def default_targets(baseline: Arm, outcome: Outcome) -> list[float]:
    """Accuracies on the way from the base to the baseline; none if it did not learn or has no
    evaluation of the base."""
    runs = list(baseline.runs.values())
    bases = [outcome.of(run.base) for run in runs if run.base is not None]
    if not bases:
        return []
    start = median(bases)
    gain = median(outcome.of(run.final) for run in runs) - start
    return [round(start + share * gain, 3) for share in GAIN_SHARES] if gain > 0 else []


def _equal_rollouts(experiment: Experiment) -> bool:
    """Whether all runs generated as many rollouts, so that final accuracies are at equal ones."""
    return len({int(GENERATED.total(run)[-1]) for run in experiment.runs if run.recipe}) == 1


def _arm(
    arm: Arm, baseline: Arm, costs: Sequence[Axis], targets: Sequence[float], outcome: Outcome
) -> Document:
    runs = list(arm.runs.values())
    trained = [run for run in runs if run.recipe is not None]
    shared = [(run, baseline.runs[s]) for s, run in arm.runs.items() if s in baseline.runs]
    pairs = [] if arm is baseline else shared
    final = [_final(run, outcome) for run in runs]
    over = accuracy_over_problems if runs and runs[0].seed is None else accuracy_over_seeds
    ahead = [_final(a, outcome).plus(_final(b, outcome), -1) for a, b in pairs]
    return {
        "name": arm.name,
        "seeds": arm.seeds,
        "missing": [{"seed": seed, "reason": why} for seed, why in arm.missing.items()],
        "tuned": arm.tuned,
        "final": estimates(final, over) if final else None,
        "difference": differences(pairs, ahead) if pairs else None,
        "quantities": quantities(runs, costs, outcome),
        "equal_cost": _equal_costs(pairs, costs, outcome),
        "reach": [
            reach_target(each, trained, shared, costs, outcome) for each in targets if trained
        ],
    }


def _final(run: FinishedRun, outcome: Outcome) -> "Accuracies":
    return Accuracies.of(run.final, outcome.metric)


def spread(values: Sequence[float]) -> Document:
    """Mean, median and quartiles over seeds."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"mean": float(np.mean(values)), "median": middle, "low": low, "high": high}


def quantities(
    runs: Sequence[FinishedRun], costs: Sequence[Axis], outcome: Outcome
) -> dict[str, Document]:
    """Spreads over the `runs` that have a quantity; one that no run has is left out."""
    trained = [run for run in runs if run.recipe is not None]
    found: dict[str, Sequence[float | None]] = {
        "tokens": [run.final.sampled.mean.mean_tokens for run in runs],
        "truncation_rate": [run.final.sampled.mean.truncation_rate for run in runs],
        "wall_seconds": [run.wall_seconds for run in trained],
        "mu": [mu_of(run) for run in trained],
        "base": [outcome.of(run.base) if run.base else None for run in trained],
    }
    for name, metric in STEP_MEANS.items():
        found[name] = [mean_over_steps(metric, run.log.lines) for run in trained]
    for name, metric in STEP_SUMS.items():
        totals = [float(run.log.running_total(metric)[-1]) for run in trained]
        found[name] = [None if np.isnan(total) else total for total in totals]
    for axis in costs:
        if axis.key.startswith("compute"):
            found[axis.key] = [float(axis.total(run)[-1]) for run in trained]
    main = main_axis(costs)
    found |= {} if main is None else course(trained, main, outcome)
    return {
        name: {**spread(known), "runs": len(known)}
        for name, values in found.items()
        if (known := [value for value in values if value is not None])
    }


def reach_target(
    accuracy: float,
    runs: Sequence[FinishedRun],
    pairs: Pairs,
    costs: Sequence[Axis],
    outcome: Outcome,
) -> Document:
    """The cost at which each run's outcome first reaches `accuracy`: medians over seeds, and its
    ratio to the baseline's at the seeds in which both reached it."""
    both = [(a, b) for a, b in pairs if b.recipe is not None]
    others = [(a, b) for a, b in both if a is not b]
    found = {}
    for axis in costs:
        own = [cost_to_reach(run, accuracy, axis, outcome) for run in runs]
        spent = [[cost_to_reach(run, accuracy, axis, outcome) for run in pair] for pair in both]
        known = [(ours, theirs) for ours, theirs in spent if np.isfinite([ours, theirs]).all()]
        ratios = [ours / theirs for ours, theirs in known if theirs > 0]
        ratio = median(ratios) if ratios else None
        found[axis.key] = {"median": median(own), "ratio": ratio, "ratio_seeds": len(ratios)}
    return {
        "accuracy": accuracy,
        "reached": sum(max(run.curve(outcome)[1]) >= accuracy for run in runs),
        "runs": len(runs),
        "costs": found,
        "break_even": break_even(rollouts_to_reach(others, accuracy, outcome)),
    }


IntervalOver = Callable[[Sequence[np.ndarray]], tuple[Interval | None, str | None]]
"""An interval of the mean of one [S, N] per benchmark, and what it is over."""


@dataclass(frozen=True, slots=True)
class Accuracies:
    """Of a run, or differences of two runs: of every benchmark and `mean`, and on every problem,
    [N] by benchmark (None without per-sample rows)."""

    means: dict[str, float]
    values: dict[str, np.ndarray] | None

    @classmethod
    def of(cls, report: EvaluationReport, key: str) -> "Accuracies":
        """`key` is `avg_at_k` or `pass_at_k`."""
        means = {name: getattr(each, key) for name, each in report.sampled.benchmarks.items()}
        return cls({**means, "mean": getattr(report.sampled.mean, key)}, _on_problems(report, key))

    def plus(self, other: "Accuracies", weight: float) -> "Accuracies":
        """self + weight · other."""
        means = {name: each + weight * other.means[name] for name, each in self.means.items()}
        if self.values is None or other.values is None:
            return Accuracies(means, None)
        return Accuracies(
            means, {name: each + weight * other.values[name] for name, each in self.values.items()}
        )


@cache
def _on_problems(report: EvaluationReport, key: str) -> dict[str, np.ndarray] | None:
    """[N] of every benchmark; None without per-sample rows. Cached by the report's identity."""
    if report.samples is None:
        return None
    tables = {name: problem_table(report.samples, name) for name in report.sampled.benchmarks}
    column = "passed_N" if key == "pass_at_k" else "accuracy_N"
    return {name: getattr(table, column) for name, table in tables.items()}


def estimates(runs: Sequence[Accuracies], interval_over: IntervalOver) -> dict[str, Document]:
    """Of every benchmark and `mean`: the spread over seeds and the interval of the mean."""
    found = {}
    for name in runs[0].means:
        values = [run.means[name] for run in runs]
        interval, over = interval_over(_by_benchmark(runs, name))
        found[name] = {
            **spread(values), "values": values, "interval": interval, "interval_over": over,
        }  # fmt: skip
    return found


def _by_benchmark(runs: Sequence[Accuracies], name: str) -> list[np.ndarray]:
    """[S, N] of a benchmark, or of every one for `mean`; [S, 1] without per-sample rows."""
    known = [run.values for run in runs if run.values is not None]
    if len(known) == len(runs):
        benchmarks = list(known[0]) if name == "mean" else [name]
        return [np.array([each[benchmark] for each in known]) for benchmark in benchmarks]
    return [np.array([[run.means[name]] for run in runs])]


def differences(pairs: Pairs, runs: Sequence[Accuracies]) -> dict[str, Document]:
    """The arm minus the baseline, of every benchmark and `mean`, with a test over seeds; `runs` has
    that of each pair."""
    seeds = [a.seed for a, _ in pairs if a.seed is not None]
    found = estimates(runs, difference_over_seeds if seeds else difference_over_problems)
    for name, each in found.items():
        values_S = np.array(each["values"])
        each |= {
            "seeds": seeds,
            "seeds_better": count_better(values_S),
            "p_value": sign_flip_over_seeds(values_S),
            "seeds_to_tell": seeds_to_tell(_by_benchmark(runs, name)) if seeds else None,
        }
    return found


def count_better(differences_S: np.ndarray) -> int:
    """In how many seeds the arm is better than its baseline."""
    return int((differences_S > EQUAL).sum())


def _equal_costs(pairs: Pairs, costs: Sequence[Axis], outcome: Outcome) -> dict[str, Document]:
    """By axis, the accuracy of the arm minus the baseline's when both runs of a pair have spent
    what the cheaper one spent in all. Steps are not a cost."""
    usable = [
        pair
        for pair in pairs
        if all(run.base and len(run.evaluations) >= FEWEST_EVALUATIONS for run in pair)
    ]
    return {
        axis.key: _equal_cost(usable, axis, outcome.metric)
        for axis in costs
        if usable and axis.key != "steps"
    }


def _equal_cost(pairs: Pairs, axis: Axis, metric: str) -> Document:
    spent, ahead = [], []
    for pair in pairs:
        cost = min(float(axis.total(run)[max(run.evaluations)]) for run in pair)
        ours, theirs = (accuracies_at(run, axis, cost, metric) for run in pair)
        spent.append(cost)
        ahead.append(ours.plus(theirs, -1))
    return {"spent": {**spread(spent), "runs": len(spent)}, "difference": differences(pairs, ahead)}


def accuracies_at(run: FinishedRun, axis: Axis, cost: float, metric: str) -> Accuracies:
    """When the run had spent `cost`, interpolated linearly between its evaluations."""
    steps = sorted(run.evaluations)
    costs = axis.total(run)[steps]
    after = max(1, min(int(np.searchsorted(costs, cost)), len(steps) - 1))
    width = float(costs[after] - costs[after - 1]) or 1.0
    share = float(cost - costs[after - 1]) / width
    first, second = (
        Accuracies.of(evaluation_at(run, step), metric) for step in steps[after - 1 : after + 1]
    )
    return first.plus(second.plus(first, -1), share)
