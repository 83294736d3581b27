"""The evaluation report: results and settings as JSON, per-sample rows as Parquet (schema, files);
and whether two reports can be compared."""

import json
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from grpo_replay.errors import EvaluationFileError, OutputDirectoryError, UsageError
from grpo_replay.evaluation.statistics import Results
from grpo_replay.recipe import BUILTIN_VERIFIERS
from grpo_replay.storage.atomic import named_if_unwritable, write_text_whole, written_whole
from grpo_replay.types import FAILED

REPORT_VERSION = 3

SAME_SETTINGS = (
    *("temperature", "top_p", "max_completion_length", "reward", "template"),
    *("system_prompt", "user_template", "max_problems", "stop_tokens"),
    *("chat_template_kwargs", "correct_score"),
)
"""Settings that must agree, so that a difference can only come from the models. Temperatures are
compared as `temperatures_used`, and a function of the user by its file, if both reports have its
SHA-256."""

VERIFIER_PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy")


_RESULTS = TypeAdapter(Results)


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationReport:
    """The results of an evaluation.

    `greedy` is None without a greedy evaluation; `samples` are the per-sample rows, None if the
    report was read without them.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    sampled: Results
    greedy: Results | None = None
    samples: pa.Table | None = None

    @property
    def verifier(self) -> str:
        """The verifier of `sampled` and `greedy`."""
        return str(self.settings["reward"])

    def accuracies(self) -> dict[str, float]:
        """avg@k of every benchmark as a fraction, and `mean`."""
        return self.sampled.accuracies()

    def standard_errors(self) -> dict[str, float | None]:
        """Standard errors of `accuracies`, over problems."""
        return self.sampled.standard_errors()

    def greedy_accuracies(self) -> dict[str, float] | None:
        """Greedy accuracy of every benchmark, and `mean`; None without a greedy evaluation."""
        return None if self.greedy is None else self.greedy.accuracies()

    def missing_verdicts(self) -> str | None:
        """One sentence if the user's own function gave no verdict for some of the completions,
        sampled or greedy, which then count as not correct; None if it always did. (A completion
        that a built-in verifier gives up on is incorrect.)"""
        if self.verifier in BUILTIN_VERIFIERS:
            return None
        found: Counter[str] = Counter()
        for results in (self.sampled, self.greedy):
            for result in results.benchmarks.values() if results else ():
                found.update(result.verdicts)
        missing = {status: found[status] for status in FAILED if found[status]}
        if not missing:
            return None
        kinds = ", ".join(f"{count:,} {status}" for status, count in missing.items())
        share = sum(missing.values()) / found.total()
        return (
            f"{self.verifier} gave no verdict for {sum(missing.values()):,} of {found.total():,} "
            f"completions ({100 * share:.1f} %: {kinds}): they count as not correct, so the "
            "accuracies are lower bounds"
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON document, without the per-sample rows."""
        return {
            "schema_version": REPORT_VERSION,
            "model": self.model,
            "settings": self.settings,
            "versions": self.versions,
            **asdict(self.sampled),
            "greedy": None if self.greedy is None else asdict(self.greedy),
        }

    def write(self, path: Path) -> None:
        """Write the per-sample rows (`.parquet`) and last `path` (JSON), both atomically; a report
        that was there goes first, so that the two are never of two evaluations.

        Raises OutputDirectoryError.
        """
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
        with named_if_unwritable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            if self.samples is not None:
                with written_whole(samples_path(path)) as temporary:
                    pq.write_table(self.samples, temporary, compression="zstd")
            write_text_whole(path, text + "\n")


def samples_path(report_path: Path) -> Path:
    """The path of a report's per-sample rows."""
    return report_path.with_suffix(".parquet")


