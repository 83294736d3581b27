"""Aggregation of per-sample rows: means, rates, and intervals over problems."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.evaluation.results import BenchmarkResult, MeanResult, Results
from grpo_replay.evaluation.statistics import (
    accuracy_interval,
    bootstrap_draws,
    interval,
    pass_at_each,
    resampled_mean,
    standard_error,
)


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
        **_pooled(samples),
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
    pooled = _pooled(samples)
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


def _pooled(samples: pa.Table) -> dict[str, Any]:
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
