"""Rows of problems from local files and folders, the hub, or a built-in set; their values, checked
and converted (problems, reference answers, ids); and what a run says about them at the start.

Reading does not check values. A conversion raises ValueError with the value found;
`checked_column` adds the place of the row.
"""

import datetime
import glob
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_replay.distributed.environment import use_cache_without_hub
from grpo_replay.errors import DatasetError, did_you_mean, first_line
from grpo_replay.recipe.input_sections import ANSWER_MARKER
from grpo_replay.recipe.layers import DATA_SUFFIXES, short_path, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BUILDERS = {
    **{".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json"},
    **{".parquet": "parquet", ".arrow": "arrow"},
}
"""The reader of `datasets` for a suffix."""
NOT_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""Files of a folder that `datasets` does not take for data."""
NOT_OF_A_HEADER = ("skipfooter", "chunksize", "iterator")
"""Options of `pandas.read_csv` that do not go with `nrows`."""
NAMED = "a .csv, .tsv, .json, .jsonl or .parquet file (or .jsonl.gz …), a folder of such files"

Select = Callable[[Iterable[str]], Collection[str]] | None
"""Chooses columns among those that there are."""
Options = Mapping[str, Any]
"""Arguments of `datasets.load_dataset`, with the split."""
NO_OPTIONS: Options = {"split": "train"}


class MappingRows:
    """Rows held as mappings, by index (0-based). `lines[i]` is the line number of row i, 1-based.
    `names` are the columns of the first row."""

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
        """The field's value in every row. `reward_model.ground_truth` is the value of
        `ground_truth` inside the column `reward_model`, unless a column has the whole name. Raises
        DatasetError if a row does not have the field."""
        values = []
        for index, row in enumerate(self._rows):
            column = column_of(field, row)
            if column not in row:
                raise DatasetError(f"{self.place(index)}: no field {field!r}{_among(field, row)}")
            values.append(_inside(row[column], column, field, partial(self.place, index)))
        return values

    def place(self, index: int) -> str:
        """The place of the row for error messages, for example `problems.jsonl:12`."""
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


ProblemRows = MappingRows | TableRows


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


def data_files(folder: Path) -> list[Path]:
    """The data files in a folder and below, without hidden ones."""
    found = (each for each in folder.rglob("*") if each.name.endswith(DATA_SUFFIXES))
    return sorted(
        each
        for each in found
        if each.name not in NOT_DATA
        and not any(part.startswith((".", "__")) for part in each.relative_to(folder).parts)
        and each.is_file()
    )


def data_kind(path: Path) -> str | None:
    """The suffix of a data file, without that of its packing; of a folder, that of its first file.
    None if it is not data."""
    if path.is_dir():
        return next(map(data_kind, data_files(path)), None)
    suffixes = reversed(path.suffixes[-2:]) if path.name.endswith(DATA_SUFFIXES) else ()
    return next((each for each in suffixes if each in BUILDERS), None)


def read_local_rows(
    source: str,
    limit: int | None = None,
    select: Select = None,
    options: Options = NO_OPTIONS,
    needs_one_split: str | None = None,
) -> ProblemRows:
    """The first `limit` rows (all if None) of a file or folder, with only the columns that `select`
    chooses (all if None).

    JSON lines are read here, so that errors name the line, and so is Parquet, of which only these
    columns are read. Everything else, and a split other than "train", is read by `datasets`.
    `needs_one_split` names who refuses a folder with several splits. Raises DatasetError with the
    place if something cannot be read.
    """
    path, source = Path(source).expanduser(), short_path(source)
    if not path.exists():
        raise DatasetError(f"{source} does not exist; name {NAMED}, or a hub dataset id")
    if path.is_dir():
        return _read_by_datasets(
            source, lambda: _folder(path, options, needs_one_split), limit, select
        )
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
) -> ProblemRows:
    from datasets.exceptions import DataFilesNotFoundError, DatasetsError
    from datasets.table import CastError

    try:
        dataset = load()
    except DataFilesNotFoundError as error:
        raise DatasetError(f"{place} is a folder without data files; name {NAMED}") from error
    except (DatasetsError, OSError, EOFError, ValueError, RuntimeError, TypeError) as error:
        if "corresponds to no data" in str(error):
            raise DatasetError(f"{place} has no rows") from error
        if isinstance(cast := error.__cause__, CastError):
            columns = set(cast.table_column_names) ^ set(cast.requested_column_names)
            raise DatasetError(
                f"{place}: only some of its files have the columns {', '.join(sorted(columns))}: "
                "name the files one by one, or give them the same columns"
            ) from error
        reason = f"{type(error).__name__}: {first_line(error.__cause__ or error)}"
        raise DatasetError(f"{place}: cannot be read: {reason}") from error
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    names = dataset.column_names
    if select is not None:
        wanted = select(names)
        dataset = dataset.select_columns([name for name in names if name in wanted])
    if any(map(_is_mixed, dataset.features.values())):
        return MappingRows(list(dataset), place)
    return TableRows(dataset.with_format("arrow")[:], place, names)


def _is_mixed(feature: Any) -> bool:
    """True for values of several types, numbers and text for example, which Arrow has as JSON."""
    if isinstance(feature, Mapping):
        return any(map(_is_mixed, feature.values()))
    if isinstance(feature, list):
        return any(map(_is_mixed, feature))
    inside = getattr(feature, "feature", None)
    return type(feature).__name__ == "Json" if inside is None else _is_mixed(inside)


def _folder(path: Path, options: Options, needs_one_split: str | None) -> Any:
    """A folder of `save_to_disk`, or of files that `datasets` recognises."""
    import datasets

    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        given = _folder_options(path, options)
        splits = _split_files(path, given)
        _refuse_left_out(path, splits)
        _refuse_several(path, splits, needs_one_split)
        return datasets.load_dataset(str(path.absolute()), **given)
    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.Dataset):
        return found
    _refuse_several(path, found, needs_one_split)
    if options["split"] not in found:
        raise ValueError(f"no split {options['split']!r} in it; there are: {', '.join(found)}")
    return found[options["split"]]


def _folder_options(path: Path, options: Options) -> Options:
    """The options with those of CSV files, if a folder has such files with the same columns.

    Raises DatasetError for data files of two kinds, of which `datasets` would leave one out, and
    for a path that it takes for a pattern.
    """
    if glob.escape(str(path)) != str(path):
        raise DatasetError(
            f"{short_path(str(path))}: a folder with [, * or ? in its path is read as a pattern, "
            "which may match another: rename it, or name a file in it"
        )
    if _files_are_chosen(path, options):
        return options
    files = data_files(path)
    kinds = {str(data_kind(each)).replace(".jsonl", ".json"): each for each in files}
    if len(kinds) > 1:
        one, other, *_ = (each.relative_to(path) for each in kinds.values())
        raise DatasetError(
            f"{short_path(str(path))} has files of two kinds, {one} and {other}, of which one would"
            " be left out: move one kind to another folder; prompts.source can list several"
        )
    if not {".csv", ".tsv"} & set(kinds):
        return options
    read = [_csv_options(each, options) for each in files]
    return read[0] if all(each == read[0] for each in read) else options


def _refuse_left_out(path: Path, splits: Mapping[Any, Sequence[str]]) -> None:
    """Refuse a folder with files that are in no split: beside one that is named after a split,
    `datasets` leaves out those that are not."""
    read = {Path(file).resolve(): split for split, files in splits.items() for file in files}
    left = [each for each in data_files(path) if each.resolve() not in read]
    if left and read:
        named, split = next(iter(read.items()))
        raise DatasetError(
            f"{short_path(str(path))}: {left[0].relative_to(path)} would be left out, because "
            f"{named.name} is named after the split {str(split)!r} and it is after none: rename "
            "one of them, or name the files one by one: prompts.source can list several"
        )


def _refuse_several(path: Path, splits: Collection[Any], needs_one_split: str | None) -> None:
    if needs_one_split is not None and len(splits) > 1:
        raise DatasetError(
            f"{needs_one_split}: {path} has the splits {', '.join(map(str, splits))}: name the "
            "file or folder of the one to evaluate"
        )


def _split_files(path: Path, options: Options) -> Mapping[Any, Sequence[str]]:
    """The files of each split by their names; none where they are chosen otherwise."""
    import datasets

    if _files_are_chosen(path, options):
        return {}
    others = {key: value for key, value in options.items() if key != "split"}
    return datasets.load_dataset_builder(str(path.absolute()), **others).config.data_files or {}


def _files_are_chosen(path: Path, options: Options) -> bool:
    """Whether the options or the card of a dataset say which files of its folder are read."""
    card = path / "README.md"
    in_card = card.is_file() and "data_files" in card.read_text("utf-8", errors="replace")
    return in_card or "data_files" in options or "data_dir" in options


def _file(path: Path, options: Options) -> Any:
    """A file, by its suffix."""
    import datasets

    kind = data_kind(path)
    given = {k: v for k, v in options.items() if k not in ("name", "revision")}
    if kind in (".csv", ".tsv"):
        given = _csv_options(path, given)
    data_files = glob.escape(str(path))  # not a pattern
    return datasets.load_dataset(BUILDERS[str(kind)], data_files=data_files, **given)


def _csv_options(path: Path, options: Options) -> dict[str, Any]:
    """The options with those by which every value of a CSV file is text, as it is written: 1.50 and
    007 are not the numbers 1.5 and 7. Raises DatasetError if its header does not fit its rows."""
    import datasets
    import pandas

    given = {"keep_default_na": False, **options}
    if "delimiter" not in given:
        given.setdefault("sep", "\t" if data_kind(path) == ".tsv" else ",")
    if given.get("header", 0) is None and not given.get("names"):
        raise DatasetError(
            f"{short_path(str(path))}: header: null needs the names of the columns: set "
            "prompts.dataset_options to {header: null, names: [problem, answer]}"
        )
    if in_python := _is_for_python_engine(given):
        given.setdefault("engine", "python")
    known = set(inspect.signature(pandas.read_csv).parameters).difference(NOT_OF_A_HEADER)
    of_header = {key: value for key, value in given.items() if key in known}
    first = pandas.read_csv(path, **of_header | {"nrows": 1, "dtype": str})
    if given.get("index_col") is None and not isinstance(first.index, pandas.RangeIndex):
        _refuse_more_values(path, first)
    if in_python:
        given.setdefault("converters", dict.fromkeys(first, _as_written))
    else:
        given["features"] = datasets.Features(dict.fromkeys(first, datasets.Value("string")))
    return given


def _is_for_python_engine(options: Options) -> bool:
    """Whether pandas reads with its engine in Python, which ignores the types of columns."""
    separator = options.get("delimiter") or options.get("sep")
    several = len(str(separator).encode()) > 1 and separator != r"\s+"  # so has None, to guess
    return several or options.get("engine") == "python"


def _as_written(value: Any) -> Any:
    """A value of a CSV file as text: pandas converts it no further."""
    return value


def _refuse_more_values(path: Path, first: Any) -> None:
    """Refuse a table whose first row has more values than columns: pandas makes an index of those
    at its beginning."""
    row, columns = first.reset_index().iloc[0].tolist(), list(first.columns)
    raise DatasetError(
        f"{short_path(str(path))} row 0: {len(row)} values, {shown(row)}, for {len(columns)} "
        f"columns, {shown(columns)}: put values that contain the separator in quotes, or name every"
        " column in the header"
    )


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
    wanted: Collection[str] | None = None
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
        if select is not None and wanted is None:
            wanted = select(row)
        if wanted is not None and all(column in row for column in wanted):
            row = {column: row[column] for column in row if column in wanted}
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


ChatMessage = dict[str, Any]
ProblemStatement = str | list[ChatMessage]
"""Text, or the messages of a chat."""

PROBLEM_FIELDS = ("problem", "prompt", "question", "messages")
ANSWER_FIELDS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
"""Where TRL, verl, open-instruct and GSM8K have problems and answers; the first is the default."""

LARGEST_WHOLE = 1e15
"""Whole numbers below it are exact as floats."""

_Value = TypeVar("_Value")


def known_field(field: str, known: Sequence[str], names: Container[str]) -> str:
    """`field`; if the columns `names` do not have it, the first of `known` that they have."""
    found = (each for each in (field, *known) if column_of(each, names) in names)
    return next(found, field)


def checked_column(rows: ProblemRows, field: str, convert: Callable[[Any], _Value]) -> list[_Value]:
    """The converted values of a field. Raises DatasetError with the place of a bad value."""
    converted: list[_Value] = []
    for index, value in enumerate(rows.column(field)):
        try:
            converted.append(convert(value))
        except ValueError as error:
            raise DatasetError(f"{rows.place(index)}: field {field!r} {error}") from None
    return converted


def problems_and_answers(
    rows: ProblemRows, problem_field: str, answer_field: str, by_recipe: bool = True
) -> tuple[list[ProblemStatement], list[str]]:
    """The problems and the reference answers. If the fields are `by_recipe`, answers are what is
    after the last `ANSWER_MARKER`, and the DatasetError for a column that is not there has the key
    that names it."""
    try:
        problems = checked_column(rows, problem_field, problem_statement)
        as_answer = marked_answer if by_recipe else answer_text
        return problems, checked_column(rows, answer_field, as_answer)
    except DatasetError as error:
        fields = {"prompts.problem_field": problem_field, "prompts.answer_field": answer_field}
        missing = [key for key, field in fields.items() if not _has_column(rows, field)]
        if not (missing and by_recipe):
            raise
        advice = f"set {' and '.join(missing)} to the column with it"
        raise DatasetError(f"{error}: {advice}") from None


def _has_column(rows: ProblemRows, field: str) -> bool:
    return column_of(field, rows.names) in rows.names


def unique_ids(rows: ProblemRows, id_field: str | None) -> list[str]:
    """The ids of the rows; their numbers if there is no field.

    Raises DatasetError for a duplicate.
    """
    if id_field is None:
        return [str(index) for index in range(len(rows))]
    ids = checked_column(rows, id_field, answer_text)
    first_with: dict[str, int] = {}
    for index, each in enumerate(ids):
        first = first_with.setdefault(each, index)
        if first != index:
            raise DatasetError(
                f"{rows.place(index)}: id {each!r} in field {id_field!r} is also the id of "
                f"{rows.place(first)}; ids must be unique"
            )
    return ids


def problem_statement(value: Any) -> ProblemStatement:
    """A problem: text, or a list of chat messages that ends with one to be answered."""
    if not isinstance(value, list):
        return text(value)
    messages = [_message(number, each) for number, each in enumerate(value, start=1)]
    if not messages:
        raise ValueError("is a list without messages")
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "ends with a message of the assistant, which is what the model is to write: end with "
            "one of the user"
        )
    return messages


def _message(number: int, value: Any) -> ChatMessage:
    # Arrow gives every message the keys of all, with None where there is no value.
    given = value if isinstance(value, Mapping) else {}
    message = {key: each for key, each in given.items() if each is not None}
    if not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise ValueError(
            f"has {value!r:.80} as message {number}, expected {{role: text, content: text}}"
        )
    return message


def answer_text(value: Any) -> str:
    """A reference answer or an id as text. Text is unchanged; a number becomes its digits, without
    a fraction if it is whole."""
    if isinstance(value, bool):
        return text(value)
    if isinstance(value, float) and LARGEST_WHOLE <= abs(value) < math.inf:
        raise ValueError(
            f"found {value!r}, a number with more digits than this column keeps: fractions beside "
            "it, or an exponent, made all its values floating-point numbers; write them as text"
        )
    if isinstance(value, float | Decimal) and math.isfinite(value):
        whole = float(value).is_integer() and abs(float(value)) < LARGEST_WHOLE
        return str(int(value)) if whole else str(value)
    if isinstance(value, int):
        return str(value)
    return text(value)


def marked_answer(value: Any) -> str:
    """A reference answer; of `8 + 10 = 18\n#### 18` only what is after the last marker, `18`."""
    answer = answer_text(value)
    if ANSWER_MARKER not in answer:
        return answer
    after = answer.rpartition(ANSWER_MARKER)[2].strip()
    if not after:
        raise ValueError(f"has nothing after the marker {ANSWER_MARKER!r}")
    return after


def text(value: Any) -> str:
    """Text that is not blank and valid Unicode."""
    if isinstance(value, datetime.date | datetime.time):
        raise ValueError(
            f"found the date {value}: what looks like one is read as one in this kind of file; "
            "use a single .jsonl file, whose values stay as they are written"
        )
    if not isinstance(value, str):
        raise ValueError(
            f"found {value!r} ({type(value).__name__}), expected text (or, as an answer or id, a "
            "number; as a problem, a list of messages): put it in quotes"
        )
    if not value.strip():
        raise ValueError("is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"found {value!r}, expected valid Unicode: {error.reason}") from None
    return value


SHOWN_CONTENT = 60


def statement_text(problem: ProblemStatement) -> str:
    """The problem, or the content of its last message."""
    return problem if isinstance(problem, str) else problem[-1]["content"]


def fingerprint(text: str) -> int:
    """Equal for problems that differ only in spaces and capitals; valid within this process."""
    return hash("".join(text.casefold().split()))


def notices_of_reading(problems: Sequence[ProblemStatement], answers: Sequence[Any]) -> list[str]:
    """How the rows of one source were read. `answers` are the values of the column."""
    notices = []
    if chats := sum(not isinstance(problem, str) for problem in problems):
        notices.append(
            f"{chats} of {len(problems)} problems are chat messages, rendered as they are: "
            "prompts.system_prompt and prompts.user_template are not used for them"
        )
    if marked := sum(isinstance(each, str) and ANSWER_MARKER in each for each in answers):
        notices.append(
            f"{marked} of {len(answers)} answers contain {ANSWER_MARKER!r}: only the text "
            "after the last one is the reference answer"
        )
    return notices


def notices_of_template(
    texts: Sequence[str], chats: Iterable[Sequence[Mapping[str, Any]]]
) -> list[str]:
    """What the chat template left out of the prompts `texts`, so that the model never sees it."""
    lost = [
        [each for each in chat if each["content"].strip() not in text]
        for text, chat in zip(texts, chats, strict=True)
    ]
    first = next((messages[0] for messages in lost if messages), None)
    if first is None:
        return []
    shown = first["content"][:SHOWN_CONTENT]
    return [
        f"the chat template leaves messages out of {sum(map(bool, lost))} of {len(texts)} prompts; "
        f"the first is of the {first['role']}: {shown!r}. The model does not see them"
    ]


def notices_of_duplicates(fingerprints: Sequence[int], answers: Sequence[str]) -> list[str]:
    repeated = len(fingerprints) - len(set(fingerprints))
    if repeated == 0:
        return []
    pairs = set(zip(fingerprints, answers, strict=True))
    contrary = len(pairs) - len(set(fingerprints))
    other = f", {contrary} of them with another answer" if contrary else ""
    return [
        f"{repeated} of {len(fingerprints)} prompts repeat the problem of another one (but for "
        f"spaces and capitals){other}"
    ]


def unknown_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The token of all characters that a tokenizer does not have. None if it has all of them: one
    of bytes may still name a token so, the one that begins or ends its texts."""
    unknown: int | None = tokenizer.unk_token_id
    return None if unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id) else unknown


def notices_of_use(
    fingerprints: Sequence[int], prompts_per_step: int, held_out: Iterable[tuple[str, str]]
) -> list[str]:
    """Notices about too few prompts, and about those that are also `held_out`, which are the
    problems of the evaluations: (benchmark, text)."""
    notices, trained = [], set(fingerprints)
    if len(fingerprints) < prompts_per_step:
        notices.append(
            f"{len(fingerprints)} prompts are fewer than sampling.prompts_per_step "
            f"{prompts_per_step}: a step samples the same prompt in several groups"
        )
    problems = set(held_out)
    totals = Counter(name for name, _ in problems)
    shared = Counter(name for name, text in problems if fingerprint(text) in trained)
    notices += [
        f"{shared[name]} of {totals[name]} problems of benchmark {name!r} are also training "
        "prompts: its accuracy is not held-out; take them out of one of the two"
        for name in sorted(shared)
    ]
    return notices
