"""The per-sample rows of an evaluation: one table from generation to report to comparison."""

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
        ("completion_text", pa.large_string()),  # a benchmark's may have more than 2 GiB
        ("tokens", pa.int32()),  # of the completion, end of sequence included
        ("finish_reason", pa.string()),
        ("verdict", pa.string()),
        ("correct", pa.bool_()),
    ],
    metadata={_VERSION_KEY: SAMPLES_VERSION},
)
"""After these may come one text column for each other verifier, see `verdict_column`."""

_KEY = [("greedy", "ascending"), ("problem_index", "ascending"), ("sample", "ascending")]


def verdict_column(verifier: str) -> str:
    """The name of the column with the verdicts of a verifier other than the report's own."""
    return f"verdict_{verifier}"


def with_verdicts(samples: pa.Table, verifier: str, verdicts: Sequence[str]) -> pa.Table:
    """The rows with the verdicts of another verifier beside their own, instead of any it had."""
    name = verdict_column(verifier)
    if name in samples.column_names:
        samples = samples.drop_columns([name])
    return samples.append_column(name, pa.array(verdicts, pa.string()))


def graded_by(samples: pa.Table, verifier: str) -> pa.Table:
    """The rows with the verdicts of another verifier in the place of their own. Raises ValueError
    if they have none of it."""
    name = verdict_column(verifier)
    if name not in samples.column_names:
        raise ValueError(f"it has no column {name!r}")
    verdicts = samples[name]
    samples = samples.set_column(samples.column_names.index("verdict"), "verdict", verdicts)
    correct = pc.equal(verdicts, "correct")
    return samples.set_column(samples.column_names.index("correct"), "correct", correct)


def to_bytes(table: pa.Table) -> bytes:
    """The table as an Arrow stream, for the way between ranks."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def merge(payloads: Sequence[bytes], benchmarks: Sequence[str]) -> pa.Table:
    """The rows of all ranks: by benchmark in the given order, then sampled before greedy, problem
    and sample. However the work was spread, the table is the same."""
    table = pa.concat_tables(pa.ipc.open_stream(payload).read_all() for payload in payloads)
    parts = [table.filter(pc.field("benchmark") == name).sort_by(_KEY) for name in benchmarks]
    return pa.concat_tables(parts).combine_chunks()


def write_samples(path: Path, table: pa.Table) -> None:
    """Write the rows atomically, zstd."""
    with written_whole(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_samples(path: Path) -> pa.Table:
    """The rows of a per-sample file. Raises EvaluationFileError if it is not one."""
    check_samples_file(path)
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def check_samples_file(path: Path) -> None:
    """Raises EvaluationFileError if it is no per-sample file, by its schema."""
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
