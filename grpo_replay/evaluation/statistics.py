"""The numbers of an evaluation report, computed from the per-sample rows: avg@k, unbiased pass@j,
intervals over problems, the sign-flip test.

    N  problems of a benchmark     K  samples per problem

Every interval is mean ± t·√V. Over problems, the unit is a problem, not a sample: the samples of
one problem are not independent. `lab.report.two_level` has the V over seeds and problems.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.special import stdtrit

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one benchmark, or of the mean over benchmarks. Accuracies and rates are
    fractions; tokens are counted in completions.

    Intervals and the standard error are over problems: None if a benchmark has one problem.
    `mean_score` is for a function of the user, which may give part of the points.
    """

    avg_at_k: float
    avg_at_k_stderr: float | None
    avg_at_k_interval: Interval | None
    pass_at_k: float
    pass_at_k_interval: Interval | None
    pass_at_j: dict[str, float]
    mean_tokens: float
    mean_tokens_interval: Interval | None
    truncation_rate: float
    unparsed_rate: float
    mean_score: float | None


@dataclass(frozen=True, slots=True)
class BenchmarkResult(Numbers):
    """One benchmark of n problems with k samples each. `unparsable_answers` has the ids of problems
    whose reference answer math-verify could not parse."""

    n: int
    k: int
    verdicts: dict[str, int]
    unparsable_answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeanResult(Numbers):
    """The unweighted mean over benchmarks. `pass_at_j` ends at the smallest k; `pass_at_k` averages
    each benchmark's pass@k at its own k."""

    benchmarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Results:
    """All benchmarks, either sampled or greedy, and their mean."""

    benchmarks: dict[str, BenchmarkResult]
    mean: MeanResult

    def accuracies(self) -> dict[str, float]:
        """avg@k of every benchmark, and `mean`."""
        accuracies = {name: result.avg_at_k for name, result in self.benchmarks.items()}
        return {**accuracies, "mean": self.mean.avg_at_k}

    def standard_errors(self) -> dict[str, float | None]:
        """Standard errors of `accuracies`."""
        errors = {name: result.avg_at_k_stderr for name, result in self.benchmarks.items()}
        return {**errors, "mean": self.mean.avg_at_k_stderr}


CONFIDENCE = 0.95

EQUAL = 1e-9
"""Accuracies that differ by less count as equal: interpolation between evaluations rounds."""

FLIPS = 20_000
"""Random flips of the sign-flip test; for up to 14 differing problems all flips are enumerated."""


def pass_at_each(correct_N: np.ndarray, samples: int) -> np.ndarray:
    """Compute pass@j of every problem, [N, K]; column j-1 is pass@j.

    The probability that j of K completions, drawn without replacement, include a correct one:
    1 - C(K-c, j) / C(K, j) with c correct (Chen et al. 2021, eq. 1), as a product over draws.
    """
    if correct_N.min() < 0 or correct_N.max() > samples:
        raise ValueError(f"pass@j of {correct_N.tolist()} correct among {samples} samples")
    drawn_K = np.arange(samples)
    wrong_left_NK = np.maximum(samples - correct_N[:, None] - drawn_K, 0)
    return 1.0 - np.cumprod(wrong_left_NK / (samples - drawn_K), axis=1)


def standard_error(values_N: np.ndarray) -> float | None:
    """Returns the standard error of the mean over problems; None for fewer than two."""
    if len(values_N) < 2:
        return None
    return float(np.std(values_N, ddof=1) / np.sqrt(len(values_N)))


def with_unsolved_and_solved(values_N: np.ndarray, least: float = 0.0) -> np.ndarray:
    """Add two problems to the values, one never and one always solved; returns [..., N + 2]. An
    accuracy's interval has the variance and the center of these. For differences, with `least` -1,
    they are one lost and one gained, and only the variance is used, if all differences are equal.

    The variance is never 0: if all problems agree, it is about that of one sample per problem,
    however many samples each has.
    """
    ends = [np.full((*values_N.shape[:-1], 1), end) for end in (least, 1.0)]
    return np.concatenate([values_N, *ends], axis=-1)


@dataclass(frozen=True, slots=True)
class Component:
    """An independent estimate of a variance, with its degrees of freedom."""

    variance: float
    freedom: float

    @property
    def share(self) -> float:
        """Its term in Satterthwaite's denominator."""
        return self.variance**2 / self.freedom

    @classmethod
    def over_problems(cls, values_N: np.ndarray) -> "Component":
        """Returns the variance of the mean over problems."""
        problems = len(values_N)
        return cls(float(np.var(values_N, ddof=1)) / problems, problems - 1)

    @classmethod
    def of_mean(cls, parts: Sequence["Component"]) -> "Component":
        """The variance of the unweighted mean over independent benchmarks (Satterthwaite 1946)."""
        variance = sum(part.variance for part in parts) / len(parts) ** 2
        if variance == 0:
            return cls(0.0, sum(part.freedom for part in parts))
        return cls(variance, variance**2 / (sum(part.share for part in parts) / len(parts) ** 4))


