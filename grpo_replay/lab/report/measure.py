"""Computes the `Findings` of an experiment: every number of a report."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median

import numpy as np

from grpo_replay.errors import UsageError, did_you_mean
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.statistics import Interval, ProblemTable, problem_table
from grpo_replay.lab.report.collect import Arm, Experiment, chosen_keys, settings_of
from grpo_replay.lab.report.costs import (
    Axis,
    Pairs,
    axes,
    cost_to_reach,
    frontier,
    main_axis,
    measure_quantities,
    mu_of,
)
from grpo_replay.lab.report.finished_run import (
    FinishedRun,
    Outcome,
    evaluation_at,
)
from grpo_replay.lab.report.report_findings import (
    ArmFindings,
    Difference,
    EqualCost,
    Estimate,
    Findings,
    Reach,
    Score,
    Spread,
    Target,
)
from grpo_replay.lab.report.two_level import (
    EQUAL,
    accuracy_over_problems,
    accuracy_over_seeds,
    difference_over_problems,
    difference_over_seeds,
    median_interval,
    sign_flip_over_seeds,
    smallest_p_value,
)
from grpo_replay.storage.recipe_history import shareable

MEAN = Outcome()


def default_outcome(experiment: Experiment) -> Outcome:
    """The mean over benchmarks; the first of them if they differ in their samples or temperature,
    as paper B's pass@1 and pass@k do, whose mean would mix two quantities."""
    sampled = experiment.runs[0].final.sampled.benchmarks
    settings = experiment.runs[0].final.settings["benchmarks"]
    kinds = {(each.k, settings.get(name, {}).get("temperature")) for name, each in sampled.items()}
    return MEAN if len(kinds) == 1 else Outcome(next(iter(sampled)))


GAIN_SHARES = (0.5, 0.75, 0.9)
"""Default targets: shares of the way from the base to the baseline's median final accuracy."""


def measure(
    experiment: Experiment,
    targets: Sequence[float] = (),
    given_mu: Sequence[float] = (),
    outcome: Outcome | None = None,
) -> Findings:
    """The findings. `targets` are accuracies as fractions; default: `GAIN_SHARES`. The default
    outcome is `default_outcome`.

    Raises UsageError for a benchmark that was not evaluated.
    """
    first, outcome = experiment.runs[0].final, outcome or default_outcome(experiment)
    _refuse_unknown(outcome.benchmark, ["mean", *first.sampled.benchmarks])
    mu = measured_mu_of(experiment)
    costs = usable_axes(experiment, given_mu)
    main = main_axis(costs)
    trained = {arm.name: list(arm.runs.values()) for arm in experiment.arms if arm.recipe}
    targets = targets or default_targets(experiment.baseline, outcome)
    keys = chosen_keys(experiment.arms)
    benchmarks = tuple(first.sampled.benchmarks)
    described = first.settings["benchmarks"]
    return Findings(
        name=experiment.name,
        baseline=experiment.baseline.name,
        benchmarks=benchmarks,
        shown=outcome.benchmark,
        metric=outcome.metric,
        titles={name: described.get(name, {}).get("title", name) for name in benchmarks},
        graded_by=shareable(first.verifier),
        measured_mu=mu,
        given_mu=tuple(given_mu),
        axes={axis.key: axis.label for axis in costs},
        arms=tuple(
            _arm(arm, experiment.baseline, keys, costs, targets, outcome) for arm in experiment.arms
        ),
        notes=experiment.notes,
        tuned=experiment.tuned,
        main=None if main is None else main.key,
        frontier=() if main is None else tuple(frontier(trained, main, outcome)),
    )


def _refuse_unknown(benchmark: str, known: Sequence[str]) -> None:
    if benchmark not in known:
        raise UsageError(
            f"--benchmark {benchmark}: not evaluated{did_you_mean(benchmark, known)}; there are: "
            f"{', '.join(known)}"
        )


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


