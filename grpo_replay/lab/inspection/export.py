"""Exports rollouts as Parquet, as JSONL, or as a folder that `datasets` loads."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_replay.errors import OutputDirectoryError, UsageError
from grpo_replay.lab.inspection.rows import RowSource, iter_rows
from grpo_replay.lab.inspection.where import Filter
from grpo_replay.storage.atomic import written_whole
from grpo_replay.storage.parquet import EXPORT_MARKS

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
Rewards, advantages and log-probabilities are those computed when a rollout was generated. Ages are
in training steps, at step {step}.
"""


def export_rows(rows: RowSource, where: Filter | None, target: Path, filter_text: str) -> int:
    """Write the rollouts that pass the filter, one batch at a time; returns their number.

    The extension selects the format: .parquet, .jsonl, or none for a Hugging Face dataset folder.
    Raises UsageError for another extension, OutputDirectoryError if the target exists.
    """
    _check_target(target)
    tables = iter_rows(rows, rows.schema.names, where)
    if target.suffix == ".jsonl":
        return _write_atomically(target, lambda path: _write_jsonl(path, tables))
    schema = rows.schema.with_metadata(EXPORT_MARKS)
    if target.suffix == ".parquet":
        return _write_atomically(target, lambda path: _write_parquet(path, schema, tables))
    return _write_folder(target, rows, schema, tables, filter_text)


def _check_target(target: Path) -> None:
    if target.suffix not in (".parquet", ".jsonl", ""):
        raise UsageError(
            f"--export {target}: the extension must be .parquet or .jsonl, or absent (a folder for "
            "datasets.load_dataset)"
        )
    if target.exists():
        raise OutputDirectoryError(f"--export {target}: already exists; choose another name")
    if not target.parent.is_dir():
        raise OutputDirectoryError(
            f"--export {target}: folder {target.parent} does not exist; create it first"
        )


def _write_atomically(target: Path, write: Callable[[Path], int]) -> int:
    """Write to a temporary name, then rename: an interrupted export leaves no partial file."""
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


def _remove_leftover(temporary: Path) -> None:
    """Remove what an export that was killed left. Raises OutputDirectoryError for anything else."""
    if not temporary.exists():
        return
    own = {"data", "README.md"}
    if not temporary.is_dir() or {each.name for each in temporary.iterdir()} - own:
        raise OutputDirectoryError(
            f"{temporary} is needed while exporting, but holds something else: move it away"
        )
    shutil.rmtree(temporary)


def _write_folder(
    target: Path, rows: RowSource, schema: pa.Schema, tables: Iterator[pa.Table], filter_text: str
) -> int:
    temporary = target.with_name(target.name + ".tmp")
    _remove_leftover(temporary)
    try:
        (temporary / "data").mkdir(parents=True)
        count = _write_parquet(temporary / "data" / "train-00000-of-00001.parquet", schema, tables)
        note = f" with the filter `{filter_text}`" if filter_text else ""
        card = _CARD.format(title=target.name, count=count, filter=note, step=rows.step)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return count
