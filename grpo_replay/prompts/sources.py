"""Reads rows of problems from local files or the hub, checks and converts their values (problems,
reference answers, ids), and makes the notices about them that a run prints at the start.

Reading does not check values. A conversion raises ValueError with the value; `checked_column` adds
the location of the row.
"""

import csv
import glob
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from grpo_replay.errors import DatasetError, did_you_mean, first_line, no_such_path
from grpo_replay.hub import use_cache_without_hub
from grpo_replay.recipe.base import whole_characters
from grpo_replay.recipe.input_sections import ANSWER_MARKER
from grpo_replay.recipe.layers import DATA_SUFFIXES, short_path, shown

KINDS = f"a file ({', '.join(DATA_SUFFIXES)}), a folder of `save_to_disk`, or a hub dataset id"
SEPARATORS = ",;\t"
"""Separators that are recognised in the header of a CSV file; others need the option `sep`."""


class ProblemRows:
    """Rows by index (0-based), of a list or a `datasets.Dataset`. `lines[i]` is the line number of
    row i in its file, 1-based. `names` are the columns; of a list, those of the first row."""

    def __init__(self, rows: Any, source: str, lines: Sequence[int] | None = None) -> None:
        self._rows, self._source, self._lines = rows, source, lines
        self.names: list[str] = (
            list(rows[0] if rows else ()) if isinstance(rows, Sequence) else rows.column_names
        )
        self._features = None if isinstance(rows, Sequence) else rows.features

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        """Returns all fields of one row, with decoded values."""
        return decoded_value(self._rows[index], self._features)

    def column(self, field: str) -> list[Any]:
        """Return the value of a field in every row. `reward_model.ground_truth` is the value of
        `ground_truth` inside the column `reward_model`, unless a column has the whole name. Raises
        DatasetError if a row does not have the field."""
        column, rows = containing_column(field, self.names), self._rows
        is_column = _normalised(column) == _normalised(field)
        nested_keys = [] if is_column else field.split(".")[1:]
        if self._features is not None and column in self.names:
            values = rows[column][:]  # the other columns are not read
            rows = (decoded_value({column: value}, self._features) for value in values)
        return [self._value(index, row, field, nested_keys) for index, row in enumerate(rows)]

    def _value(self, index: int, row: Any, field: str, nested_keys: Sequence[str]) -> Any:
        """Returns the value of a field in row `index`; `nested_keys` lead into its column."""
        value = row
        for key in (containing_column(field, row), *nested_keys):
            if not isinstance(value, Mapping) or key not in value:
                present = list(value) if isinstance(value, Mapping) else [repr(value)]
                raise DatasetError(
                    f"{self.location(index)}: no field {field!r}{did_you_mean(key, present)}; "
                    f"there are: {', '.join(present)}. prompts.problem_field, answer_field and "
                    "id_field (null: row numbers) name the columns"
                )
            value = value[key]
        return value

    def location(self, index: int) -> str:
        """Returns the location of a row for error messages, for example `problems.jsonl:12`."""
        lines = self._lines
        return f"{self._source} row {index}" if lines is None else f"{self._source}:{lines[index]}"


def containing_column(field: str, columns: Collection[str]) -> str:
    """Return the column that contains a field: the one with its name, or with the part of the name
    before the first dot, which is also the answer if there is none. If no column has exactly that
    name, capitals and surrounding space are ignored."""
    outer_name = field.partition(".")[0]
    for name in (field, outer_name):
        if name in columns:
            return name
        for column in columns:
            if _normalised(column) == _normalised(name):
                return column
    return outer_name


def _normalised(name: str) -> str:
    return name.strip().casefold()


class DecimalFloat(float):
    """A float with the decimal number from which it was read, and the numpy name of its type."""

    def __new__(cls, decimal: str, kind: str = "float64") -> "DecimalFloat":
        number = super().__new__(cls, decimal)
        number.decimal, number.kind = Decimal(decimal), kind
        return number

    decimal: Decimal
    kind: str


def decoded_value(value: Any, feature: Any) -> Any:
    """Decode a value of a `datasets` feature, also inside mappings: a class label becomes its name
    or None, a 16- or 32-bit float its shortest decimal, 0.1 instead of 0.10000000149011612."""
    if isinstance(value, Mapping) and isinstance(feature, Mapping):
        return {key: decoded_value(item, feature.get(key)) for key, item in value.items()}
    if value is not None and (kind := getattr(feature, "dtype", "")) in ("float16", "float32"):
        return DecimalFloat(str(np.dtype(kind).type(value)), kind)
    if isinstance(value, int) and (names := getattr(feature, "names", None)) is not None:
        return names[value] if 0 <= value < len(names) else None
    return value


