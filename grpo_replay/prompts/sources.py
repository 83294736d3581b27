"""Rows of problems from a local JSONL or Parquet file, the hub, or a built-in set.

Sources only read. The caller checks the values.
"""

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_replay.errors import DatasetError, did_you_mean, first_line
from grpo_replay.recipe.paths import short_path

JSONL_SUFFIXES = (".jsonl", ".json")
PARQUET_SUFFIXES = (".parquet",)


class ProblemRows(Protocol):
    """Access to rows by index (0-based), to whole columns, and to the place of a row."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Mapping[str, Any]: ...

    def column(self, field: str) -> Sequence[Any]:
        """The field's value in every row. `reward_model.ground_truth` is the value of
        `ground_truth` inside the column `reward_model`, unless a column has the whole name. Raises
        DatasetError if a row does not have the field."""
        ...

    def place(self, index: int) -> str:
        """The place of the row for error messages, for example `problems.jsonl:12`."""
        ...


class MappingRows:
    """Rows held as mappings. `lines[i]` is the line number of row i, 1-based."""

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], source: str, lines: Sequence[int] | None = None
    ) -> None:
        self._rows, self._source, self._lines = rows, source, lines

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]

    def column(self, field: str) -> list[Any]:
        values = []
        for index, row in enumerate(self._rows):
            column = column_of(field, row)
            if column not in row:
                raise DatasetError(f"{self.place(index)}: no field {field!r}{_among(field, row)}")
            values.append(_inside(row[column], column, field, partial(self.place, index)))
        return values

    def place(self, index: int) -> str:
        if self._lines is None:
            return f"{self._source} row {index}"
        return f"{self._source}:{self._lines[index]}"


class TableRows:
    """Rows of an Arrow table, converted to Python values on access. `names` are all columns of the
    source; the table may have only some of them."""

    def __init__(self, table: pa.Table, source: str, names: Sequence[str] | None = None) -> None:
        self._table, self._source = table, source
        self._names = table.column_names if names is None else names

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> Mapping[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]

    def column(self, field: str) -> list[Any]:
        column = column_of(field, self._table.column_names)
        if column not in self._table.column_names:
            raise DatasetError(f"{self._source}: no column {field!r}{_among(field, self._names)}")
        values = self._table.column(column).to_pylist()
        return [
            _inside(value, column, field, partial(self.place, index))
            for index, value in enumerate(values)
        ]

    def place(self, index: int) -> str:
        return f"{self._source} row {index}"


def column_of(field: str, columns: Container[str]) -> str:
    """The column that contains a field: the field itself, or what is before its first dot."""
    return field if field in columns else field.partition(".")[0]


def _inside(value: Any, column: str, field: str, place: Callable[[], str]) -> Any:
    """The value at `field` in the value of its column."""
    path = column
    for key in field.removeprefix(column).split(".")[1:]:
        if not isinstance(value, Mapping):
            kind = type(value).__name__
            raise DatasetError(f"{place()}: no field {field!r}: {path} is a {kind}, without keys")
        if key not in value:
            raise DatasetError(f"{place()}: no field {field!r}: {path} has {', '.join(value)}")
        value, path = value[key], f"{path}.{key}"
    return value


def is_local_source(source: str) -> bool:
    """True if `source` is a local file, by its suffix or because it exists."""
    suffixes = (*JSONL_SUFFIXES, *PARQUET_SUFFIXES)
    return source.endswith(suffixes) or source.startswith(("/", ".", "~")) or Path(source).exists()


def read_local_rows(
    source: str, limit: int | None = None, fields: Sequence[str] | None = None
) -> ProblemRows:
    """The first `limit` rows (all if None) of a JSONL or Parquet file, with only these fields (all
    if None).

    Raises DatasetError with file and line if something cannot be read.
    """
    path, source = Path(source).expanduser(), short_path(source)
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise DatasetError(f"{source} {kind}; name a .jsonl or .parquet file, or a hub dataset id")
    if path.suffix in PARQUET_SUFFIXES:
        return _parquet_rows(path, source, limit, fields)
    if path.suffix in JSONL_SUFFIXES:
        return _jsonl_rows(path, source, limit, fields)
    raise DatasetError(f"{source}: unknown kind of file {path.suffix!r}; use .jsonl or .parquet")


def read_hub_rows(
    source: str,
    config_name: str | None,
    split: str,
    revision: str | None,
    limit: int | None,
    fields: Sequence[str] | None = None,
) -> ProblemRows:
    """The first `limit` rows of a split of a Hugging Face dataset, from the cache or the hub, with
    only these fields (all if None). The library memory-maps its files.

    Raises DatasetError, with the command to download it, if the dataset is not available.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        dataset = datasets.load_dataset(source, config_name, split=split, revision=revision)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise DatasetError(
            f"dataset {source!r} (config {config_name}, split {split!r}) is not in the local "
            f"cache and cannot be fetched from the hub: {first_line(error)}. On a machine with "
            f"network access, run `hf download --repo-type dataset {source} --local-dir DIR` and "
            "set prompts.source to the .parquet or .jsonl file in DIR"
        ) from error
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    names = dataset.column_names
    if fields is not None:
        wanted = {column_of(field, names) for field in fields}
        dataset = dataset.select_columns([name for name in names if name in wanted])
    return TableRows(dataset.with_format("arrow")[:], f"{source}[{split}]", names)


def _parquet_rows(
    path: Path, source: str, limit: int | None, fields: Sequence[str] | None
) -> TableRows:
    """Rows of a Parquet file. Only `fields` are read: every column read takes memory."""
    try:
        names = pq.read_schema(path, memory_map=True).names
        wanted = {column_of(field, names) for field in fields or names}
        columns = [name for name in names if name in wanted]
        table = pq.read_table(path, memory_map=True, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{source}: not a readable Parquet file: {first_line(error)}") from error
    return TableRows(table if limit is None else table.slice(0, limit), source, names)


def _jsonl_rows(
    path: Path, source: str, limit: int | None, fields: Sequence[str] | None
) -> MappingRows:
    rows: list[Mapping[str, Any]] = []
    lines: list[int] = []
    for number, text in _numbered_lines(path, source):
        if limit is not None and len(rows) == limit:
            break
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise DatasetError(f"{source}:{number}: not valid JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise DatasetError(
                f"{source}:{number}: a number of thousands of digits, or nesting without end"
            ) from error
        if not isinstance(row, dict):
            raise DatasetError(
                f"{source}:{number}: found a {type(row).__name__}; every line is one JSON object"
            )
        columns = {column_of(field, row) for field in fields or row}
        if columns <= row.keys():
            row = {column: row[column] for column in columns}  # else keep all, for the error
        rows.append(row)
        lines.append(number)
    return MappingRows(rows, source, lines)


def _numbered_lines(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """Non-blank lines with their 1-based numbers."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise DatasetError(f"{source}: not UTF-8 after line {number}: {error.reason}") from error
    except OSError as error:
        raise DatasetError(f"{source}: cannot be read: {error.strerror}") from error


def _among(field: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    return f"{did_you_mean(field, known)}; there are: {', '.join(known)}"
