"""The benchmarks by name, and how their problems are read. None but the tiny ones is shipped."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.recipe import EvalSection
from grpo_replay.tiny.problems import BENCHMARKS as TINY_BENCHMARKS
from grpo_replay.tiny.problems import benchmark_problems

WAVE_SAMPLES = 8
"""Samples of one problem that share a wave; each wave has the next seed (paper A)."""

FILE_SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A set of problems with verifiable answers, and where it is read from.

    `source` is a hub dataset, a file, or "builtin". `samples` is k, completions per problem.
    """

    name: str
    title: str
    source: str
    samples: int
    problem_field: str = "problem"
    answer_field: str = "answer"
    id_field: str | None = None
    split: str = "train"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a benchmark; `problem_id` is unique within it."""

    problem_id: str
    problem: str
    answer: str


_PAPER = (
    Benchmark(
        "math500", "MATH-500", "HuggingFaceH4/MATH-500", 8, id_field="unique_id", split="test"
    ),
    Benchmark("aime25", "AIME25", "MathArena/aime_2025", 16, id_field="problem_idx"),
    Benchmark("aime26", "AIME26", "MathArena/aime_2026", 16, id_field="problem_idx"),
    Benchmark("hmmt_feb25", "HMMT-F25", "MathArena/hmmt_feb_2025", 16, id_field="problem_idx"),
    Benchmark("hmmt_feb26", "HMMT-F26", "MathArena/hmmt_feb_2026", 16, id_field="problem_idx"),
)
_TINY = tuple(
    Benchmark(name, name, "builtin", 4, id_field="problem_id") for name in TINY_BENCHMARKS
)

BENCHMARKS: Mapping[str, Benchmark] = {b.name: b for b in (*_PAPER, *_TINY)}
GROUPS: Mapping[str, tuple[str, ...]] = {
    "paper": tuple(b.name for b in _PAPER),
    "tiny": tuple(b.name for b in _TINY),
}


def find_benchmarks(settings: EvalSection) -> tuple[Benchmark, ...]:
    """The benchmarks that `settings.benchmarks` names, groups expanded, each once, in order.

    Raises RecipeError for an unknown name, and for two different sources under one name.
    """
    found: dict[str, Benchmark] = {}
    for word in settings.benchmarks:
        for benchmark in _named(word, settings):
            known = found.setdefault(benchmark.name, benchmark)
            if known != benchmark:
                raise RecipeError(
                    f"eval.benchmarks: {known.source} and {benchmark.source} are both called "
                    f"{benchmark.name!r} in the report: rename one of the files"
                )
    return tuple(found.values())


def load_problems(benchmark: Benchmark, settings: EvalSection) -> tuple[Problem, ...]:
    """The problems of a benchmark, in the order of its source.

    Raises DatasetError if it cannot be read, a field is missing, an answer is neither text nor a
    whole number, or an id occurs twice.
    """
    place, rows = _read(benchmark, settings)
    if settings.max_problems is not None:
        rows = rows[: settings.max_problems]
    if not rows:
        raise DatasetError(f"{place}: benchmark {benchmark.name!r} has no problems")
    problems = tuple(
        _problem(benchmark, row, f"{place}:{number}", str(number - 1))
        for number, row in enumerate(rows, start=1)
    )
    _check_ids(problems, place)
    return problems


def _named(word: str, settings: EvalSection) -> Sequence[Benchmark]:
    if word in GROUPS:
        return [BENCHMARKS[name] for name in GROUPS[word]]
    if word in BENCHMARKS:
        return [BENCHMARKS[word]]
    if word.endswith(FILE_SUFFIXES):
        fields = (settings.problem_field, settings.answer_field, settings.id_field)
        return [Benchmark(Path(word).stem, Path(word).stem, word, WAVE_SAMPLES, *fields)]
    known = [*GROUPS, *BENCHMARKS]
    close = difflib.get_close_matches(word, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise RecipeError(
        f"eval.benchmarks: no benchmark {word!r}{hint}; there are {', '.join(known)}, and your own "
        "as a path that ends in .jsonl or .parquet"
    )


def _read(benchmark: Benchmark, settings: EvalSection) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Where the rows come from, for messages, and the rows."""
    if benchmark.source == "builtin":
        return benchmark.name, benchmark_problems(benchmark.name)
    if benchmark.source.endswith(FILE_SUFFIXES):
        return benchmark.source, read_rows(Path(benchmark.source))
    if settings.data_folder is not None:
        path = _local_file(benchmark, Path(settings.data_folder))
        return str(path), read_rows(path)
    return f"{benchmark.source} ({benchmark.split})", _from_hub(benchmark)


def _local_file(benchmark: Benchmark, folder: Path) -> Path:
    candidates = [folder / f"{benchmark.name}{suffix}" for suffix in FILE_SUFFIXES]
    for path in candidates:
        if path.is_file():
            return path
    raise DatasetError(
        f"eval.data_folder {folder}: no {candidates[0].name} or {candidates[1].name} in it. "
        + _what_to_download(benchmark)
    )


def _from_hub(benchmark: Benchmark) -> Sequence[Mapping[str, Any]]:
    import datasets

    try:
        return list(datasets.load_dataset(benchmark.source, split=benchmark.split))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DatasetError(
            f"benchmark {benchmark.name!r} cannot be read from the hub: {reason}. "
            + _what_to_download(benchmark)
        ) from error


def _what_to_download(benchmark: Benchmark) -> str:
    fields = [benchmark.id_field, benchmark.problem_field, benchmark.answer_field]
    return (
        f"Download dataset {benchmark.source} where there is access (hf download --repo-type "
        f"dataset {benchmark.source}), put the rows of its split {benchmark.split!r} into "
        f"{benchmark.name}.jsonl or {benchmark.name}.parquet with the fields "
        f"{', '.join(field for field in fields if field)}, and name the folder as "
        "eval.data_folder (--data-folder)"
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL or Parquet file. Raises DatasetError naming file and line."""
    try:
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                return pq.read_table(path).to_pylist()
            except pa.ArrowException as error:
                raise DatasetError(f"{path}: not a readable Parquet file: {error}") from error
        with path.open(encoding="utf-8") as lines:
            return list(_json_rows(lines, path))
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from error


def _json_rows(lines: Iterable[str], path: Path) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DatasetError(f"{path}:{number}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise DatasetError(f"{path}:{number}: expected an object, found {line.strip()[:60]}")
        yield row


def _problem(benchmark: Benchmark, row: Mapping[str, Any], place: str, number: str) -> Problem:
    for field in (benchmark.problem_field, benchmark.answer_field, benchmark.id_field):
        if field is not None and row.get(field) is None:
            raise DatasetError(f"{place}: no field {field!r}; the row has {', '.join(row)}")
    answer = row[benchmark.answer_field]
    # AIME answers are integers in the dataset: verifiers compare text.
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        raise DatasetError(
            f"{place}: field {benchmark.answer_field!r} is {answer!r}; an answer is text or a "
            "whole number"
        )
    problem_id = number if benchmark.id_field is None else str(row[benchmark.id_field])
    return Problem(problem_id, str(row[benchmark.problem_field]), str(answer))


def _check_ids(problems: Sequence[Problem], place: str) -> None:
    seen: set[str] = set()
    for problem in problems:
        if problem.problem_id in seen:
            raise DatasetError(f"{place}: two problems have the id {problem.problem_id!r}")
        seen.add(problem.problem_id)
