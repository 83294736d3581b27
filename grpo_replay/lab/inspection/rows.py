"""Single rollouts of a run or a snapshot, optionally filtered: for `--where` and `--export`.

A filter is a condition of SQL, as SQLite understands it:

    advantage > 1 and age_steps <= 3
    verdict in ('timeout', 'crash') or not stored
    completion_text like '%boxed%' and last_used_step is not null

SQLite sees the rows in memory and nothing else: an authorizer refuses all but reading them.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_replay.errors import (
    OutputDirectoryError,
    SnapshotError,
    UsageError,
    did_you_mean,
    first_line,
)
from grpo_replay.lab.inspection.rebuild import stored_after
from grpo_replay.lab.inspection.rollout_columns import (
    NEVER,
    Kind,
    iter_columns,
    list_lengths,
    read_draws,
    read_optional_fields,
    schema_of,
    uses_of,
)
from grpo_replay.lab.inspection.source import Source
from grpo_replay.storage.atomic import json_values, written_whole
from grpo_replay.storage.parquet import EXPORT_MARKS
from grpo_replay.storage.rollout_log import EXTRA
from grpo_replay.terminal.console import tracked

_JSON_ROWS = 64  # as Python objects, a token takes 100 bytes

DERIVED = (
    ("age_steps", pa.int64()),  # training steps since birth, at the inspected step
    ("completion_tokens", pa.int32()),
    ("prompt_tokens", pa.int32()),
    ("abs_advantage", pa.float32()),
)
USES = (
    ("times_used", pa.int32()),
    ("last_used_step", pa.int64()),
    ("stored", pa.bool_()),  # in the buffer after the inspected step
)


Derived = Mapping[str, tuple[str, Callable[[pa.Array], pa.Array]]]
"""Columns computed from one column of the file: its name, and the function."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSource:
    """The rollouts of a source: the whole log of a run, or what a snapshot stores."""

    kind: Kind
    files: tuple[Path, ...]
    step: int
    schema: pa.Schema  # columns of the file, then the derived columns
    derived: Derived


def open_rows(source: Source) -> RowSource:
    """All generated rollouts of a run with their uses, or the stored rollouts of a checkpoint or
    snapshot. Raises SnapshotError if a file cannot be read."""
    step = source.step
    if source.kind != "run" and source.snapshot is not None:
        schema = pa.schema([*schema_of("buffer"), *DERIVED])
        return RowSource("buffer", (source.snapshot,), step, schema, _derived(step))
    return RowSource(
        kind="rollouts",
        files=tuple(path for _, path in source.rollout_files),
        step=step,
        schema=pa.schema([*schema_of("rollouts"), *DERIVED, *USES]),
        derived={**_derived(step), **_uses(source)},
    )


def _derived(step: int) -> Derived:
    return {
        "age_steps": ("birth_step", lambda births: pc.subtract(step, births)),
        "completion_tokens": ("completion_token_ids", list_lengths),
        "prompt_tokens": ("prompt_token_ids", list_lengths),
        "abs_advantage": ("advantage", pc.abs),
    }


def _uses(source: Source) -> Derived:
    draws, stored_ids = read_draws(source.draw_files), np.zeros(0, dtype=np.int64)
    recipe = source.recipe
    if recipe is not None and (source.rollout_files or source.snapshot):
        stored, _ = stored_after(source, recipe.replay, recipe.sampling.group_size)
        stored_ids = stored.rollout_id

    def last_used_step(ids: pa.Array) -> pa.Array:
        _, last = uses_of(ids.to_numpy(), draws)
        return pa.array(last, mask=last == NEVER)

    return {
        "times_used": ("rollout_id", lambda ids: pa.array(uses_of(ids.to_numpy(), draws)[0])),
        "last_used_step": ("rollout_id", last_used_step),
        "stored": ("rollout_id", lambda ids: pa.array(np.isin(ids.to_numpy(), stored_ids))),
    }