def t_interval(mean: float, estimate: Component, bound: float = 1.0) -> Interval:
    """mean ± t·√variance at 95 %, within -bound and bound (1 for differences of accuracies)."""
    quantile = float(stdtrit(estimate.freedom, (1 + CONFIDENCE) / 2))
    half = quantile * math.sqrt(estimate.variance)
    return max(-bound, mean - half), min(bound, mean + half)


def share_interval(share: float, center: float, variance: float, freedom: float) -> Interval:
    """Returns the interval of an accuracy `share`, within 0 and 1. It is centred at `center`, the
    mean of `with_unsolved_and_solved`, and extended to include `share`. Adding successes and
    failures follows Agresti and Coull (1998)."""
    low, high = t_interval(center, Component(variance, freedom))
    return min(share, max(0.0, low)), max(share, high)


def accuracy_interval(values_N: Sequence[np.ndarray]) -> Interval | None:
    """Compute the 95 % interval of the mean over benchmarks of accuracy or pass@k, where problems
    are the sample. `values_N` has an array [N] for each benchmark. None if one has one problem."""
    if any(len(benchmark_N) < 2 for benchmark_N in values_N):
        return None
    with_both = [with_unsolved_and_solved(benchmark_N) for benchmark_N in values_N]
    estimate = Component.of_mean([Component.over_problems(values) for values in with_both])
    share = _mean(values.mean() for values in values_N)
    center = _mean(values.mean() for values in with_both)
    return share_interval(share, center, estimate.variance, estimate.freedom)


def difference_interval(differences_N: Sequence[np.ndarray], bound: float = 1.0) -> Interval | None:
    """Compute the t interval, over problems, of the mean difference over benchmarks, each an array
    [N]; None if a benchmark has a single problem. `bound` is the largest possible difference (inf
    for lengths). If a benchmark's differences of accuracies are all equal, its variance is that of
    `with_unsolved_and_solved`: a further problem might differ."""
    if any(len(benchmark_N) < 2 for benchmark_N in differences_N):
        return None
    mean = float(np.mean([benchmark_N.mean() for benchmark_N in differences_N]))
    parts = []
    for benchmark_N in differences_N:
        are_equal_accuracies = math.isfinite(bound) and np.ptp(benchmark_N) < EQUAL
        values = (
            with_unsolved_and_solved(benchmark_N, least=-1.0)
            if are_equal_accuracies
            else benchmark_N
        )
        parts.append(Component.over_problems(values))
    return t_interval(mean, Component.of_mean(parts), bound)


def sign_flip_p_value(differences: list[np.ndarray], flips: int, rng: np.random.Generator) -> float:
    """Compute the two-sided p-value of the mean over benchmarks of mean differences, each an [N].

    Under the null hypothesis A and B are exchangeable on every problem, so each difference is
    equally likely with either sign. The p-value is the fraction of sign flips whose mean is at
    least as large as the observed one. If there are at most `flips`, all are enumerated; else that
    many are drawn at random, and the observed one is added, so the p-value is never 0.
    """
    from scipy.stats import permutation_test  # takes half a second to import

    shares = np.concatenate([values_N / len(values_N) for values_N in differences])
    shares = shares[shares != 0]
    if len(shares) < 2:
        return 1.0
    result = permutation_test(
        (shares,),
        lambda values, axis: np.round(np.abs(values.sum(axis=axis)), 12),  # ties, but for rounding
        permutation_type="samples",
        alternative="greater",
        n_resamples=flips,
        batch=1000,
        rng=rng,
    )
    return float(result.pvalue)


def summarise_both(
    samples: pa.Table, bad_answers: Collection[str]
) -> tuple[Results, Results | None]:
    """Summarise the sampled rows, and the greedy rows; None if there are no greedy rows.

    `bad_answers` are the reference answers that could not be parsed.
    """
    has_greedy = pc.any(samples["greedy"]).as_py()
    greedy = summarise(samples, bad_answers, greedy=True) if has_greedy else None
    return summarise(samples, bad_answers), greedy


def summarise(samples: pa.Table, bad_answers: Collection[str], greedy: bool = False) -> Results:
    """Summarise the sampled rows, or the greedy ones: every benchmark and the mean."""
    samples = samples.filter(pc.field("greedy") == greedy)
    results, tables = dict[str, BenchmarkResult](), list[ProblemTable]()
    for name in dict.fromkeys(samples["benchmark"].to_pylist()):
        rows = samples.filter(pc.field("benchmark") == name)
        tables.append(problem_table(rows, name, greedy))
        results[name] = _benchmark_result(rows, tables[-1], bad_answers)
    return Results(results, _mean_result(results, tables))


