"""The evaluation report: results and settings as JSON, per-sample rows as Parquet; and the check
that two reports are comparable."""

import json
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from grpo_replay.errors import EvaluationFileError, OutputDirectoryError, UsageError, no_such_path
from grpo_replay.evaluation.statistics import Results
from grpo_replay.recipe import BUILTIN_VERIFIERS
from grpo_replay.storage.atomic import named_if_unwritable, write_text_whole, written_whole
from grpo_replay.types import FAILED

REPORT_VERSION = 4

SAME_SETTINGS = (
    *("temperature", "top_p", "max_completion_length", "reward", "template"),
    *("system_prompt", "user_template", "max_problems", "stop_tokens"),
    *("chat_template_kwargs", "correct_score", "special_tokens"),
)
"""Settings that must agree, so that a difference can only come from the models. Temperatures are
compared by benchmark, and a function of the user by the content of its file."""

VERIFIER_PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy")


_RESULTS = TypeAdapter(Results)


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationReport:
    """The results of an evaluation.

    `greedy` is None without a greedy evaluation; `samples` are the per-sample rows, None if not
    read.
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
        """Return a sentence on the completions, sampled or greedy, for which the user's function
        failed; they count as not correct. None if there are none, and for a built-in verifier."""
        if self.verifier in BUILTIN_VERIFIERS:
            return None
        both = [results for results in (self.sampled, self.greedy) if results is not None]
        counts = [r.verdicts for results in both for r in results.benchmarks.values()]
        verdicts = sum(map(Counter, counts), Counter[str]())
        missing = {status: verdicts[status] for status in FAILED if verdicts[status]}
        if not missing:
            return None
        kinds = ", ".join(f"{count:,} {status}" for status, count in missing.items())
        total, share = verdicts.total(), sum(missing.values()) / verdicts.total()
        return (
            f"{self.verifier} gave no verdict for {sum(missing.values()):,} of {total:,} "
            f"completions ({100 * share:.1f} %: {kinds}): they count as not correct, so the "
            "accuracies are lower bounds"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document, without the per-sample rows."""
        return {
            "schema_version": REPORT_VERSION,
            "model": self.model,
            "settings": self.settings,
            "versions": self.versions,
            **asdict(self.sampled),
            "greedy": None if self.greedy is None else asdict(self.greedy),
        }

    def write(self, path: Path) -> None:
        """Write the per-sample rows (`.parquet`), then `path` (JSON), both atomically. An existing
        report is removed first, so that the two files are never from different evaluations.

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
    """Returns the path of a report's per-sample rows."""
    return report_path.with_suffix(".parquet")