def read_local_rows(source: str, options: Mapping[str, Any]) -> ProblemRows:
    """Read the rows of a file, or of a folder of `save_to_disk`. `options` are those of `datasets`
    for a CSV or Parquet file.

    JSON is not read by `datasets`, which turns `007` into a number and texts like dates into dates.
    Raises DatasetError with the location if something cannot be read.
    """
    path, source = Path(source).expanduser(), short_path(source)
    if not path.exists():
        missing = no_such_path(Path(source).expanduser())
        raise DatasetError(f"prompts.source or eval.benchmarks: {missing}; name {KINDS}")
    if path.suffix in (".csv", ".tsv") and path.is_file():
        rows = _load_with_datasets(source, "csv", path, _csv_options(path, source, options))
        return ProblemRows(_drop_trailing_blank_rows(rows), source)
    if path.suffix == ".parquet" and path.is_file():
        return ProblemRows(_load_with_datasets(source, "parquet", path, options), source)
    if options != {"split": "train"}:
        raise DatasetError(
            f"prompts.dataset_options {shown(dict(options))} with {source}: only a CSV or Parquet "
            "file and a hub dataset have options; save a part of other rows as a file of its own"
        )
    if path.is_dir():
        return ProblemRows(_load_saved_dataset(path, source), source)
    if path.suffix not in (".jsonl", ".json"):
        raise DatasetError(f"{source}: files of kind {path.suffix!r} are not read; name {KINDS}")
    return ProblemRows(*_read_json_rows(path, source))


def read_hub_rows(source: str, options: Mapping[str, Any]) -> ProblemRows:
    """Read the rows of a split of a Hugging Face dataset, from the cache or the hub, memory-mapped.

    Raises DatasetError, with the command to download it, if the dataset is not available.
    """
    use_cache_without_hub()
    import datasets

    try:
        rows = datasets.load_dataset(source, **options)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        if cache_failure := _cache_failure(error):
            raise DatasetError(f"dataset {source!r}: {cache_failure}") from error
        raise DatasetError(
            f"dataset {source!r} (config {options['name']}, split {options['split']!r}) is not "
            f"in the local cache and cannot be fetched from the hub: {first_line(error)}."
            f" On a machine with network access, run `hf download --repo-type dataset {source} "
            "--local-dir DIR`, and name the .parquet or .jsonl file in DIR instead (of a "
            "benchmark: eval.data_folder)"
        ) from error
    return ProblemRows(rows, f"{source}[{options['split']}]")


def _load_with_datasets(source: str, kind: str, path: Path, options: Mapping[str, Any]) -> Any:
    """Load a file with `datasets`, never an older version from its cache: that identifies a file by
    name and time, and here by a digest of the content too."""
    import datasets

    try:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        data_files = glob.escape(str(path))
        return datasets.load_dataset(kind, **{**options, "name": content, "data_files": data_files})
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError) as error:
        read_failure = f"cannot be read: {first_line(error.__cause__ or error)}"
        raise DatasetError(f"{source}: {_cache_failure(error, path) or read_failure}") from error


def _cache_failure(error: Exception, path: Path | None = None) -> str | None:
    """Describe why `datasets` cannot write its cache; None for others, as to read `path`."""
    cause = error.__cause__ or error
    failed_path = getattr(cause, "filename", None)
    if not isinstance(cause, OSError) or failed_path is None:
        return None
    if path is not None and os.path.abspath(str(failed_path)) == os.path.abspath(path):
        return None
    return (
        f"the cache of `datasets` cannot be written: {failed_path}: {cause.strerror}; set HF_HOME "
        "to a folder that can be written (by default it is below the home folder)"
    )


def _load_saved_dataset(path: Path, source: str) -> Any:
    """Loads a folder of `save_to_disk`. Raises DatasetError for a folder of several splits."""
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{source}: {first_line(error).rstrip('.')}; name {KINDS}") from error
    if isinstance(dataset, datasets.Dataset):
        return dataset
    raise DatasetError(
        f"{source} has the splits {', '.join(dataset)}: name the folder of one, for example "
        f"{source}/{next(iter(dataset))}"
    )