def read_report(path: Path, with_samples: bool = True, with_texts: bool = True) -> EvaluationReport:
    """The report at `path`; `with_samples` adds the per-sample rows, if their file exists, and
    `with_texts` the completions in them.

    Raises EvaluationFileError for a file that is missing, damaged or of another version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationFileError(f"{path}: not a readable evaluation file: {error}") from error
    found = document.get("schema_version") if isinstance(document, dict) else None
    if found != REPORT_VERSION:
        raise EvaluationFileError(
            f"{path}: not an evaluation file of this version (schema_version is {found!r}, "
            f"expected {REPORT_VERSION}): make one with grpo-replay eval"
        )
    try:
        greedy = document["greedy"]
        report = EvaluationReport(
            model=document["model"],
            settings=document["settings"],
            versions=document["versions"],
            sampled=_RESULTS.validate_python(document),
            greedy=None if greedy is None else _RESULTS.validate_python(greedy),
        )
    except (KeyError, ValueError) as error:
        raise EvaluationFileError(
            f"{path}: damaged evaluation file: {error!r}; restore it, or evaluate again"
        ) from error
    rows_path = samples_path(path)
    if not (with_samples and rows_path.is_file()):
        return report
    return replace(report, samples=read_samples(rows_path, with_texts))


def generations_parent(report_path: Path) -> Path:
    """The folder that contains the cached generations of an evaluation."""
    return report_path.with_suffix(".generations")


def check_output(output: Path) -> None:
    """Creates nothing.

    Raises UsageError unless the name ends in .json, and OutputDirectoryError if another kind of
    file would be replaced or the folder is not writable.
    """
    if output.suffix != ".json":
        raise UsageError(
            f"--output {output}: name a .json file; the per-sample rows (.parquet) are written "
            "next to it"
        )
    with named_if_unwritable(output):
        _refuse_other_files(output)
        folder = next(each for each in output.absolute().parents if each.exists())
        tempfile.NamedTemporaryFile(dir=folder, prefix=output.name).close()
    generations = generations_parent(output)
    with named_if_unwritable(generations):
        if generations.exists():
            tempfile.NamedTemporaryFile(dir=generations).close()


def _refuse_other_files(output: Path) -> None:
    """Only files of an earlier evaluation are replaced; a killed one may have left its rows."""
    path = output
    try:
        if output.exists():
            read_report(output, with_samples=False)
        path = samples_path(output)
        if path.exists():
            _check_columns(path)
    except EvaluationFileError as error:
        raise OutputDirectoryError(
            f"{path} would be replaced, but it is not of an evaluation: choose another name with "
            f"--output, or remove it ({error})"
        ) from error


def temperatures_used(settings: Mapping[str, Any], names: Collection[str]) -> list[float]:
    """The temperatures that these benchmarks were sampled at, ascending."""
    return sorted(set(_temperatures(settings, names).values()) - {None})


def _temperatures(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """By benchmark. None where the file does not say it."""
    described, shared = settings.get("benchmarks", {}), settings.get("temperature")
    return {name: described.get(name, {}).get("temperature", shared) for name in names}


def differing_settings(
    a: Mapping[str, Any], b: Mapping[str, Any], names: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """(key, value in a, value in b) of the `SAME_SETTINGS` that differ for these benchmarks."""
    for key in SAME_SETTINGS:
        ours, theirs = a.get(key), b.get(key)
        if key == "temperature":
            ours, theirs = (_shown_temperatures(each, names) for each in (a, b))
        if key == "reward" and "reward_sha256" in a and "reward_sha256" in b:
            ours, theirs = (_function_and_digest(each) for each in (a, b))
        if ours != theirs:
            yield key, ours, theirs


def _shown_temperatures(settings: Mapping[str, Any], names: Collection[str]) -> Any:
    """One number, or one for each benchmark."""
    each = _temperatures(settings, names)
    return each if len(set(each.values())) > 1 else next(iter(each.values()))


def _function_and_digest(settings: Mapping[str, Any]) -> str:
    """The function of `file.py:function`, and the file by its content."""
    name = str(settings["reward"]).rpartition(":")[2]
    return f"{name} of a file with SHA-256 {settings['reward_sha256']}"


def refuse_incomparable(name_a: str, a: EvaluationReport, name_b: str, b: EvaluationReport) -> None:
    """Raises EvaluationFileError unless problems and `SAME_SETTINGS` agree."""
    ours, theirs = set(a.sampled.benchmarks), set(b.sampled.benchmarks)
    if ours != theirs:
        raise EvaluationFileError(
            f"{name_a} evaluates {_listed(ours)}, but {name_b} {_listed(theirs)}: means over "
            "different benchmarks cannot be compared; evaluate both on the same (--benchmark)"
        )
    for key, one, other in differing_settings(a.settings, b.settings, ours):
        raise EvaluationFileError(
            f"{name_a} has {key} {one!r}, but {name_b} {other!r}: evaluate both under the same "
            "settings"
        )
    for benchmark in a.sampled.benchmarks:
        one, other = (each.settings["benchmarks"][benchmark] for each in (a, b))
        if one["problems_sha256"] != other["problems_sha256"]:
            raise EvaluationFileError(
                f"{benchmark} has other problems or answers in {name_a} than in {name_b}: evaluate "
                "both on the same"
            )


def are_comparable(a: EvaluationReport, b: EvaluationReport) -> bool:
    """True if both evaluate the same problems under the same settings."""
    try:
        refuse_incomparable("A", a, "B", b)
    except EvaluationFileError:
        return False
    return True


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


SAMPLE_SCHEMA = pa.schema(
    [
        ("benchmark", pa.string()),
        ("problem_index", pa.int32()),  # 0-based, in the order of the benchmark
        ("problem_id", pa.string()),
        ("greedy", pa.bool_()),
        ("sample", pa.int32()),  # 0-based; waves of eight share a base seed
        ("seed", pa.int64()),
        ("answer", pa.string()),
        ("completion_text", pa.large_string()),  # may exceed 2 GiB in total
        ("tokens", pa.int32()),  # of the completion, end of sequence included
        ("finish_reason", pa.string()),
        ("verdict", pa.string()),
        ("correct", pa.bool_()),
    ],
    metadata={"grpo_replay_evaluation_samples": "2"},
)
_KEY = [("greedy", "ascending"), ("problem_index", "ascending"), ("sample", "ascending")]


def to_bytes(table: pa.Table) -> bytes:
    """The table as an Arrow stream, to send between ranks."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def merge(payloads: Sequence[bytes], benchmarks: Sequence[str]) -> pa.Table:
    """The rows of all ranks: by benchmark as given, sampled before greedy, problem and sample.

    The order does not depend on how the problems were distributed over ranks.
    """
    table = pa.concat_tables(pa.ipc.open_stream(payload).read_all() for payload in payloads)
    parts = [table.filter(pc.field("benchmark") == name).sort_by(_KEY) for name in benchmarks]
    return pa.concat_tables(parts).combine_chunks()


def read_samples(path: Path, with_texts: bool = True) -> pa.Table:
    """The rows of a per-sample file; the texts are most of its size. Raises EvaluationFileError for
    any other file."""
    _check_columns(path)
    names = SAMPLE_SCHEMA.names
    columns = [name for name in names if with_texts or name != "completion_text"]
    try:
        return pq.read_table(path, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _check_columns(path: Path) -> None:
    """Raises EvaluationFileError unless the columns are those of a per-sample file."""
    try:
        names = pq.read_schema(path).names
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    if names[: len(SAMPLE_SCHEMA)] != SAMPLE_SCHEMA.names:
        raise EvaluationFileError(
            f"{path}: not a per-sample file, whose columns are {', '.join(SAMPLE_SCHEMA.names)}; "
            f"found {', '.join(names)}"
        )


def _unreadable(path: Path, error: Exception) -> EvaluationFileError:
    return EvaluationFileError(f"{path}: not a readable per-sample file: {error}")
