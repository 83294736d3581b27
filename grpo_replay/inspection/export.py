"""Rollouts out of a run or snapshot: Parquet, JSONL, or a folder that `datasets` loads."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_replay.errors import OutputDirectoryError, UsageError
from grpo_replay.inspection.rows import RowSource, iter_rows
from grpo_replay.inspection.where import Filter
from grpo_replay.storage.atomic import written_whole

_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
tags:
- grpo
- rollouts
---

# {title}

{count:,} rollouts exported by grpo-replay{filter}. Columns: docs/buffer.md of grpo-replay.
Advantages, rewards and log-probabilities are those of each rollout's birth; ages are in training
steps at step {step}.
"""


def export_rows(rows: RowSource, where: Filter | None, target: Path, filter_text: str) -> int:
    """Write the rollouts that pass the filter; returns how many.

    The ending decides: .parquet, .jsonl, or none for a Hugging Face dataset folder. Memory is
    that of one batch. Raises UsageError for another ending, OutputDirectoryError if the target is
    there already.
    """
    _check_target(target)
    columns = rows.schema.names
    tables = iter_rows(rows, columns, where)
    if target.suffix == ".jsonl":
        return _into_place(target, lambda path: _write_jsonl(path, tables))
    schema = rows.schema.remove_metadata()
    if target.suffix == ".parquet":
        return _into_place(target, lambda path: _write_parquet(path, schema, tables))
    return _write_folder(target, rows, schema, tables, filter_text)


def _check_target(target: Path) -> None:
    if target.suffix not in (".parquet", ".jsonl", ""):
        raise UsageError(
            f"--export {target}: the ending must be .parquet or .jsonl, or there must be none "
            "(a folder for datasets.load_dataset)"
        )
    if target.exists():
        raise OutputDirectoryError(f"--export {target}: it exists already; choose another name")
    if not target.parent.is_dir():
        raise OutputDirectoryError(f"--export {target}: there is no folder {target.parent}")


def _into_place(target: Path, write: Callable[[Path], int]) -> int:
    """`write` to a name beside the target, then rename: a killed export leaves no half file."""
    with written_whole(target) as temporary:
        return write(temporary)


def _write_parquet(path: Path, schema: pa.Schema, tables: Iterator[pa.Table]) -> int:
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.cast(schema))
            count += table.num_rows
    return count


def _write_jsonl(path: Path, tables: Iterator[pa.Table]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            for row in table.to_pylist():
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            count += table.num_rows
    return count


def _write_folder(
    target: Path, rows: RowSource, schema: pa.Schema, tables: Iterator[pa.Table], filter_text: str
) -> int:
    temporary = target.with_name(target.name + ".tmp")
    (temporary / "data").mkdir(parents=True)
    try:
        count = _write_parquet(temporary / "data" / "train-00000-of-00001.parquet", schema, tables)
        said = f" with the filter `{filter_text}`" if filter_text else ""
        card = _CARD.format(title=target.name, count=count, filter=said, step=rows.step)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return count