def _csv_options(path: Path, source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the options with which `datasets` reads every value of a CSV file as text: 1.50 and 007
    stay as they are. Without the option `sep`, the separator is the most frequent in the header.
    Raises DatasetError for a first row longer than the header, of which pandas would make an
    index."""
    import datasets

    csv_options = {"keep_default_na": False, **options}
    try:
        with path.open(encoding=csv_options.get("encoding", "utf-8-sig"), newline="") as file:
            csv_options.setdefault("sep", max(SEPARATORS, key=file.readline().count))
            file.seek(0)
            lines = csv.reader(file, delimiter=csv_options["sep"])
            names, first = next(lines, []), next(lines, [])
    except (OSError, UnicodeDecodeError, LookupError, TypeError, csv.Error) as error:
        raise DatasetError(
            f"{source}: cannot be read: {error}; save it as UTF-8, or set prompts.dataset_options "
            "to {sep: …, encoding: …} of the file"
        ) from error
    if not names:
        raise DatasetError(f"{source} has no rows")
    if len(first) > len(names):
        raise DatasetError(
            f"{source} row 0: {len(first)} values, {shown(first)}, for the columns {shown(names)}: "
            "put values that contain the separator in quotes, or name every column in the header"
        )
    names = [name.strip() or f"column {number}" for number, name in enumerate(names, start=1)]
    features = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
    return {**csv_options, "names": names, "header": 0, "features": features}


def _drop_trailing_blank_rows(rows: Any) -> Any:
    """Drop blank rows at the end, which spreadsheets write."""
    size = len(rows)
    while size and not any((value or "").strip() for value in rows[size - 1].values()):
        size -= 1
    return rows.select(range(size))


def _read_json_rows(path: Path, source: str) -> tuple[list[Any], str, list[int] | None]:
    """Read the objects of JSON lines, or of one JSON array. Returns them with the source, and the
    line numbers of JSON lines. Raises DatasetError that names the line."""
    rows, lines, number = list[Any](), list[int](), 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            is_array = path.suffix == ".json" and file.read(99).lstrip().startswith("[")
            file.seek(0)
            if is_array:
                rows = json.load(file, parse_float=DecimalFloat)
            for number, text in enumerate(file, start=1):
                if text.strip():
                    rows.append(json.loads(text, parse_float=DecimalFloat))
                    lines.append(number)
    except (OSError, ValueError, RecursionError) as error:
        location = f"{source}:{number}" if number else source
        raise DatasetError(
            f"{location}: cannot be read: {error}; every line is one JSON object in UTF-8, or a "
            ".json file one array of them"
        ) from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            location = f"{source}:{lines[index]}" if lines else f"{source} row {index}"
            raise DatasetError(f"{location}: found {shown(row)}, expected a JSON object")
    return rows, source, lines or None


ChatMessage = dict[str, Any]
ProblemStatement = str | list[ChatMessage]
"""The text of a problem, or the messages of a chat."""

PROBLEM_FIELDS = ("problem", "prompt", "question", "messages")
ANSWER_FIELDS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
"""Columns of TRL, verl, open-instruct and GSM8K for problems and answers; first the defaults."""

_Value = TypeVar("_Value")


def known_field(field: str, known: Sequence[str], names: Collection[str]) -> str:
    """Return `field`, or if the columns `names` lack it, the first of `known` that they have."""
    present = (name for name in (field, *known) if containing_column(name, names) in names)
    return next(present, field)


def checked_column(rows: ProblemRows, field: str, convert: Callable[[Any], _Value]) -> list[_Value]:
    """Convert the values of a field. Raises DatasetError with the location of a bad value."""
    converted: list[_Value] = []
    for index, value in enumerate(rows.column(field)):
        try:
            converted.append(convert(value))
        except ValueError as error:
            raise DatasetError(f"{rows.location(index)}: field {field!r} {error}") from None
    return converted


def unique_ids(rows: ProblemRows, id_field: str | None) -> list[str]:
    """Return the ids of the rows, without `id_field` their row numbers, as text. Raises
    DatasetError for a duplicate."""
    if id_field is None:
        return [str(index) for index in range(len(rows))]
    ids = checked_column(rows, id_field, answer_text)
    first_with_id: dict[str, int] = {}
    for index, row_id in enumerate(ids):
        if (first := first_with_id.setdefault(row_id, index)) != index:
            raise DatasetError(
                f"{rows.location(index)}: id {row_id!r} in field {id_field!r} is also the id of "
                f"{rows.location(first)}; ids must be unique"
            )
    return ids


def problem_statement(value: Any) -> ProblemStatement:
    """Convert a problem: text, or a list of chat messages that ends with one to be answered."""
    if not isinstance(value, list):
        return text(value)
    messages = [_message(message) for message in value]
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError(
            f"has {shown(value)}, expected messages that end with a user message: the model writes "
            "the assistant's answer"
        )
    return messages


def _message(value: Any) -> ChatMessage:
    # Arrow gives every message the keys of all messages, with None where there is no value.
    items = value.items() if isinstance(value, Mapping) else ()
    message = {key: item for key, item in items if item is not None}
    if not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise ValueError(f"has the message {shown(value)}, expected {{role: text, content: text}}")
    return whole_characters(message)


def answer_text(value: Any) -> str:
    """Convert a reference answer or an id to text. Text is unchanged; a number becomes its digits,
    without trailing zeros of the fraction."""
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return _digits(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_whole else text(value)


def _digits(value: float | Decimal) -> str:
    """Returns the digits of a number as they were written, without trailing zeros of a fraction.
    Raises ValueError for a whole number that its float type cannot tell from its neighbours, and
    that has more digits than the type keeps."""
    written = value if isinstance(value, Decimal) else Decimal(repr(value))
    number = f"{getattr(value, 'decimal', written):f}"
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    if isinstance(value, float) and "." not in number:
        limits = np.finfo(getattr(value, "kind", "float64"))
        is_exact = abs(value) < 2 ** (limits.nmant + 1)
        if not is_exact and len(number.strip("-0")) > limits.precision:
            raise ValueError(
                f"found {number} as a float, which stands for several whole numbers: write it as "
                "an integer, or put it in quotes"
            )
    return "0" if number == "-0" else number


def reference_answer(value: Any) -> str:
    """Convert a reference answer; of `8 + 10 = 18\n#### 18`, the text after the last marker."""
    answer = answer_text(value)
    return text(answer.rpartition(ANSWER_MARKER)[2].strip()) if ANSWER_MARKER in answer else answer


def text(value: Any) -> str:
    """Check that a value is text, not blank, and valid Unicode, and return it."""
    if not isinstance(value, str):
        raise ValueError(
            f"found {value!r} ({type(value).__name__}), expected text (or, as an answer or id, a "
            "number; as a problem, a list of messages): put it in quotes"
        )
    if not value.strip():
        raise ValueError("is empty: fill it in, or remove the row")
    return whole_characters(value)


def statement_text(problem: ProblemStatement) -> str:
    """Returns the text of a problem; of a chat, the content of all messages but the system's."""
    if isinstance(problem, str):
        return problem
    return "\n".join(message["content"] for message in problem if message["role"] != "system")


def fingerprint(problem: ProblemStatement) -> int:
    """Returns a hash that is equal for problems, or chats, that differ only in spaces and capitals;
    valid within this process."""
    chat = () if isinstance(problem, str) else problem
    system_text = "".join(message["content"] for message in chat if message["role"] == "system")
    texts = (system_text, statement_text(problem))
    return hash(tuple("".join(text.casefold().split()) for text in texts))


def notices_of_reading(problems: Sequence[ProblemStatement], answers: Sequence[Any]) -> list[str]:
    """Say how the rows of one source were read. `answers` are the values of the answer column."""
    notices = []
    if chats := sum(not isinstance(problem, str) for problem in problems):
        notices.append(
            f"{chats} of {len(problems)} problems are chat messages, rendered as they are: "
            "prompts.system_prompt and prompts.user_template are not used for them"
        )
    marked = sum(isinstance(answer, str) and ANSWER_MARKER in answer for answer in answers)
    if marked:
        notices.append(
            f"{marked} of {len(answers)} answers contain {ANSWER_MARKER!r}: only the text "
            "after the last one is the reference answer"
        )
    return notices


def notices_of_duplicates(fingerprints: Sequence[int], answers: Sequence[str]) -> list[str]:
    """Return a notice if problems repeat, with the number of those whose answers differ."""
    repeated = len(fingerprints) - len(set(fingerprints))
    if repeated == 0:
        return []
    pairs = set(zip(fingerprints, answers, strict=True))
    contradictory = len(pairs) - len(set(fingerprints))
    suffix = f", {contradictory} of them with another answer" if contradictory else ""
    return [
        f"{repeated} of {len(fingerprints)} prompts repeat the problem of another one (but for "
        f"spaces and capitals){suffix}"
    ]
