"""The evaluation report: built from per-sample rows, written as JSON beside them, read back."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.errors import EvaluationFileError
from grpo_replay.evaluation.samples import read_samples, write_samples
from grpo_replay.evaluation.statistics import (
    bootstrap_weights,
    interval,
    pass_at_each,
    standard_error,
)

SCHEMA_VERSION = 1
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """One benchmark of n problems with k samples each. Accuracies and rates are fractions.

    Intervals are 95 % bootstrap intervals over problems; the standard error is that of the mean
    over problems (None if n = 1). Lengths are completion tokens, by correctness pooled over
    samples (None if there is none of the kind). `unparsable_answers` names the problems whose
    reference answer math-verify could not parse.
    """

    n: int
    k: int
    avg_at_k: float
    avg_at_k_stderr: float | None
    avg_at_k_interval: Interval
    pass_at_k: float
    pass_at_k_interval: Interval
    pass_at_j: dict[str, float]
    mean_tokens: float
    mean_tokens_interval: Interval
    mean_tokens_correct: float | None
    mean_tokens_incorrect: float | None
    truncation_rate: float
    unparsed_rate: float
    verdicts: dict[str, int]
    unparsable_answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeanResult:
    """The unweighted mean over benchmarks; lengths by correctness are pooled over all samples."""

    benchmarks: tuple[str, ...]
    avg_at_k: float
    avg_at_k_stderr: float | None
    avg_at_k_interval: Interval
    pass_at_k: float
    pass_at_k_interval: Interval
    mean_tokens: float
    mean_tokens_interval: Interval
    mean_tokens_correct: float | None
    mean_tokens_incorrect: float | None
    truncation_rate: float
    unparsed_rate: float


@dataclass(frozen=True, slots=True)
class Results:
    """All benchmarks under one sampling law, and their mean."""

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


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationReport:
    """What an evaluation found. `greedy` is None unless it was asked for. `samples` are the
    per-sample rows; None where the report was read without them, and on ranks other than 0."""

    model: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    sampled: Results
    greedy: Results | None = None
    samples: pa.Table | None = None

    def accuracies(self) -> dict[str, float]:
        """avg@k of every benchmark as a fraction, and `mean`."""
        return self.sampled.accuracies()

    def standard_errors(self) -> dict[str, float | None]:
        """Standard errors of `accuracies`, over problems."""
        return self.sampled.standard_errors()

    def greedy_accuracies(self) -> dict[str, float] | None:
        """Greedy accuracy of every benchmark, and `mean`; None without a greedy evaluation."""
        return None if self.greedy is None else self.greedy.accuracies()

    def to_json(self) -> dict[str, Any]:
        """The JSON document, without the per-sample rows."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "settings": self.settings,
            "versions": self.versions,
            **asdict(self.sampled),
            "greedy": None if self.greedy is None else asdict(self.greedy),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "EvaluationReport":
        """The inverse of `to_json`. Raises KeyError or TypeError if it is something else."""
        greedy = document["greedy"]
        return cls(
            model=document["model"],
            settings=document["settings"],
            versions=document["versions"],
            sampled=_results_from_json(document),
            greedy=None if greedy is None else _results_from_json(greedy),
        )

    def write(self, path: Path) -> None:
        """Write `path` (JSON) and the per-sample rows beside it (`.parquet`), both atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.samples is not None:
            write_samples(samples_path(path), self.samples)
        temporary = path.with_name(path.name + ".tmp")
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)


def samples_path(report_path: Path) -> Path:
    """Where the per-sample rows of a report lie."""
    return report_path.with_suffix(".parquet")


def read_report(path: Path, with_samples: bool = True) -> EvaluationReport:
    """The report at `path`, with its per-sample rows if they are wanted and lie beside it.

    Raises EvaluationFileError if it is missing or something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationFileError(f"{path}: not a readable evaluation file: {error}") from error
    found = document.get("schema_version") if isinstance(document, dict) else None
    if found != SCHEMA_VERSION:
        raise EvaluationFileError(
            f"{path}: not an evaluation file (schema_version is {found!r}, expected "
            f"{SCHEMA_VERSION}): make one with grpo-replay eval"
        )
    try:
        report = EvaluationReport.from_json(document)
    except (KeyError, TypeError, ValueError) as error:
        raise EvaluationFileError(f"{path}: damaged evaluation file: {error!r}") from error
    beside = samples_path(path)
    if not (with_samples and beside.is_file()):
        return report
    return replace(report, samples=read_samples(beside))


def summarise(
    samples: pa.Table, resamples: int, unparsable: Mapping[str, Sequence[str]]
) -> Results:
    """Results of per-sample rows of one sampling law.

    `unparsable` gives, per benchmark, the ids of problems whose answer could not be parsed.
    """
    names = list(dict.fromkeys(samples["benchmark"].to_pylist()))
    parts = {name: samples.filter(pc.field("benchmark") == name) for name in names}
    drawn = {name: _per_problem(parts[name]) for name in names}
    boots = {name: _bootstrap(name, drawn[name], resamples) for name in names}
    results = {
        name: _benchmark_result(parts[name], drawn[name], boots[name], unparsable.get(name, ()))
        for name in names
    }
    return Results(results, _mean_result(samples, results, boots))


