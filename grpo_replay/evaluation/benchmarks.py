"""The benchmarks by name, and how their problems are read. Only the tiny ones are shipped."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpo_replay.errors import DatasetError, RecipeError, did_you_mean
from grpo_replay.prompts.sources import (
    ANSWER_FIELDS,
    PROBLEM_FIELDS,
    MappingRows,
    ProblemRows,
    ProblemStatement,
    answer_after,
    checked_column,
    column_of,
    known_field,
    problem_statement,
    read_hub_rows,
    read_local_rows,
    statement_text,
    unique_ids,
)
from grpo_replay.recipe import EvalSection, PromptsSection
from grpo_replay.recipe.input_sections import ANSWER_MARKER
from grpo_replay.recipe.layers import DATA_SUFFIXES
from grpo_replay.tiny import TASKS, benchmark_problems
from grpo_replay.types import Row

WAVE_SAMPLES = 8
"""Samples per problem in one wave; each wave uses the next seed (paper A)."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A set of problems with verifiable answers, and its source.

    `source` is a hub dataset, a file, or "builtin". `samples` is k, the completions per problem;
    `problems` is the size of the published set. A `temperature` here overrides the recipe's. The
    name of its file in `eval.data_folder` is `file_stem` if given, else the benchmark's name.
    """

    name: str
    title: str
    source: str
    samples: int
    problem_field: str = "problem"
    answer_field: str = "answer"
    id_field: str | None = None
    split: str = "train"
    problems: int | None = None
    temperature: float | None = None
    file_stem: str | None = None
    answer_marker: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a benchmark; `problem_id` is unique within it. `row` has all its fields, for
    verifiers of the user."""

    problem_id: str
    problem: ProblemStatement
    answer: str
    row: Row = field(default_factory=dict, compare=False)

    @property
    def text(self) -> str:
        """The problem, or the content of its last message."""
        return statement_text(self.problem)


def _math_arena(name: str, title: str, dataset: str, problems: int) -> Benchmark:
    return Benchmark(
        name, title, f"MathArena/{dataset}", 16, id_field="problem_idx", problems=problems
    )


_PAPER = (
    Benchmark(
        *("math500", "MATH-500", "HuggingFaceH4/MATH-500", 8),
        id_field="unique_id",
        split="test",
        problems=500,
    ),
    _math_arena("aime25", "AIME25", "aime_2025", 30),
    _math_arena("aime26", "AIME26", "aime_2026", 30),
    _math_arena("hmmt_feb25", "HMMT-F25", "hmmt_feb_2025", 30),
    _math_arena("hmmt_feb26", "HMMT-F26", "hmmt_feb_2026", 33),
)


def _paper_b(name: str, title: str, source: str, split: str, **fields: str) -> Sequence[Benchmark]:
    """One set under both settings of paper B: pass@1 at T = 0.1 and pass@k at T = 1."""
    settings = (("pass1", "T 0.1", 1, 0.1), ("passk", "T 1", 16, 1.0))
    return [
        Benchmark(
            f"{name}_{suffix}", f"{title}, {words}", source, samples, split=split, problems=500,
            temperature=temperature, **fields,
        )
        for suffix, words, samples, temperature in settings
    ]  # fmt: skip


_PAPER_B = (
    *_paper_b(
        *("math", "MATH", "HuggingFaceH4/MATH-500", "test"),
        id_field="unique_id",
        file_stem="math500",
    ),
    # The dataset has a single split; paper B's recipes train on the other rows.
    *_paper_b(
        *("openr1", "OpenR1", "open-r1/OpenR1-Math-220k", "train[-500:]"),
        id_field="uuid",
        file_stem="openr1",
    ),
)
_TINY = tuple(
    Benchmark(name, name, "builtin", 4, id_field="problem_id")
    for task in TASKS.values()
    for name in task.benchmarks
)

BENCHMARKS: Mapping[str, Benchmark] = {b.name: b for b in (*_PAPER, *_PAPER_B, *_TINY)}
GROUPS: Mapping[str, tuple[str, ...]] = {
    "paper": tuple(b.name for b in _PAPER),
    "paper_b": tuple(b.name for b in _PAPER_B),
    **{name.replace("-", "_"): task.benchmarks for name, task in TASKS.items()},
}


def find_benchmarks(
    settings: EvalSection, prompts: PromptsSection | None = None
) -> tuple[Benchmark, ...]:
    """The distinct benchmarks named by `settings.benchmarks`, in order, with groups expanded. A
    file has the fields of `prompts` where it has these columns.

    Raises RecipeError for an unknown name, and for two different sources under one name.
    """
    found: dict[str, Benchmark] = {}
    for word in settings.benchmarks:
        for benchmark in _named(word, prompts or PromptsSection()):
            known = found.setdefault(benchmark.name, benchmark)
            if known != benchmark:
                raise RecipeError(
                    f"eval.benchmarks: {known.source} and {benchmark.source} are both called "
                    f"{benchmark.name!r} in the report: rename one of the files"
                )
    return tuple(found.values())


