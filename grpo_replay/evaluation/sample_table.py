"""The per-sample rows of an evaluation: schema, files, and verdicts of other verifiers."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_replay.errors import EvaluationFileError
from grpo_replay.storage.atomic import written_whole

SAMPLES_VERSION = "2"

_VERSION_KEY = "grpo_replay_evaluation_samples"

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
    metadata={_VERSION_KEY: SAMPLES_VERSION},
)
"""One text column per other verifier may follow, see `verdict_column`."""

_KEY = [("greedy", "ascending"), ("problem_index", "ascending"), ("sample", "ascending")]


def verdict_column(verifier: str) -> str:
    """The column of the verdicts of a verifier other than the report's own."""
    return f"verdict_{verifier}"


def with_verdicts(samples: pa.Table, verifier: str, verdicts: Sequence[str]) -> pa.Table:
    """The rows with an added, or replaced, column of another verifier's verdicts."""
    name = verdict_column(verifier)
    if name in samples.column_names:
        samples = samples.drop_columns([name])
    return samples.append_column(name, pa.array(verdicts, pa.string()))


def graded_by(samples: pa.Table, verifier: str) -> pa.Table:
    """The rows with another verifier's verdicts as their own.

    Raises ValueError if that verifier has no column.
    """
    name = verdict_column(verifier)
    if name not in samples.column_names:
        raise ValueError(f"it has no column {name!r}")
    verdicts = samples[name]
    samples = samples.set_column(samples.column_names.index("verdict"), "verdict", verdicts)
    correct = pc.equal(verdicts, "correct")
    return samples.set_column(samples.column_names.index("correct"), "correct", correct)


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


def write_samples(path: Path, table: pa.Table) -> None:
    """Write the rows atomically, with zstd compression."""
    with written_whole(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_samples(path: Path, with_texts: bool = True) -> pa.Table:
    """The rows of a per-sample file; the texts are most of its size. Raises EvaluationFileError for
    any other file."""
    check_samples_file(path)
    try:
        names = pq.read_schema(path).names
        columns = [name for name in names if with_texts or name != "completion_text"]
        return pq.read_table(path, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def check_samples_file(path: Path) -> None:
    """Raises EvaluationFileError unless the schema is that of a per-sample file."""
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    version = (schema.metadata or {}).get(_VERSION_KEY.encode(), SAMPLES_VERSION.encode()).decode()
    if version != SAMPLES_VERSION:
        raise EvaluationFileError(
            f"{path}: a per-sample file of version {version}, expected {SAMPLES_VERSION}: evaluate "
            "again"
        )
    if not _is_of_this_version(schema):
        raise EvaluationFileError(
            f"{path}: its columns are {', '.join(schema.names)}; per-sample files of this "
            f"version have {', '.join(SAMPLE_SCHEMA.names)}: evaluate again"
        )


def _is_of_this_version(schema: pa.Schema) -> bool:
    own, others = list(schema)[: len(SAMPLE_SCHEMA)], list(schema)[len(SAMPLE_SCHEMA) :]
    prefix = verdict_column("")
    return own == list(SAMPLE_SCHEMA) and all(
        field.name.startswith(prefix) and field.type == pa.string() for field in others
    )


def _unreadable(path: Path, error: Exception) -> EvaluationFileError:
    return EvaluationFileError(f"{path}: not a readable per-sample file: {error}")
