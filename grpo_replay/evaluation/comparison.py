"""Two evaluations of the same problems: paired bootstrap instead of two bare numbers."""

from dataclasses import dataclass
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.errors import EvaluationFileError
from grpo_replay.evaluation.report import EvaluationReport
from grpo_replay.evaluation.results import Interval
from grpo_replay.evaluation.statistics import bootstrap_weights, interval, two_sided_p_value
from grpo_replay.evaluation.summarise import ProblemTable, per_problem

SAME_SETTINGS = (
    *("temperature", "top_p", "max_completion_length", "reward", "template"),
    *("system_prompt", "user_template", "max_problems"),
)
"""Settings that must agree, or a comparison would be of them and not of the models."""


VERIFIER_PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy")


@dataclass(frozen=True, slots=True)
class PairedResult:
    """B against A on one benchmark, or on the mean over benchmarks. Accuracies are fractions.

    `p_value` is two-sided, from the paired bootstrap over problems. Problems are better or worse
    in B by their share of correct samples; samples of the same problem and number are paired for
    `correct_to_wrong` and `wrong_to_correct`.
    """

    accuracy_a: float
    accuracy_b: float
    difference: float
    difference_interval: Interval
    p_value: float
    tokens_difference: float
    tokens_difference_interval: Interval
    problems_better: int
    problems_worse: int
    correct_to_wrong: int
    wrong_to_correct: int


@dataclass(frozen=True, slots=True, eq=False)
class ResampledMeans:
    """Means over benchmarks in each bootstrap resample, [B]; A and B share the resamples."""

    accuracy_a_B: np.ndarray
    accuracy_b_B: np.ndarray
    tokens_a_B: np.ndarray
    tokens_b_B: np.ndarray


def compare(
    name_a: str, a: EvaluationReport, name_b: str, b: EvaluationReport
) -> dict[str, PairedResult]:
    """B against A for every benchmark, and `mean`.

    Raises EvaluationFileError if the two are not of the same problems under the same settings, or
    if a per-sample file is missing.
    """
    refuse_incomparable(name_a, a, name_b, b)
    for name, report in ((name_a, a), (name_b, b)):
        if report.samples is None:
            raise EvaluationFileError(
                f"{name}: its per-sample file ({name.removesuffix('.json')}.parquet) is missing, "
                "and a paired test needs it: keep the two files together, or evaluate again"
            )
    pairs = {name: _Pair.of(name, a, b) for name in a.sampled.benchmarks}
    results = {name: pair.result() for name, pair in pairs.items()}
    return {**results, "mean": _mean_result(list(results.values()), resampled_means(a, b))}


def refuse_incomparable(name_a: str, a: EvaluationReport, name_b: str, b: EvaluationReport) -> None:
    """Raises EvaluationFileError unless both evaluate the same problems in the same way."""
    ours, theirs = set(a.sampled.benchmarks), set(b.sampled.benchmarks)
    if ours != theirs:
        raise EvaluationFileError(
            f"{name_a} evaluates {_listed(ours)}, but {name_b} {_listed(theirs)}: means over "
            "different benchmarks do not compare; evaluate both on the same (--benchmark)"
        )
    for key in SAME_SETTINGS:
        if a.settings.get(key) != b.settings.get(key):
            raise EvaluationFileError(
                f"{name_a} has {key} {a.settings.get(key)!r}, but {name_b} "
                f"{b.settings.get(key)!r}: evaluate both under the same settings"
            )
    for benchmark, result in a.sampled.benchmarks.items():
        if result.n != b.sampled.benchmarks[benchmark].n:
            raise EvaluationFileError(
                f"{benchmark} has {result.n} problems in {name_a}, but "
                f"{b.sampled.benchmarks[benchmark].n} in {name_b}: evaluate both on the same"
            )
        if a.samples is not None and b.samples is not None:
            _refuse_other_problems(benchmark, name_a, a.samples, name_b, b.samples)
        if _problems_digest(a, benchmark) != _problems_digest(b, benchmark):
            raise EvaluationFileError(
                f"{benchmark} has other problems or answers in {name_a} than in {name_b}, under "
                "the same ids: evaluate both on the same"
            )


def differences(a: EvaluationReport, b: EvaluationReport) -> list[str]:
    """What to know beside the numbers of a comparison: sentences, none if nothing differs."""
    found = []
    for name, result in a.sampled.benchmarks.items():
        k_a, k_b = result.k, b.sampled.benchmarks[name].k
        if k_a != k_b:
            found.append(
                f"{name}: {k_a} samples of each problem in A, {k_b} in B; lost and won count the "
                f"first {min(k_a, k_b)}"
            )
    for package in VERIFIER_PACKAGES:
        if a.versions.get(package) != b.versions.get(package):
            found.append(
                f"graded with {package} {a.versions.get(package)} in A, "
                f"{b.versions.get(package)} in B"
            )
    return found