def load_problems(benchmark: Benchmark, settings: EvalSection) -> tuple[Problem, ...]:
    """The problems of a benchmark, in the order of its source.

    Raises DatasetError if it cannot be read or is empty, if a field is missing, if an answer is
    neither text nor a number, or if an id occurs twice.
    """
    rows = _open(benchmark, settings)
    if len(rows) == 0:
        raise DatasetError(f"benchmark {benchmark.name!r}: {benchmark.source} has no problems")
    if benchmark.source.endswith(DATA_SUFFIXES):
        benchmark = _with_columns_of(rows, benchmark)
    problems = checked_column(rows, benchmark.problem_field, problem_statement)
    as_answer = answer_after(benchmark.answer_marker)
    answers = checked_column(rows, benchmark.answer_field, as_answer)
    ids = unique_ids(rows, benchmark.id_field)
    if settings.max_problems is None and benchmark.problems not in (None, len(rows)):
        logger.warning(
            "benchmark %r has %d problems here, but the published one has %d: the numbers are not "
            "comparable with published ones", benchmark.name, len(rows), benchmark.problems,
        )  # fmt: skip
    return tuple(map(Problem, ids, problems, answers, map(rows.row, range(len(rows)))))


def _with_columns_of(rows: ProblemRows, benchmark: Benchmark) -> Benchmark:
    """A file without the columns of the training prompts has those of `PROBLEM_FIELDS` and
    `ANSWER_FIELDS`, and no id."""
    id_field = benchmark.id_field
    has_id = id_field is not None and column_of(id_field, rows.names) in rows.names
    return replace(
        benchmark,
        problem_field=known_field(benchmark.problem_field, PROBLEM_FIELDS, rows.names),
        answer_field=known_field(benchmark.answer_field, ANSWER_FIELDS, rows.names),
        id_field=id_field if has_id else None,
    )


def _named(word: str, prompts: PromptsSection) -> Sequence[Benchmark]:
    if word in GROUPS:
        return [BENCHMARKS[name] for name in GROUPS[word]]
    if word in BENCHMARKS:
        return [BENCHMARKS[word]]
    if word.endswith(DATA_SUFFIXES):
        name = Path(word).stem
        if name == "mean":
            raise RecipeError(
                f"eval.benchmarks: {word} would appear as 'mean' in the report, the name of the "
                "mean over all benchmarks: rename the file"
            )
        fields = (prompts.problem_field, prompts.answer_field, prompts.id_field)
        marker = ANSWER_MARKER
        return [Benchmark(name, name, word, WAVE_SAMPLES, *fields, answer_marker=marker)]
    known = dict.fromkeys([*GROUPS, *BENCHMARKS])
    raise RecipeError(
        f"eval.benchmarks: no benchmark {word!r}{did_you_mean(word, known)}; use one of "
        f"{', '.join(known)}, or a file (.jsonl, .csv, .parquet, …)"
    )


def _open(benchmark: Benchmark, settings: EvalSection) -> ProblemRows:
    limit = settings.max_problems
    if benchmark.source == "builtin":
        return MappingRows(benchmark_problems(benchmark.name)[:limit], benchmark.name)
    if (file := local_file(benchmark, settings)) is not None:
        return read_local_rows(str(file), limit)
    try:
        return read_hub_rows(benchmark.source, limit, options={"split": benchmark.split})
    except DatasetError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise DatasetError(
            f"benchmark {benchmark.name!r} cannot be read from the hub: {reason}. "
            + _what_to_download(benchmark)
        ) from error


def local_file(benchmark: Benchmark, settings: EvalSection) -> Path | None:
    """The file that a benchmark is read from; None if it comes from the hub or is built in.

    Raises DatasetError if the data folder does not contain it.
    """
    if benchmark.source == "builtin":
        return None
    if benchmark.source.endswith(DATA_SUFFIXES):
        return Path(benchmark.source)
    if settings.data_folder is None:
        return None
    folder = Path(settings.data_folder)
    stem = benchmark.file_stem or benchmark.name
    candidates = [folder / f"{stem}{suffix}" for suffix in (".jsonl", ".parquet")]
    for path in candidates:
        if path.is_file():
            return path
    raise DatasetError(
        f"eval.data_folder {folder}: no {candidates[0].name} or {candidates[1].name} in it. "
        + _what_to_download(benchmark)
    )


def _what_to_download(benchmark: Benchmark) -> str:
    fields = [benchmark.id_field, benchmark.problem_field, benchmark.answer_field]
    stem = benchmark.file_stem or benchmark.name
    return (
        f"Download dataset {benchmark.source} on a machine with access (hf download --repo-type "
        f"dataset {benchmark.source} --local-dir DIR), put the rows of its split "
        f"{benchmark.split!r} into {stem}.jsonl or {stem}.parquet with the "
        f"fields {', '.join(field for field in fields if field)}, and set eval.data_folder "
        "(--data-folder) to the folder of that file"
    )