def default_targets(baseline: Arm, outcome: Outcome = MEAN) -> list[float]:
    """Accuracies on the way from the base to the baseline; none if it did not learn or has no
    evaluation of the base."""
    runs = list(baseline.runs.values())
    bases = [outcome.of(run.base) for run in runs if run.base is not None]
    if not bases:
        return []
    start = median(bases)
    gain = median(outcome.of(run.final) for run in runs) - start
    return [round(start + share * gain, 3) for share in GAIN_SHARES] if gain > 0 else []


def _arm(
    arm: Arm,
    baseline: Arm,
    keys: Sequence[str],
    costs: Sequence[Axis],
    targets: Sequence[float],
    outcome: Outcome,
) -> ArmFindings:
    runs = list(arm.runs.values())
    trained = [run for run in runs if run.recipe is not None]
    own = settings_of(arm.recipe)
    pairs = [(run, baseline.runs[s]) for s, run in arm.runs.items() if s in baseline.runs]
    others = [] if arm is baseline else pairs
    return ArmFindings(
        name=arm.name,
        seeds=tuple(arm.seeds),
        runs=len(runs),
        missing=arm.missing,
        settings={key: shareable(own[key]) for key in keys if key in own and _has_effect(arm, key)},
        scores=score_arm(runs, others) if runs else {},
        quantities=measure_quantities(runs, others, costs, outcome),
        targets=tuple(
            reach_target(each, trained, pairs, costs, outcome) for each in targets if trained
        ),
        equal_cost=_equal_costs(others, costs),
    )


def _has_effect(arm: Arm, key: str) -> bool:
    """False for the replay keys of an arm that does not replay, except the preset."""
    if arm.recipe is None or arm.recipe.replays:
        return True
    return key == "replay.preset" or not key.startswith("replay.")


def reach_target(
    accuracy: float,
    runs: Sequence[FinishedRun],
    pairs: Pairs,
    costs: Sequence[Axis],
    outcome: Outcome,
) -> Target:
    """The cost at which each run's outcome first reaches `accuracy`, summarised. "Not
    reached" is a result: an infinite cost."""
    reached = sum(max(run.curve(outcome)[1]) >= accuracy for run in runs)
    both = [(a, b) for a, b in pairs if b.recipe is not None]
    return Target(
        accuracy,
        reached,
        len(runs),
        {axis.key: _reach(accuracy, runs, both, axis, outcome) for axis in costs},
    )


def _reach(
    accuracy: float, runs: Sequence[FinishedRun], pairs: Pairs, axis: Axis, outcome: Outcome
) -> Reach:
    ordered = sorted(cost_to_reach(run, accuracy, axis, outcome) for run in runs)
    both = [[cost_to_reach(run, accuracy, axis, outcome) for run in pair] for pair in pairs]
    known = [(ours, theirs) for ours, theirs in both if np.isfinite([ours, theirs]).all()]
    ratios = [ours / theirs for ours, theirs in known if theirs > 0]
    return Reach(
        median=median(ordered),
        interval=median_interval(ordered),
        ratio=median(ratios) if ratios else None,
        ratio_seeds=len(ratios),
    )


SCORES = {"final": "avg_at_k", "final_pass_at_k": "pass_at_k"}

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
        means["mean"] = getattr(report.sampled.mean, key)
        tables = _problem_tables(report)
        if tables is None:
            return cls(means, None)
        column = "passed_N" if key == "pass_at_k" else "accuracy_N"
        return cls(means, {name: getattr(table, column) for name, table in tables.items()})

    def plus(self, other: "Accuracies", weight: float) -> "Accuracies":
        """self + weight · other."""
        means = {name: each + weight * other.means[name] for name, each in self.means.items()}
        if self.values is None or other.values is None:
            return Accuracies(means, None)
        return Accuracies(
            means, {name: each + weight * other.values[name] for name, each in self.values.items()}
        )


@cache
def _problem_tables(report: EvaluationReport) -> dict[str, ProblemTable] | None:
    """The problems of every benchmark; None without per-sample rows. Cached by identity."""
    if report.samples is None:
        return None
    return {name: problem_table(report.samples, name) for name in report.sampled.benchmarks}


