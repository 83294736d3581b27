"""The per-sample rows of an evaluation: one table from generation to report to comparison."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_replay.errors import EvaluationFileError
from grpo_replay.storage.atomic import written_whole

SCHEMA_VERSION = "2"

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
    metadata={_VERSION_KEY: SCHEMA_VERSION},
)

_KEY = [("greedy", "ascending"), ("problem_index", "ascending"), ("sample", "ascending")]


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
    version = (schema.metadata or {}).get(_VERSION_KEY.encode(), SCHEMA_VERSION.encode()).decode()
    if version != SCHEMA_VERSION:
        raise EvaluationFileError(
            f"{path}: a per-sample file of version {version}, expected {SCHEMA_VERSION}: evaluate "
            "again"
        )
    if not schema.equals(SAMPLE_SCHEMA):
        raise EvaluationFileError(
            f"{path}: its columns are {', '.join(schema.names)}; per-sample files of this "
            f"version have {', '.join(SAMPLE_SCHEMA.names)}: evaluate again"
        )


def _unreadable(path: Path, error: Exception) -> EvaluationFileError:
    return EvaluationFileError(f"{path}: not a readable per-sample file: {error}")
