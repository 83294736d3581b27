"""Reads columns of our Parquet files in batches, with bounded memory."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.replay import snapshot
from grpo_replay.storage.parquet import open_parquet
from grpo_replay.storage.rollout_log import DRAW_SCHEMA, ROLLOUT_FILE_SCHEMA, ROLLOUT_LOG_VERSION

Kind = Literal["rollouts", "draws", "buffer"]

BATCH_ROWS = 8_192
"""Rows decoded at a time. At 1,000 tokens per rollout, one list column takes 32 MiB."""

_FORMATS = {
    "rollouts": (ROLLOUT_LOG_VERSION, ROLLOUT_FILE_SCHEMA),
    "draws": (ROLLOUT_LOG_VERSION, DRAW_SCHEMA),
    "buffer": (snapshot.SNAPSHOT_VERSION, snapshot.SNAPSHOT_SCHEMA),
}


def schema_of(kind: Kind) -> pa.Schema:
    return _FORMATS[kind][1]


def iter_columns(
    path: Path, kind: Kind, names: Sequence[str], batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Record batches of the named columns, with columns in this order and rows in file order.

    Raises SnapshotError if the file is missing, empty, truncated, damaged or of another kind.
    """
    version, schema = _FORMATS[kind]
    with open_parquet(path, kind, version, schema) as file:
        for batch in file.iter_batches(batch_size=batch_rows, columns=list(names)):
            # Parquet returns columns in file order.
            yield batch.select(list(names))


def list_lengths(column: pa.Array) -> pa.Array:
    """Lengths of the lists in a column, int32."""
    return pc.cast(pc.list_value_length(column), pa.int32())
