"""The numbers of an evaluation report, whose bounds are checked when a file is read, and how they
come from the per-sample rows: avg@k, unbiased pass@j, intervals over problems, the sign-flip test.

    N  problems of a benchmark     K  samples per problem     B  bootstrap resamples

A problem, not a sample, is the unit of resampling: the samples of one problem are not independent.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field
from scipy.special import betaincinv, ndtri, stdtrit

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Length = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bound = Annotated[float, Field(allow_inf_nan=False)]
Interval = tuple[Bound, Bound]


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one benchmark, or of the mean over benchmarks. Accuracies and rates are
    fractions.

    Intervals are 95 % intervals over problems, of tokens by the bootstrap; the standard error is
    that of the mean over problems (all None if a benchmark has one problem). Lengths are completion
    tokens; those of correct and of incorrect completions are pooled over samples (None if there are
    none).
    """

    avg_at_k: Fraction
    avg_at_k_stderr: Length | None
    avg_at_k_interval: Interval | None
    pass_at_k: Fraction
    pass_at_k_interval: Interval | None
    pass_at_j: dict[str, Fraction]
    mean_tokens: Length
    mean_tokens_interval: Interval | None
    mean_tokens_correct: Length | None
    mean_tokens_incorrect: Length | None
    truncation_rate: Fraction
    unparsed_rate: Fraction


@dataclass(frozen=True, slots=True)
class BenchmarkResult(Numbers):
    """One benchmark of n problems with k samples each. `unparsable_answers` has the ids of problems
    whose reference answer math-verify could not parse."""

    n: Count
    k: Count
    verdicts: dict[str, Whole]
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
        each = {name: result.avg_at_k for name, result in self.benchmarks.items()}
        return {**each, "mean": self.mean.avg_at_k}

    def standard_errors(self) -> dict[str, float | None]:
        """Standard errors of `accuracies`."""
        each = {name: result.avg_at_k_stderr for name, result in self.benchmarks.items()}
        return {**each, "mean": self.mean.avg_at_k_stderr}


BOOTSTRAP_SAMPLES = 2000
"""Resamples for intervals of token counts and of AES; random flips of the sign-flip test."""

CONFIDENCE = 0.95

EQUAL = 1e-9
"""Accuracies that differ by less are equal: at equal cost they lie on lines between evaluations,
which rounds."""

EXACT_PROBLEMS = 14
"""Enumerate all sign flips up to this many differing problems; beyond it, draw them at random."""

_FLIPS_AT_ONCE = 1000


def pass_at_each(correct_N: np.ndarray, samples: int) -> np.ndarray:
    """pass@j of every problem, [N, K]; column j-1 is pass@j.

    The probability that j of K completions, drawn without replacement, include a correct one:
    1 - C(K-c, j) / C(K, j) with c correct (Chen et al. 2021, eq. 1), as a product over draws.
    """
    if correct_N.min() < 0 or correct_N.max() > samples:
        raise ValueError(f"pass@j of {correct_N.tolist()} correct among {samples} samples")
    drawn_K = np.arange(samples)
    wrong_left_NK = np.maximum(samples - correct_N[:, None] - drawn_K, 0)
    return 1.0 - np.cumprod(wrong_left_NK / (samples - drawn_K), axis=1)


def standard_error(values_N: np.ndarray) -> float | None:
    """The standard error of the mean over problems; None for fewer than two."""
    if len(values_N) < 2:
        return None
    return float(np.std(values_N, ddof=1) / np.sqrt(len(values_N)))