def _problems_digest(report: EvaluationReport, benchmark: str) -> str | None:
    return report.settings.get("benchmarks", {}).get(benchmark, {}).get("problems_sha256")


def resampled_means(a: EvaluationReport, b: EvaluationReport) -> ResampledMeans:
    """Bootstrap means over the benchmarks of two comparable reports with per-sample rows."""
    columns = [_Pair.of(name, a, b).resampled() for name in a.sampled.benchmarks]
    return ResampledMeans(*(np.mean(values, axis=0) for values in zip(*columns, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """One benchmark in both evaluations, problems aligned."""

    name: str
    a: ProblemTable
    b: ProblemTable
    flips: tuple[int, int]  # correct -> wrong, wrong -> correct
    resamples: int

    @classmethod
    def of(cls, name: str, a: EvaluationReport, b: EvaluationReport) -> "_Pair":
        resamples = min(r.settings["bootstrap_samples"] for r in (a, b))
        return cls(
            name,
            per_problem(a.samples, name),
            per_problem(b.samples, name),
            _flips(_correct(a.samples, name), _correct(b.samples, name)),
            resamples,
        )

    def resampled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Accuracy of A and B, tokens of A and B, in the same resamples of the problems, [B]."""
        problems = len(self.a.problem_ids)
        rng = np.random.default_rng([problems, crc32(self.name.encode())])
        weights_BN = bootstrap_weights(problems, self.resamples, rng)
        return (
            weights_BN @ self.a.accuracy_N,
            weights_BN @ self.b.accuracy_N,
            weights_BN @ self.a.tokens_N,
            weights_BN @ self.b.tokens_N,
        )

    def result(self) -> PairedResult:
        accuracy_a_B, accuracy_b_B, tokens_a_B, tokens_b_B = self.resampled()
        difference_N = self.b.accuracy_N - self.a.accuracy_N
        difference = float(difference_N.mean())
        difference_B = accuracy_b_B - accuracy_a_B
        return PairedResult(
            accuracy_a=float(self.a.accuracy_N.mean()),
            accuracy_b=float(self.b.accuracy_N.mean()),
            difference=difference,
            difference_interval=interval(difference_B),
            p_value=two_sided_p_value(difference, difference_B),
            tokens_difference=float(self.b.tokens_N.mean() - self.a.tokens_N.mean()),
            tokens_difference_interval=interval(tokens_b_B - tokens_a_B),
            problems_better=int((difference_N > 0).sum()),
            problems_worse=int((difference_N < 0).sum()),
            correct_to_wrong=self.flips[0],
            wrong_to_correct=self.flips[1],
        )


def _mean_result(results: list[PairedResult], means: ResampledMeans) -> PairedResult:
    def mean(key: str) -> float:
        return float(np.mean([getattr(result, key) for result in results]))

    def total(key: str) -> int:
        return sum(getattr(result, key) for result in results)

    difference_B = means.accuracy_b_B - means.accuracy_a_B
    return PairedResult(
        accuracy_a=mean("accuracy_a"),
        accuracy_b=mean("accuracy_b"),
        difference=mean("difference"),
        difference_interval=interval(difference_B),
        p_value=two_sided_p_value(mean("difference"), difference_B),
        tokens_difference=mean("tokens_difference"),
        tokens_difference_interval=interval(means.tokens_b_B - means.tokens_a_B),
        problems_better=total("problems_better"),
        problems_worse=total("problems_worse"),
        correct_to_wrong=total("correct_to_wrong"),
        wrong_to_correct=total("wrong_to_correct"),
    )


def _flips(a: dict[tuple[int, int], bool], b: dict[tuple[int, int], bool]) -> tuple[int, int]:
    both = [(a[key], b[key]) for key in a.keys() & b.keys()]
    return both.count((True, False)), both.count((False, True))


def _correct(samples: pa.Table, benchmark: str) -> dict[tuple[int, int], bool]:
    """Whether each (problem, sample) is correct."""
    rows = samples.filter((pc.field("benchmark") == benchmark) & ~pc.field("greedy"))
    columns = [rows[name].to_pylist() for name in ("problem_index", "sample", "correct")]
    return {(problem, sample): correct for problem, sample, correct in zip(*columns, strict=True)}


def _refuse_other_problems(
    benchmark: str, name_a: str, a: pa.Table, name_b: str, b: pa.Table
) -> None:
    ours, theirs = per_problem(a, benchmark).problem_ids, per_problem(b, benchmark).problem_ids
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            raise EvaluationFileError(
                f"{benchmark}: problem {index + 1} is {one!r} in {name_a}, but {other!r} in "
                f"{name_b}: evaluate both on the same problems"
            )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
