"""Accuracies of an arm over seeds, by benchmark, and their paired differences to the baseline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache

import numpy as np

from grpo_replay.evaluation.aggregate import ProblemTable, problem_table
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.results import Interval
from grpo_replay.lab.report.finished_run import FinishedRun
from grpo_replay.lab.report.report_findings import Difference, Estimate, Score, Spread
from grpo_replay.lab.report.two_level import (
    accuracy_over_problems,
    accuracy_over_seeds,
    difference_over_problems,
    difference_over_seeds,
    sign_flip_over_seeds,
    smallest_p_value,
)

SCORES = ("final", "final_pass_at_k", "best", "best_pass_at_k")

Pairs = Sequence[tuple[FinishedRun, FinishedRun]]
"""(the arm's run, the baseline's run) of every common seed."""

IntervalOver = Callable[[Sequence[np.ndarray]], tuple[Interval | None, str | None]]
"""An interval of the mean of one [S, N] per benchmark, and what it is over."""

ProblemValues = Sequence[Mapping[str, np.ndarray] | None]
"""Of every run, [N] by benchmark; None without per-sample rows."""


def score_arm(runs: Sequence[FinishedRun], pairs: Pairs) -> dict[str, Score]:
    """The scores of an arm. `pairs` are with the baseline, and empty for the baseline itself.

    Evaluation files have no best step, and so no `best`.
    """
    found = {}
    for name in SCORES:
        if any(_report(run, name) is None for run in runs):
            continue
        usable = [pair for pair in pairs if _report(pair[1], name) is not None]
        values = [_values(run, name) for run in runs]
        over = accuracy_over_problems if runs[0].seed is None else accuracy_over_seeds
        found[name] = Score(
            _estimates(values, [_means(run, name) for run in runs], over),
            _differences(usable, name) if usable else None,
        )
    return found


def _report(run: FinishedRun, score: str) -> EvaluationReport | None:
    return run.final if score.startswith("final") else run.best


def _means(run: FinishedRun, score: str) -> dict[str, float]:
    """The accuracy of a run on every benchmark, and `mean`."""
    report = _report(run, score)
    assert report is not None
    key = "pass_at_k" if score.endswith("pass_at_k") else "avg_at_k"
    each = {name: getattr(result, key) for name, result in report.sampled.benchmarks.items()}
    return {**each, "mean": getattr(report.sampled.mean, key)}


def _values(run: FinishedRun, score: str) -> dict[str, np.ndarray] | None:
    """The accuracy of a run on every problem, [N] by benchmark; None without per-sample rows."""
    report = _report(run, score)
    assert report is not None
    tables = _problem_tables(report)
    if tables is None:
        return None
    if score.endswith("pass_at_k"):
        return {name: (table.correct_N > 0).astype(float) for name, table in tables.items()}
    return {name: table.accuracy_N for name, table in tables.items()}


@cache
def _problem_tables(report: EvaluationReport) -> dict[str, ProblemTable] | None:
    """The problems of every benchmark; None without per-sample rows. Cached by identity."""
    if report.samples is None:
        return None
    return {name: problem_table(report.samples, name) for name in report.sampled.benchmarks}


def _estimates(
    values: ProblemValues, means: Sequence[Mapping[str, float]], interval_over: IntervalOver
) -> dict[str, Estimate]:
    """One estimate per benchmark, and of `mean`."""
    found = {}
    for name in means[0]:
        each = tuple(mean[name] for mean in means)
        spread = Spread.of(each)
        interval, over = interval_over(_by_benchmark(values, means, name))
        found[name] = Estimate(
            spread.mean, spread.median, spread.low, spread.high, each, interval, over
        )
    return found


def _by_benchmark(
    values: ProblemValues, means: Sequence[Mapping[str, float]], name: str
) -> list[np.ndarray]:
    """[S, N] of a benchmark, or of every one for `mean`; [S, 1] without per-sample rows."""
    known = [each for each in values if each is not None]
    if len(known) == len(values):
        benchmarks = list(known[0]) if name == "mean" else [name]
        return [np.array([each[benchmark] for each in known]) for benchmark in benchmarks]
    return [np.array([[each[name]] for each in means])]


def _differences(pairs: Pairs, score: str) -> dict[str, Difference]:
    """The arm minus the baseline, of every benchmark and `mean`."""
    of_means = [
        {name: value - theirs[name] for name, value in ours.items()}
        for ours, theirs in ((_means(a, score), _means(b, score)) for a, b in pairs)
    ]
    of_values = [_minus(_values(a, score), _values(b, score)) for a, b in pairs]
    found = {}
    over = difference_over_problems if pairs[0][0].seed is None else difference_over_seeds
    for name, estimate in _estimates(of_values, of_means, over).items():
        each_S = np.array([means[name] for means in of_means])
        found[name] = Difference(
            **asdict(estimate),
            seeds=tuple(a.seed for a, _ in pairs if a.seed is not None),
            seeds_better=int((each_S > 0).sum()),
            p_value=sign_flip_over_seeds(each_S),
            smallest_p_value=smallest_p_value(len(pairs)),
        )
    return found


def _minus(
    a: Mapping[str, np.ndarray] | None, b: Mapping[str, np.ndarray] | None
) -> dict[str, np.ndarray] | None:
    return None if a is None or b is None else {name: a[name] - b[name] for name in a}