def bootstrap_draws(problems: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [B, N]: the number of times each problem is drawn in each resample."""
    return rng.multinomial(problems, np.full(problems, 1 / problems), size=resamples)


def resampled_mean(draws_BN: np.ndarray, values_N: np.ndarray) -> np.ndarray:
    """[B]: the mean over the resampled problems. NaN for a single problem."""
    problems = draws_BN.shape[1]
    if problems == 1:
        return np.full(len(draws_BN), np.nan)
    return draws_BN @ values_N / problems


def interval(values_B: np.ndarray) -> tuple[float, float] | None:
    """The percentile interval of bootstrap values at `CONFIDENCE`; None if any is NaN."""
    if np.isnan(values_B).any():
        return None
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values_B, [tail, 100 - tail])
    return float(low), float(high)


def with_both_answers(values_N: np.ndarray, least: float = 0.0) -> np.ndarray:
    """[…, N + 2]: the values with two more problems, one never and one always solved; of
    differences, with `least` -1, one lost and one gained.

    A variance estimated from these is never 0. Where all problems agree, every problem counts as
    about one observation, however many samples it has.
    """
    ends = [np.full((*values_N.shape[:-1], 1), end) for end in (least, 1.0)]
    return np.concatenate([values_N, *ends], axis=-1)


def accuracy_interval(values_N: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """The interval over problems of the mean over benchmarks of accuracies, one [N] each.

    None if a benchmark has a single problem.
    """
    if any(len(each) < 2 for each in values_N):
        return None
    widened = [with_both_answers(each) for each in values_N]
    variance = sum(np.var(each, ddof=1) / len(each) for each in widened) / len(widened) ** 2
    mean, center = (float(np.mean([v.mean() for v in each])) for each in (values_N, widened))
    return share_interval(mean, center, float(variance))


def share_interval(
    share: float, center: float, variance: float, freedom: float = math.inf
) -> tuple[float, float]:
    """The interval of Clopper and Pearson (1934) of a share of as many independent observations as
    have this variance, so never outside [0, 1]: Korn and Graubard (1998).

    `variance` and `center` are of the mean of `with_both_answers`; their effective number of
    observations is center·(1 - center)/variance, less for few degrees of freedom.
    """
    tail = (1 - CONFIDENCE) / 2
    few = ndtri(tail) / (ndtri(tail) if math.isinf(freedom) else stdtrit(freedom, tail))
    count = center * (1 - center) / variance * few**2
    right = share * count
    wrong = count - right
    low = 0.0 if share <= 0 else float(betaincinv(right, wrong + 1, tail))
    high = 1.0 if share >= 1 else float(betaincinv(right + 1, wrong, 1 - tail))
    return low, high


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
        """The variance of the mean over problems."""
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


def difference_interval(differences_N: Sequence[np.ndarray], bound: float = 1.0) -> Interval | None:
    """The t interval over problems of the mean over benchmarks of differences, one [N] each; None
    if a benchmark has a single problem. If no difference of accuracies varies, that of
    `with_both_answers`: equal problems do not show that another would be equal."""
    if any(len(each) < 2 for each in differences_N):
        return None
    mean = float(np.mean([each.mean() for each in differences_N]))
    variance = Component.of_mean([Component.over_problems(each) for each in differences_N])
    if variance.variance < EQUAL**2 and math.isfinite(bound):
        widened = [with_both_answers(each, least=-1.0) for each in differences_N]
        variance = Component.of_mean([Component.over_problems(each) for each in widened])
    return t_interval(mean, variance, bound)


def sign_flip_p_value(differences: list[np.ndarray], flips: int, rng: np.random.Generator) -> float:
    """Two-sided p-value of the mean over benchmarks of the mean differences, one [N] per benchmark.

    Under the null hypothesis A and B are exchangeable on every problem, so each difference is
    equally likely with either sign. The p-value is the fraction of sign flips whose mean is at
    least as large as the observed one. With `flips` random flips it is (1 + count) / (1 + flips),
    so never 0. Up to `EXACT_PROBLEMS` differing problems, all flips are enumerated and the test is
    exact.
    """
    shares = np.concatenate([each / len(each) for each in differences])
    shares = shares[shares != 0]
    # Rounding must not decide ties.
    limit = abs(shares.sum()) - 1e-9 * np.abs(shares).sum()
    if len(shares) <= EXACT_PROBLEMS:
        sums = np.zeros(1)
        for share in shares:
            sums = np.concatenate([sums + share, sums - share])
        return float(np.mean(np.abs(sums) >= limit))
    as_large = 0
    for start in range(0, flips, _FLIPS_AT_ONCE):
        size = (min(_FLIPS_AT_ONCE, flips - start), len(shares))
        signs = 2.0 * rng.integers(0, 2, size, dtype=np.int8) - 1.0
        as_large += int(np.count_nonzero(np.abs(signs @ shares) >= limit))
    return float((1 + as_large) / (1 + flips))


def summarise_both(
    samples: pa.Table, resamples: int, bad_answers: Collection[str]
) -> tuple[Results, Results | None]:
    """Results of the sampled rows and of the greedy rows; None if there are no greedy rows.

    `bad_answers` are the reference answers that could not be parsed.
    """
    unparsable = _problems_with(samples, bad_answers)
    sampled, greedy = (
        samples.filter(pc.equal(samples["greedy"], is_greedy)) for is_greedy in (False, True)
    )
    return (
        summarise(sampled, resamples, unparsable),
        summarise(greedy, resamples, unparsable) if len(greedy) else None,
    )


def _problems_with(samples: pa.Table, answers: Collection[str]) -> dict[str, list[str]]:
    """The distinct ids of the problems with these reference answers, by benchmark, in order."""
    columns = (samples[name].to_pylist() for name in ("benchmark", "problem_id", "answer"))
    found: dict[str, dict[str, None]] = {}
    for benchmark, problem_id, answer in zip(*columns, strict=True):
        if answer in answers:
            found.setdefault(benchmark, {})[problem_id] = None
    return {benchmark: list(ids) for benchmark, ids in found.items()}


def summarise(
    samples: pa.Table, resamples: int, unparsable: Mapping[str, Sequence[str]]
) -> Results:
    """Results of rows that were all sampled, or all greedy.

    `unparsable` has, by benchmark, the ids of the problems whose answer could not be parsed.
    """
    names = list(dict.fromkeys(samples["benchmark"].to_pylist()))
    parts = {name: samples.filter(pc.field("benchmark") == name) for name in names}
    drawn = {name: _tabulate(parts[name]) for name in names}
    boots = {name: _bootstrap(name, drawn[name], resamples) for name in names}  # of tokens
    results = {
        name: _benchmark_result(parts[name], drawn[name], boots[name], unparsable.get(name, ()))
        for name in names
    }
    return Results(results, _mean_result(samples, results, list(drawn.values()), boots))


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


def _tabulate(samples: pa.Table) -> ProblemTable:
    index = samples["problem_index"].to_numpy()
    problems = int(index.max()) + 1
    samples_each = len(index) // problems
    counts = np.bincount(index, minlength=problems)  # a negative index raises ValueError
    if not np.array_equal(counts, np.full(problems, samples_each)):
        raise ValueError("every problem must have the same number of samples")
    ids = samples["problem_id"].to_pylist()[::samples_each]
    correct = samples["correct"].to_numpy(zero_copy_only=False).reshape(problems, samples_each)
    tokens = samples["tokens"].to_numpy().reshape(problems, samples_each)
    return ProblemTable(tuple(ids), samples_each, correct.sum(axis=1), tokens.mean(axis=1))


def problem_table(samples: pa.Table, benchmark: str, greedy: bool = False) -> ProblemTable:
    """The `ProblemTable` of one benchmark.

    Raises ValueError unless all problems have the same number of samples.
    """
    chosen = pc.field("benchmark") == benchmark
    rows = samples.filter(chosen)
    return _tabulate(rows.filter(pc.equal(rows["greedy"], greedy)))


def benchmark_draws(name: str, problems: int, resamples: int) -> np.ndarray:
    """The resamples of a benchmark, int64 [B, N].

    The seed depends on the benchmark alone, so its intervals do not depend on which other
    benchmarks were evaluated.
    """
    rng = np.random.default_rng([problems, crc32(name.encode())])
    return bootstrap_draws(problems, resamples, rng)


def _bootstrap(name: str, problems: ProblemTable, resamples: int) -> np.ndarray:
    """Bootstrap means [B] of tokens."""
    draws_BN = benchmark_draws(name, len(problems.problem_ids), resamples)
    return resampled_mean(draws_BN, problems.tokens_N)


def _benchmark_result(
    samples: pa.Table,
    problems: ProblemTable,
    tokens_B: np.ndarray,
    unparsable: Sequence[str],
) -> BenchmarkResult:
    pass_J = pass_at_each(problems.correct_N, problems.samples).mean(axis=0)
    return BenchmarkResult(
        n=len(problems.problem_ids),
        k=problems.samples,
        avg_at_k=float(problems.accuracy_N.mean()),
        avg_at_k_stderr=standard_error(problems.accuracy_N),
        avg_at_k_interval=accuracy_interval([problems.accuracy_N]),
        pass_at_k=float(pass_J[-1]),
        pass_at_k_interval=accuracy_interval([problems.passed_N]),
        pass_at_j={str(j): float(value) for j, value in enumerate(pass_J, start=1)},
        mean_tokens=float(problems.tokens_N.mean()),
        mean_tokens_interval=interval(tokens_B),
        **pooled_over_samples(samples),
        verdicts=dict(sorted(Counter(samples["verdict"].to_pylist()).items())),
        unparsable_answers=tuple(unparsable),
    )


def _mean_result(
    samples: pa.Table,
    results: Mapping[str, BenchmarkResult],
    drawn: Sequence[ProblemTable],
    tokens_B: Mapping[str, np.ndarray],
) -> MeanResult:
    each = list(results.values())
    pooled = pooled_over_samples(samples)
    smallest_k = min(result.k for result in each)

    return MeanResult(
        benchmarks=tuple(results),
        avg_at_k=_mean([result.avg_at_k for result in each]),
        avg_at_k_stderr=_error_of_mean([result.avg_at_k_stderr for result in each]),
        avg_at_k_interval=accuracy_interval([each.accuracy_N for each in drawn]),
        pass_at_k=_mean([result.pass_at_k for result in each]),
        pass_at_k_interval=accuracy_interval([each.passed_N for each in drawn]),
        pass_at_j={
            str(j): _mean(result.pass_at_j[str(j)] for result in each)
            for j in range(1, smallest_k + 1)
        },
        mean_tokens=_mean([result.mean_tokens for result in each]),
        mean_tokens_interval=interval(np.mean(list(tokens_B.values()), axis=0)),
        mean_tokens_correct=pooled["mean_tokens_correct"],
        mean_tokens_incorrect=pooled["mean_tokens_incorrect"],
        truncation_rate=_mean([result.truncation_rate for result in each]),
        unparsed_rate=_mean([result.unparsed_rate for result in each]),
    )


def pooled_over_samples(samples: pa.Table) -> dict[str, Any]:
    """Lengths of correct and of incorrect completions, and rates, over all rows."""
    correct = samples["correct"].to_numpy(zero_copy_only=False)
    tokens = samples["tokens"].to_numpy()
    return {
        "mean_tokens_correct": float(tokens[correct].mean()) if correct.any() else None,
        "mean_tokens_incorrect": float(tokens[~correct].mean()) if not correct.all() else None,
        "truncation_rate": _share(samples["finish_reason"].to_pylist(), "length"),
        "unparsed_rate": _share(samples["verdict"].to_pylist(), "unparsable"),
    }


def _error_of_mean(errors: Sequence[float | None]) -> float | None:
    """√Σse² / benchmarks; None if a benchmark has no standard error."""
    known = [error for error in errors if error is not None]
    return float(np.linalg.norm(known) / len(known)) if len(known) == len(errors) else None


def _share(values: Sequence[str], wanted: str) -> float:
    return sum(value == wanted for value in values) / len(values)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
