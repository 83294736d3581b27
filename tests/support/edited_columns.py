"""Parquet files of a run, falsified."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def edit(path: Path, column: str, change: Callable[[Any], Any], row: int | None = None) -> int:
    """Replace a value of a column by `change(value)`, in the first row that has one or in `row`,
    which is returned. The marks of the file stay."""
    table = pq.read_table(path)
    values = table[column].to_pylist()
    row = next(i for i, v in enumerate(values) if v is not None) if row is None else row
    values[row] = change(values[row])
    index = table.column_names.index(column)
    field = table.schema.field(index)
    pq.write_table(table.set_column(index, field, pa.array(values, field.type)), path)
    return row