class Filter:
    """A condition on the columns of `schema`. `columns` are those that it reads.

    Raises UsageError for an unknown column, bad syntax, and what is no condition on single rows.
    """

    def __init__(self, text: str, schema: pa.Schema) -> None:
        fields = [field for field in schema if not pa.types.is_list(field.type)]
        names = [field.name for field in fields]
        self.columns: set[str] = set()
        self._selects = 0
        self._query = f"SELECT (\n{text}\n) IS TRUE FROM rows"
        self._rows = sqlite3.connect(":memory:")
        self._rows.execute(f"CREATE TABLE rows ({', '.join(map(_declared, fields))})")
        self._rows.set_authorizer(self._authorize)
        try:
            cursor = self._rows.execute(self._query)
        except (sqlite3.Error, ValueError) as error:
            unknown = str(error).removeprefix("no such column: ")
            hint = did_you_mean(unknown, names)
            raise UsageError(
                f"--where: {error}{hint}; the columns are {', '.join(names)}\n  {text}"
            ) from None
        single = len(cursor.description) == 1 and not cursor.fetchall()
        if not (single and self.columns and self.columns <= set(names)):
            raise UsageError(f"--where: give one condition on the columns of a rollout\n  {text}")
        self._rows.set_authorizer(None)

    def _authorize(self, action: int, first: str | None, second: str | None, *_: Any) -> int:
        if action == sqlite3.SQLITE_READ and second:
            self.columns.add(second)
        self._selects += action == sqlite3.SQLITE_SELECT
        reads = (sqlite3.SQLITE_READ, sqlite3.SQLITE_SELECT, sqlite3.SQLITE_FUNCTION)
        return sqlite3.SQLITE_OK if action in reads and self._selects < 2 else sqlite3.SQLITE_DENY

    def mask(self, table: pa.Table) -> pa.Array:
        """bool [N]: the rows of the table that pass; null is no pass, as in SQL."""
        names = sorted(self.columns)
        values = zip(*(_of_sql(table[name]).to_pylist() for name in names), strict=True)
        marks = ", ".join("?" * len(names))
        self._rows.execute("DELETE FROM rows")
        self._rows.executemany(f"INSERT INTO rows ({', '.join(names)}) VALUES ({marks})", values)
        try:
            return pa.array([bool(row[0]) for row in self._rows.execute(self._query)], pa.bool_())
        except sqlite3.Error as error:  # of a function, with the values of a row
            raise UsageError(f"--where: {error}") from None


def _declared(field: pa.Field) -> str:
    if pa.types.is_string(field.type):
        return f"{field.name} TEXT"
    return f"{field.name} {'REAL' if pa.types.is_floating(field.type) else 'INTEGER'}"


def _of_sql(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column with 32-bit floats as their decimals: 0.1 is stored as 0.100000001."""
    if not pa.types.is_float32(column.type):
        return column
    return pc.cast(pc.cast(column, pa.string()), pa.float64())


def iter_rows(
    rows: RowSource, columns: Sequence[str], where: Filter | None = None
) -> Iterator[pa.Table]:
    """Tables of `columns`, in this order, of the rollouts that pass the filter, batch by batch."""
    needed = [*columns, *(sorted(where.columns - set(columns)) if where else ())]
    bases = [rows.derived[name][0] if name in rows.derived else name for name in needed]
    for path in tracked(rows.files, "reading rollouts"):
        for batch in iter_columns(path, rows.kind, list(dict.fromkeys(bases))):
            table = pa.table({name: _column(rows, batch, name) for name in needed})
            if where is not None:
                table = table.filter(where.mask(table))
            if table.num_rows:
                yield table.select(list(columns))


def _column(rows: RowSource, batch: pa.RecordBatch, name: str) -> pa.Array:
    if name in rows.derived:
        base, compute = rows.derived[name]
        return compute(batch.column(base))
    if name not in batch.schema.names:
        return pa.nulls(batch.num_rows, rows.schema.field(name).type)
    return batch.column(name)


def export_rows(rows: RowSource, where: Filter | None, target: Path) -> int:
    """Write the rollouts that pass the filter, one batch at a time; returns their number. The
    extension selects the format: .parquet or .jsonl. Raises UsageError for another extension,
    OutputDirectoryError if the target exists."""
    if target.suffix not in (".parquet", ".jsonl"):
        raise UsageError(f"--export {target}: the file must end in .parquet or .jsonl")
    if target.exists():
        raise OutputDirectoryError(f"--export {target}: already exists; choose another name")
    if not target.parent.is_dir():
        raise OutputDirectoryError(
            f"--export {target}: folder {target.parent} does not exist; create it first"
        )
    rows = _with_optional(rows)
    tables = iter_rows(rows, rows.schema.names, where)
    with written_whole(target) as temporary:
        if target.suffix == ".jsonl":
            return _write_jsonl(temporary, tables)
        return _write_parquet(temporary, rows.schema.with_metadata(EXPORT_MARKS), tables)


def _with_optional(rows: RowSource) -> RowSource:
    """`rows` with the masks and extras of all files, null in a file that has none. Raises
    SnapshotError for extras of one name and several types."""
    found = [pa.schema(read_optional_fields(path, rows.kind)) for path in rows.files]
    try:
        optional = pa.unify_schemas(found) if found else []
    except pa.ArrowException as error:
        raise SnapshotError(
            f"--export: extras of one name and several types: {first_line(error)}; read the files "
            "one by one with pyarrow"
        ) from error
    return replace(rows, schema=pa.schema([*rows.schema, *optional]))


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
            for start in range(0, table.num_rows, _JSON_ROWS):
                for row in table.slice(start, _JSON_ROWS).to_pylist():
                    row |= {n: json_values(v) for n, v in row.items() if n.startswith(EXTRA)}
                    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            count += table.num_rows
    return count
