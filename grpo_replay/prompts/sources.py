"""Rows of problems from local files and folders, the hub, or a built-in set.

Sources only read. The caller checks the values.
"""

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_replay.distributed.environment import use_cache_without_hub
from grpo_replay.errors import DatasetError, did_you_mean, first_line
from grpo_replay.recipe.layers import DATA_SUFFIXES, short_path

BUILDERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".json": "json"}
"""The reader of `datasets` for a suffix."""
NAMED = "a .csv, .tsv, .json, .jsonl or .parquet file (or .jsonl.gz …), a folder of such files"

Select = Callable[[Iterable[str]], Container[str]] | None
"""Chooses columns among those that there are."""
Options = Mapping[str, Any]
"""Arguments of `datasets.load_dataset`, with the split."""
NO_OPTIONS: Options = {"split": "train"}


class ProblemRows(Protocol):
    """Access to rows by index (0-based), to whole columns, and to the place of a row."""

    @property
    def names(self) -> Sequence[str]:
        """The columns of the source; of JSON lines, those of the first row."""
        ...

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
        self.names = list(rows[0]) if rows else []

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
        self.names = table.column_names if names is None else names

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> Mapping[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]

    def column(self, field: str) -> list[Any]:
        column = column_of(field, self._table.column_names)
        if column not in self._table.column_names:
            raise DatasetError(f"{self._source}: no column {field!r}{_among(field, self.names)}")
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
    """True if `source` is a local file or folder, by its suffix or because it exists."""
    local = source.startswith(("/", ".", "~")) or Path(source).exists()
    return local or source.endswith(DATA_SUFFIXES)


def read_local_rows(
    source: str, limit: int | None = None, select: Select = None, options: Options = NO_OPTIONS
) -> ProblemRows:
    """The first `limit` rows (all if None) of a file or folder, with only the columns that `select`
    chooses (all if None).

    JSON lines are read here, so that errors name the line, and so is Parquet, of which only these
    columns are read. Everything else, and a split other than "train", is read by `datasets`.
    Raises DatasetError with the place if something cannot be read.
    """
    path, source = Path(source).expanduser(), short_path(source)
    if not path.exists():
        raise DatasetError(f"{source} does not exist; name {NAMED}, or a hub dataset id")
    if path.is_dir():
        return _read_by_datasets(source, lambda: _folder(path, options), limit, select)
    if not source.endswith(DATA_SUFFIXES):
        raise DatasetError(f"{source}: unknown kind of file {path.suffix!r}; name {NAMED}")
    if path.suffix == ".parquet" and options == NO_OPTIONS:
        return _parquet_rows(path, source, limit, select)
    if path.suffix == ".jsonl" and options == NO_OPTIONS:
        return _jsonl_rows(path, source, limit, select)
    return _read_by_datasets(source, lambda: _file(path, options), limit, select)


def read_hub_rows(
    source: str, limit: int | None, select: Select = None, options: Options = NO_OPTIONS
) -> ProblemRows:
    """The first `limit` rows of a split of a Hugging Face dataset, from the cache or the hub, with
    only the columns that `select` chooses (all if None). The library memory-maps its files.

    Raises DatasetError, with the command to download it, if the dataset is not available.
    """
    use_cache_without_hub()
    import datasets

    try:
        return _read_by_datasets(
            f"{source}[{options['split']}]",
            lambda: datasets.load_dataset(source, **options),
            limit, select,
        )  # fmt: skip
    except DatasetError as error:
        if error.__cause__ is None:
            raise
        raise DatasetError(
            f"dataset {source!r} (config {options.get('name')}, split {options['split']!r}) is not "
            f"in the local cache and cannot be fetched from the hub: {first_line(error.__cause__)}."
            f" On a machine with network access, run `hf download --repo-type dataset {source} "
            "--local-dir DIR` and set prompts.source to the .parquet or .jsonl file in DIR"
        ) from error.__cause__


def _read_by_datasets(
    place: str, load: Callable[[], Any], limit: int | None, select: Select
) -> TableRows:
    from datasets.exceptions import DataFilesNotFoundError, DatasetsError

    try:
        dataset = load()
    except DataFilesNotFoundError as error:
        raise DatasetError(f"{place} is a folder without data files; name {NAMED}") from error
    except (DatasetsError, OSError, ValueError, RuntimeError, TypeError) as error:
        if "corresponds to no data" in str(error):
            raise DatasetError(f"{place} has no rows") from error
        reason = f"{type(error).__name__}: {first_line(error.__cause__ or error)}"
        raise DatasetError(f"{place}: cannot be read: {reason}") from error
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    names = dataset.column_names
    if select is not None:
        wanted = select(names)
        dataset = dataset.select_columns([name for name in names if name in wanted])
    return TableRows(dataset.with_format("arrow")[:], place, names)


def _folder(path: Path, options: Options) -> Any:
    """A folder of `save_to_disk`, or of files that `datasets` recognises."""
    import datasets

    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return datasets.load_dataset(str(path), **options)
    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.Dataset):
        return found
    if options["split"] not in found:
        raise ValueError(f"no split {options['split']!r} in it; there are: {', '.join(found)}")
    return found[options["split"]]


def _file(path: Path, options: Options) -> Any:
    """A file, by its suffix. Every value of a CSV file is text, as it is written: 1.50 and 007 are
    not the numbers 1.5 and 7."""
    import datasets

    kind = next(each for each in (*BUILDERS, ".jsonl") if each in path.suffixes)
    given = {k: v for k, v in options.items() if k not in ("name", "revision")}
    if BUILDERS.get(kind) == "csv":
        import pandas

        given = {"sep": "\t" if kind == ".tsv" else ",", "keep_default_na": False, **given}
        columns = pandas.read_csv(path, sep=given["sep"], nrows=0).columns
        given["features"] = datasets.Features({name: datasets.Value("string") for name in columns})
    return datasets.load_dataset(BUILDERS.get(kind, "json"), data_files=str(path), **given)


def _parquet_rows(path: Path, source: str, limit: int | None, select: Select) -> TableRows:
    """Rows of a Parquet file. Only what is selected is read: every column read takes memory."""
    try:
        names = pq.read_schema(path, memory_map=True).names
        wanted = names if select is None else select(names)
        columns = [name for name in names if name in wanted]
        table = pq.read_table(path, memory_map=True, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{source}: not a readable Parquet file: {first_line(error)}") from error
    return TableRows(table if limit is None else table.slice(0, limit), source, names)


def _jsonl_rows(path: Path, source: str, limit: int | None, select: Select) -> MappingRows:
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
        if select is not None:
            wanted = select(row)
            row = {column: value for column, value in row.items() if column in wanted}
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