@dataclass(frozen=True, slots=True, eq=False)
class ProblemTable:
    """Per-problem counts and means of one benchmark, problems in order."""

    problem_ids: tuple[str, ...]
    samples: int  # K
    correct_N: np.ndarray  # int64, correct samples
    tokens_N: np.ndarray  # float64, mean completion tokens

    @property
    def accuracy_N(self) -> np.ndarray:
        return self.correct_N / self.samples

    @property
    def passed_N(self) -> np.ndarray:
        """1.0 for a problem with a correct sample."""
        return (self.correct_N > 0).astype(float)


def problem_table(samples: pa.Table, benchmark: str, greedy: bool = False) -> ProblemTable:
    """Count correct samples and average tokens of every problem of one benchmark.

    Raises ValueError unless all problems have the same number of samples.
    """
    rows = samples.filter((pc.field("benchmark") == benchmark) & (pc.field("greedy") == greedy))
    index = rows["problem_index"].to_numpy()
    problems = int(index.max()) + 1
    per_problem = len(index) // problems
    counts = np.bincount(index, minlength=problems)  # a negative index raises ValueError
    if not np.array_equal(counts, np.full(problems, per_problem)):
        raise ValueError("every problem must have the same number of samples")
    ids = rows["problem_id"].to_pylist()[::per_problem]
    correct = rows["correct"].to_numpy(zero_copy_only=False).reshape(problems, per_problem)
    tokens = rows["tokens"].to_numpy().reshape(problems, per_problem)
    return ProblemTable(tuple(ids), per_problem, correct.sum(axis=1), tokens.mean(axis=1))


def _benchmark_result(
    rows: pa.Table, problems: ProblemTable, bad_answers: Collection[str]
) -> BenchmarkResult:
    """Summarises one benchmark from its per-sample rows and the table made of them."""
    pass_J = pass_at_each(problems.correct_N, problems.samples).mean(axis=0)
    ids_and_answers = zip(rows["problem_id"].to_pylist(), rows["answer"].to_pylist(), strict=True)
    unparsable = dict.fromkeys(id for id, answer in ids_and_answers if answer in bad_answers)
    return BenchmarkResult(
        n=len(problems.problem_ids),
        k=problems.samples,
        avg_at_k=float(problems.accuracy_N.mean()),
        avg_at_k_stderr=standard_error(problems.accuracy_N),
        pass_at_k=float(pass_J[-1]),
        pass_at_j={str(j): float(value) for j, value in enumerate(pass_J, start=1)},
        mean_tokens=float(problems.tokens_N.mean()),
        **_intervals([problems]),
        mean_score=_mean_score(rows["score"]),
        truncation_rate=_share(rows["finish_reason"], "length"),
        unparsed_rate=_share(rows["verdict"], "unparsable"),
        verdicts=dict(sorted(Counter(rows["verdict"].to_pylist()).items())),
        unparsable_answers=tuple(unparsable),
    )


def _mean_score(scores: pa.ChunkedArray) -> float | None:
    """Averages scores, 0 where the scorer failed; None if nothing was scored."""
    if scores.null_count == len(scores):
        return None
    return pc.mean(pc.fill_null(scores, 0.0)).as_py()


def _mean_result(results: dict[str, BenchmarkResult], tables: Sequence[ProblemTable]) -> MeanResult:
    """Averages the benchmarks, unweighted; pass@j up to the smallest k. The standard error is that
    of independent benchmarks; None if one has none."""
    by_benchmark = list(results.values())
    errors = [result.avg_at_k_stderr for result in by_benchmark]
    known = [error for error in errors if error is not None]
    error = float(np.linalg.norm(known) / len(known)) if len(known) == len(errors) else None
    unweighted: dict[str, Any] = {
        name: _mean(getattr(result, name) for result in by_benchmark)
        for name in ("avg_at_k", "pass_at_k", "mean_tokens", "truncation_rate", "unparsed_rate")
    }
    return MeanResult(
        **unweighted,
        avg_at_k_stderr=error,
        pass_at_j={
            str(j): _mean(result.pass_at_j[str(j)] for result in by_benchmark)
            for j in range(1, min(result.k for result in by_benchmark) + 1)
        },
        **_intervals(tables),
        mean_score=_mean_of_all([result.mean_score for result in by_benchmark]),
        benchmarks=tuple(results),
    )


def _intervals(tables: Sequence[ProblemTable]) -> dict[str, Any]:
    """Computes the intervals of avg@k, pass@k and tokens, of the mean over benchmarks."""
    tokens = difference_interval([table.tokens_N for table in tables], bound=math.inf)
    return {
        "avg_at_k_interval": accuracy_interval([table.accuracy_N for table in tables]),
        "pass_at_k_interval": accuracy_interval([table.passed_N for table in tables]),
        "mean_tokens_interval": tokens and (max(0.0, tokens[0]), tokens[1]),
    }


def _mean_of_all(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return _mean(known) if len(known) == len(scores) else None


def _share(values: pa.ChunkedArray, wanted: str) -> float:
    return sum(value == wanted for value in values.to_pylist()) / len(values)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