@dataclass(frozen=True, slots=True, eq=False)
class ProblemTable:
    """Per-problem sums of one benchmark, problems in order."""

    problem_ids: tuple[str, ...]
    samples: int  # K
    correct_N: np.ndarray  # int64, correct samples
    tokens_N: np.ndarray  # float64, mean completion tokens

    @property
    def accuracy_N(self) -> np.ndarray:
        return self.correct_N / self.samples


def _per_problem(samples: pa.Table) -> ProblemTable:
    index = samples["problem_index"].to_numpy()
    problems = int(index.max()) + 1
    per_problem = len(index) // problems
    if not np.array_equal(np.bincount(index, minlength=problems), np.full(problems, per_problem)):
        raise ValueError("every problem must have the same number of samples")
    ids = samples["problem_id"].to_pylist()[::per_problem]
    correct = samples["correct"].to_numpy(zero_copy_only=False).reshape(problems, per_problem)
    tokens = samples["tokens"].to_numpy().reshape(problems, per_problem)
    return ProblemTable(tuple(ids), per_problem, correct.sum(axis=1), tokens.mean(axis=1))


def per_problem(samples: pa.Table, benchmark: str) -> ProblemTable:
    """Per-problem sums of one benchmark among sampled (not greedy) rows."""
    chosen = (pc.field("benchmark") == benchmark) & ~pc.field("greedy")
    return _per_problem(samples.filter(chosen))


def _bootstrap(name: str, problems: ProblemTable, resamples: int) -> dict[str, np.ndarray]:
    """Bootstrap means [B] of accuracy, pass@k and tokens, from the same resampled problems."""
    # The stream is the benchmark's own: an interval does not depend on what else was evaluated.
    rng = np.random.default_rng([len(problems.correct_N), crc32(name.encode())])
    weights_BN = bootstrap_weights(len(problems.correct_N), resamples, rng)
    return {
        "avg": weights_BN @ problems.accuracy_N,
        "pass": weights_BN @ (problems.correct_N > 0),
        "tokens": weights_BN @ problems.tokens_N,
    }


def _benchmark_result(
    samples: pa.Table,
    problems: ProblemTable,
    boot: Mapping[str, np.ndarray],
    unparsable: Sequence[str],
) -> BenchmarkResult:
    pass_J = pass_at_each(problems.correct_N, problems.samples).mean(axis=0)
    return BenchmarkResult(
        n=len(problems.problem_ids),
        k=problems.samples,
        avg_at_k=float(problems.accuracy_N.mean()),
        avg_at_k_stderr=standard_error(problems.accuracy_N),
        avg_at_k_interval=interval(boot["avg"]),
        pass_at_k=float(pass_J[-1]),
        pass_at_k_interval=interval(boot["pass"]),
        pass_at_j={str(j): float(value) for j, value in enumerate(pass_J, start=1)},
        mean_tokens=float(problems.tokens_N.mean()),
        mean_tokens_interval=interval(boot["tokens"]),
        **_pooled(samples),
        verdicts=dict(sorted(Counter(samples["verdict"].to_pylist()).items())),
        unparsable_answers=tuple(unparsable),
    )


def _mean_result(
    samples: pa.Table,
    results: Mapping[str, BenchmarkResult],
    boots: Mapping[str, Mapping[str, np.ndarray]],
) -> MeanResult:
    each = list(results.values())
    errors = [result.avg_at_k_stderr for result in each]
    pooled = _pooled(samples)
    return MeanResult(
        benchmarks=tuple(results),
        avg_at_k=_mean([result.avg_at_k for result in each]),
        avg_at_k_stderr=None if None in errors else float(np.linalg.norm(errors) / len(errors)),
        avg_at_k_interval=interval(np.mean([boot["avg"] for boot in boots.values()], axis=0)),
        pass_at_k=_mean([result.pass_at_k for result in each]),
        pass_at_k_interval=interval(np.mean([boot["pass"] for boot in boots.values()], axis=0)),
        mean_tokens=_mean([result.mean_tokens for result in each]),
        mean_tokens_interval=interval(np.mean([b["tokens"] for b in boots.values()], axis=0)),
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


def _share(values: Sequence[str], wanted: str) -> float:
    return sum(value == wanted for value in values) / len(values)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _results_from_json(document: Mapping[str, Any]) -> Results:
    benchmarks = {
        name: BenchmarkResult(**_tuples(fields)) for name, fields in document["benchmarks"].items()
    }
    return Results(benchmarks, MeanResult(**_tuples(document["mean"])))


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