def score_arm(runs: Sequence[FinishedRun], pairs: Pairs) -> dict[str, Score]:
    """The scores of an arm. `pairs` are with the baseline, and empty for the baseline itself."""
    over = accuracy_over_problems if runs[0].seed is None else accuracy_over_seeds
    found = {}
    for name, key in SCORES.items():
        own = [Accuracies.of(run.final, key) for run in runs]
        less = [Accuracies.of(a.final, key).plus(Accuracies.of(b.final, key), -1) for a, b in pairs]
        found[name] = Score(_estimates(own, over), _differences(pairs, less) if pairs else None)
    return found


def _estimates(runs: Sequence[Accuracies], interval_over: IntervalOver) -> dict[str, Estimate]:
    """One estimate per benchmark, and of `mean`."""
    found = {}
    for name in runs[0].means:
        each = tuple(run.means[name] for run in runs)
        spread = Spread.of(each)
        interval, over = interval_over(_by_benchmark(runs, name))
        found[name] = Estimate(
            spread.mean, spread.median, spread.low, spread.high, each, interval, over
        )
    return found


def _by_benchmark(runs: Sequence[Accuracies], name: str) -> list[np.ndarray]:
    """[S, N] of a benchmark, or of every one for `mean`; [S, 1] without per-sample rows."""
    known = [run.values for run in runs if run.values is not None]
    if len(known) == len(runs):
        benchmarks = list(known[0]) if name == "mean" else [name]
        return [np.array([each[benchmark] for each in known]) for benchmark in benchmarks]
    return [np.array([[run.means[name]] for run in runs])]


def _differences(pairs: Pairs, runs: Sequence[Accuracies]) -> dict[str, Difference]:
    """The arm minus the baseline, of every benchmark and `mean`; `runs` has that of each pair."""
    found = {}
    over = difference_over_problems if pairs[0][0].seed is None else difference_over_seeds
    for name, estimate in _estimates(runs, over).items():
        each_S = np.array([run.means[name] for run in runs])
        found[name] = Difference(
            **asdict(estimate),
            seeds=tuple(a.seed for a, _ in pairs if a.seed is not None),
            seeds_better=count_better(each_S),
            p_value=sign_flip_over_seeds(each_S),
            smallest_p_value=smallest_p_value(len(pairs)),
        )
    return found


def count_better(differences_S: np.ndarray) -> int:
    """In how many seeds the arm is better than its baseline."""
    return int((differences_S > EQUAL).sum())


FEWEST_EVALUATIONS = 4
"""Of a run, the base's included, to interpolate its accuracy at a cost: between fewer, a straight
line lies far below a curve that rises early."""


def _equal_costs(pairs: Pairs, costs: Sequence[Axis]) -> dict[str, EqualCost]:
    """avg@k of the arm minus the baseline's at equal cost, by axis; steps are not a cost."""
    usable = [
        pair
        for pair in pairs
        if all(run.base and len(run.evaluations) >= FEWEST_EVALUATIONS for run in pair)
    ]
    if not usable:
        return {}
    return {axis.key: equal_cost(usable, axis) for axis in costs if axis.key != "steps"}


def equal_cost(pairs: Pairs, axis: Axis) -> EqualCost:
    """What the arm is ahead when both runs of a pair have spent what the cheaper one spent."""
    spent, ahead = [], []
    for pair in pairs:
        cost = min(float(axis.total(run)[max(run.evaluations)]) for run in pair)
        ours, theirs = (accuracies_at(run, axis, cost) for run in pair)
        spent.append(cost)
        ahead.append(ours.plus(theirs, -1))
    return EqualCost(Spread.of(spent), _differences(pairs, ahead))


def accuracies_at(run: FinishedRun, axis: Axis, cost: float) -> Accuracies:
    """avg@k when the run had spent `cost`, interpolated linearly between its evaluations."""
    steps = sorted(run.evaluations)
    costs = axis.total(run)[steps]
    after = max(1, min(int(np.searchsorted(costs, cost)), len(steps) - 1))
    width = float(costs[after] - costs[after - 1]) or 1.0
    share = float(cost - costs[after - 1]) / width
    first, second = (
        Accuracies.of(evaluation_at(run, step), "avg_at_k") for step in steps[after - 1 : after + 1]
    )
    return first.plus(second.plus(first, -1), share)
