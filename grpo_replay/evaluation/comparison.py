"""Comparison of two evaluations on the same problems by a paired test."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from grpo_replay.errors import EvaluationFileError
from grpo_replay.evaluation.evaluation_report import (
    EvaluationReport,
    refuse_incomparable,
)
from grpo_replay.evaluation.statistics import (
    FLIPS,
    Interval,
    ProblemTable,
    difference_interval,
    problem_table,
    sign_flip_p_value,
)


@dataclass(frozen=True, slots=True)
class PairedResult:
    """B against A on one benchmark, or on the mean over benchmarks. Accuracies are fractions.

    Intervals are 95 % t intervals over problems (None for a single problem), those of a report;
    `p_value` is two-sided, from sign flips of the problems' differences.
    """

    accuracy_a: float
    accuracy_b: float
    difference: float
    difference_interval: Interval | None
    p_value: float
    tokens_difference: float
    tokens_difference_interval: Interval | None


def compare(
    name_a: str, a: EvaluationReport, name_b: str, b: EvaluationReport
) -> dict[str, PairedResult]:
    """Compare B with A on every benchmark, and on their `mean`.

    Raises EvaluationFileError if problems or settings differ, or if a per-sample file is missing.
    """
    refuse_incomparable(name_a, a, name_b, b)
    for name, report in ((name_a, a), (name_b, b)):
        if report.samples is None:
            raise EvaluationFileError(
                f"{name}: its per-sample file ({name.removesuffix('.json')}.parquet) is missing, "
                "and a paired test needs it: keep the two files together, or evaluate again"
            )
    pairs = pairs_of(a, b)
    return {**{pair.name: _result([pair]) for pair in pairs}, "mean": _result(pairs)}


def notices_of_prompts(a: EvaluationReport, b: EvaluationReport) -> list[str]:
    """Return a notice if the two models got different prompts for the same problems."""
    digests_a, digests_b = (
        {name: bench.get("prompts_sha256") for name, bench in report.settings["benchmarks"].items()}
        for report in (a, b)
    )
    differing = [name for name in a.sampled.benchmarks if digests_a[name] != digests_b[name]]
    return [
        f"A and B have other prompts for the same problems of {', '.join(differing)}: their chat "
        "templates, or prompts.date, differ"
    ] * bool(differing)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One benchmark in both evaluations, with aligned problems."""

    name: str
    a: ProblemTable
    b: ProblemTable


def pairs_of(a: EvaluationReport, b: EvaluationReport) -> list[Pair]:
    """Pair the benchmarks of two comparable reports that have per-sample rows."""
    return [
        Pair(name, problem_table(a.samples, name), problem_table(b.samples, name))
        for name in a.sampled.benchmarks
    ]


def _result(pairs: Sequence[Pair]) -> PairedResult:
    """Compares B with A by problem, on one benchmark or the unweighted mean over several:
    differences, t intervals, and a sign-flip test seeded by the names."""
    differences = [pair.b.accuracy_N - pair.a.accuracy_N for pair in pairs]
    tokens = [pair.b.tokens_N - pair.a.tokens_N for pair in pairs]
    rng = np.random.default_rng([crc32(pair.name.encode()) for pair in pairs])
    return PairedResult(
        accuracy_a=_mean(pair.a.accuracy_N for pair in pairs),
        accuracy_b=_mean(pair.b.accuracy_N for pair in pairs),
        difference=_mean(differences),
        difference_interval=difference_interval(differences),
        p_value=sign_flip_p_value(differences, FLIPS, rng),
        tokens_difference=_mean(tokens),
        tokens_difference_interval=difference_interval(tokens, bound=math.inf),
    )


def _mean(columns: Iterable[np.ndarray]) -> float:
    """Returns the mean over benchmarks of the means over problems."""
    return float(np.mean([values_N.mean() for values_N in columns]))