def read_report(path: Path, with_samples: bool = True, with_texts: bool = True) -> EvaluationReport:
    """Read the report at `path`; `with_samples` adds the per-sample rows, if their file exists, and
    `with_texts` the completions in them.

    Raises EvaluationFileError for a file that is no report of this version.
    """
    if not path.exists():
        raise EvaluationFileError(no_such_path(path))
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if (version := document["schema_version"]) != REPORT_VERSION:
            raise ValueError(f"its schema_version is {version!r}, not {REPORT_VERSION}")
        sections = {name: document[name] for name in ("model", "settings", "versions")}
        sampled, greedy = _RESULTS.validate_python(document), document["greedy"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        # The repr of a decoding error has all the bytes of the file.
        why = str(error) if isinstance(error, UnicodeDecodeError) else repr(error)
        raise EvaluationFileError(
            f"{path}: not an evaluation file of this version: {why}; make one with grpo-replay "
            "eval, which writes NAME.json"
        ) from error
    return EvaluationReport(
        **sections,
        sampled=sampled,
        greedy=greedy and _RESULTS.validate_python(greedy),
        samples=_read_samples(samples_path(path), with_texts) if with_samples else None,
    )


def _read_samples(path: Path, with_texts: bool) -> pa.Table | None:
    """The rows of a per-sample file, None if it is missing; the texts are most of its size."""
    columns = [name for name in SAMPLE_SCHEMA.names if with_texts or name != "completion_text"]
    return pq.read_table(path, columns=columns) if path.is_file() else None


def generations_parent(report_path: Path) -> Path:
    """Returns the folder that contains the cached generations of an evaluation."""
    return report_path.with_suffix(".generations")


def check_output(output: Path) -> None:
    """Raises UsageError unless the name ends in .json, and OutputDirectoryError if the folder is
    not writable or a file would be replaced that is not an evaluation's."""
    if output.suffix != ".json":
        raise UsageError(
            f"--output {output}: name a .json file; the per-sample rows (.parquet) are written "
            "next to it"
        )
    rows, reason = samples_path(output), ""
    if output.exists():
        try:
            read_report(output, with_samples=False)
        except EvaluationFileError as error:
            reason = str(error)
    elif rows.exists():
        reason = f"{rows} would be replaced, but its report {output.name} is missing"
    if reason:
        raise OutputDirectoryError(f"{reason}; choose another name with --output, or remove it")
    with named_if_unwritable(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        tempfile.NamedTemporaryFile(dir=output.parent, prefix=output.name).close()


def temperatures_used(settings: Mapping[str, Any], names: Collection[str]) -> list[float]:
    """Returns the temperatures of these benchmarks, ascending."""
    return sorted(set(_temperatures(settings, names).values()))


def _temperatures(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns the temperature of each benchmark: its own, or the shared one."""
    described, shared = settings["benchmarks"], settings["temperature"]
    return {name: described[name].get("temperature", shared) for name in sorted(names)}


def differing_settings(
    a: Mapping[str, Any], b: Mapping[str, Any], names: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value in a, value in b) of `SAME_SETTINGS` that differ for these benchmarks."""
    values_a, values_b = (_compared(settings, names) for settings in (a, b))
    for key, value in values_a.items():
        if value != values_b[key]:
            yield key, value, values_b[key]


def _compared(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    compared = {key: settings.get(key) for key in SAME_SETTINGS}
    compared["temperature"] = _temperatures(settings, names)
    if "reward_sha256" in settings:  # wherever the file of the function is
        function = settings["reward"].rpartition(":")[2]
        compared["reward"] = f"{function} of a file with SHA-256 {settings['reward_sha256']}"
    return compared


def refuse_incomparable(name_a: str, a: EvaluationReport, name_b: str, b: EvaluationReport) -> None:
    """Raises EvaluationFileError, which names the difference, unless both have the same benchmarks,
    problems, answers and `SAME_SETTINGS`."""
    names_a, names_b = set(a.sampled.benchmarks), set(b.sampled.benchmarks)
    if names_a != names_b:
        raise EvaluationFileError(
            f"{name_a} evaluates {', '.join(sorted(names_a))}, but {name_b} "
            f"{', '.join(sorted(names_b))}: means over different benchmarks "
            "cannot be compared; evaluate both on the same (--benchmark)"
        )
    for key, one, other in differing_settings(a.settings, b.settings, names_a):
        raise EvaluationFileError(
            f"{name_a} has {key} {one!r}, but {name_b} {other!r}: evaluate both under the same "
            "settings"
        )
    for benchmark in a.sampled.benchmarks:
        one, other = (report.settings["benchmarks"][benchmark] for report in (a, b))
        if one["problems_sha256"] != other["problems_sha256"]:
            raise EvaluationFileError(
                f"{benchmark} has other problems or answers in {name_a} than in {name_b}: evaluate "
                "both on the same"
            )


def are_comparable(a: EvaluationReport, b: EvaluationReport) -> bool:
    """Returns whether both evaluate the same problems under the same settings."""
    try:
        refuse_incomparable("A", a, "B", b)
    except EvaluationFileError:
        return False
    return True


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
        ("score", pa.float64()),  # of a function of the user, else null
    ],
    metadata={"grpo_replay_evaluation_samples": "2"},
)
_KEY = [("greedy", "ascending"), ("problem_index", "ascending"), ("sample", "ascending")]


def merge(tables: Sequence[pa.Table], benchmarks: Sequence[str]) -> pa.Table:
    """Merge all ranks' rows, ordered by benchmark as given, sampled before greedy, problem, sample.

    The order does not depend on how the problems were distributed over ranks.
    """
    table = pa.concat_tables(tables)
    parts = [table.filter(pc.field("benchmark") == name).sort_by(_KEY) for name in benchmarks]
    return pa.concat_tables(parts).combine_chunks()
