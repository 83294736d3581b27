"""Rows of problems from local files, the hub, or a built-in set; their values, checked and
converted (problems, reference answers, ids); and what a run says about them at the start.

Reading does not check values. A conversion raises ValueError with the value found;
`checked_column` adds the place of the row.
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
"""Those that are found in the header of a CSV file; others are named by `sep`."""


class ProblemRows:
    """Rows by index (0-based), in memory or of a `datasets.Dataset`. `lines[i]` is the line number
    of row i, 1-based. `names` are the columns, of rows in memory those of the first."""

    def __init__(self, rows: Any, source: str, lines: Sequence[int] | None = None) -> None:
        self._rows, self._source, self._lines = rows, source, lines
        self.names: list[str] = (
            list(rows[0] if rows else ()) if isinstance(rows, Sequence) else rows.column_names
        )
        self._features = None if isinstance(rows, Sequence) else rows.features

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        return as_meant(self._rows[index], self._features)

    def column(self, field: str) -> list[Any]:
        """The field's value in every row. `reward_model.ground_truth` is the value of
        `ground_truth` inside the column `reward_model`, unless a column has the whole name. Raises
        DatasetError if a row does not have the field."""
        column, rows = column_of(field, self.names), self._rows
        inside = [] if _plain(column) == _plain(field) else field.split(".")[1:]
        if self._features is not None and column in self.names:
            values = rows[column][:]  # the other columns are not read
            rows = (as_meant({column: value}, self._features) for value in values)
        return [self._value(index, row, field, inside) for index, row in enumerate(rows)]

    def _value(self, index: int, row: Any, field: str, inside: Sequence[str]) -> Any:
        value = row
        for key in (column_of(field, row), *inside):
            if not isinstance(value, Mapping) or key not in value:
                there = list(value) if isinstance(value, Mapping) else [repr(value)]
                raise DatasetError(
                    f"{self.place(index)}: no field {field!r}{did_you_mean(key, there)}; there "
                    f"are: {', '.join(there)}. prompts.problem_field, answer_field and id_field "
                    "(null: row numbers) name the columns"
                )
            value = value[key]
        return value

    def place(self, index: int) -> str:
        """The place of the row for error messages, for example `problems.jsonl:12`."""
        lines = self._lines
        return f"{self._source} row {index}" if lines is None else f"{self._source}:{lines[index]}"


def column_of(field: str, columns: Collection[str]) -> str:
    """The column that contains a field: that of its name, or of what is before its first dot.
    Capitals and the space around a name do not count if no column has it exactly."""
    first = field.partition(".")[0]
    for name in (field, first):
        if name in columns:
            return name
        for each in columns:
            if _plain(each) == _plain(name):
                return each
    return first


def _plain(name: str) -> str:
    return name.strip().casefold()


class DecimalFloat(float):
    """A float with the decimal number that was written for it, and the numpy name of its type."""

    def __new__(cls, decimal: str, kind: str = "float64") -> "DecimalFloat":
        number = super().__new__(cls, decimal)
        number.decimal, number.kind = Decimal(decimal), kind
        return number

    decimal: Decimal
    kind: str


def as_meant(value: Any, feature: Any) -> Any:
    """A value of a `datasets` feature, in mappings too: a class by its name (None if it has none),
    and a number of 16 or 32 bits as its shortest decimal: 0.1, not 0.10000000149011612."""
    if isinstance(value, Mapping) and isinstance(feature, Mapping):
        return {key: as_meant(each, feature.get(key)) for key, each in value.items()}
    if value is not None and (kind := getattr(feature, "dtype", "")) in ("float16", "float32"):
        return DecimalFloat(str(np.dtype(kind).type(value)), kind)
    if isinstance(value, int) and (names := getattr(feature, "names", None)) is not None:
        return names[value] if 0 <= value < len(names) else None
    return value


def read_local_rows(source: str, options: Mapping[str, Any]) -> ProblemRows:
    """The rows of a file, or of a folder of `save_to_disk`; `options` are those of `datasets` for a
    CSV or Parquet file.

    JSON is read here: `datasets` makes numbers of `007` and dates of texts that look like them.
    Raises DatasetError with the place if something cannot be read.
    """
    path, source = Path(source).expanduser(), short_path(source)
    if not path.exists():
        missing = no_such_path(Path(source).expanduser())
        raise DatasetError(f"prompts.source or eval.benchmarks: {missing}; name {KINDS}")
    if path.suffix in (".csv", ".tsv") and path.is_file():
        rows = _by_datasets(source, "csv", path, _csv_options(path, source, options))
        return ProblemRows(_without_blank_end(rows), source)
    if path.suffix == ".parquet" and path.is_file():
        return ProblemRows(_by_datasets(source, "parquet", path, options), source)
    if options != {"split": "train"}:
        raise DatasetError(
            f"prompts.dataset_options {shown(dict(options))} with {source}: only a CSV or Parquet "
            "file and a hub dataset have options; put a part of other rows into a file of its own"
        )
    if path.is_dir():
        return ProblemRows(_saved_rows(path, source), source)
    if path.suffix not in (".jsonl", ".json"):
        raise DatasetError(f"{source}: the kind of file {path.suffix!r} is not read; name {KINDS}")
    return ProblemRows(*_json_rows(path, source))


def read_hub_rows(source: str, options: Mapping[str, Any]) -> ProblemRows:
    """The rows of a split of a Hugging Face dataset, from the cache or the hub. The library
    memory-maps its files.

    Raises DatasetError, with the command to download it, if the dataset is not available.
    """
    use_cache_without_hub()
    import datasets

    try:
        rows = datasets.load_dataset(source, **options)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        if unwritten := _cache_failure(error):
            raise DatasetError(f"dataset {source!r}: {unwritten}") from error
        raise DatasetError(
            f"dataset {source!r} (config {options['name']}, split {options['split']!r}) is not "
            f"in the local cache and cannot be fetched from the hub: {first_line(error)}."
            f" On a machine with network access, run `hf download --repo-type dataset {source} "
            "--local-dir DIR`, and name the .parquet or .jsonl file in DIR instead (of a "
            "benchmark: eval.data_folder)"
        ) from error
    return ProblemRows(rows, f"{source}[{options['split']}]")


def _by_datasets(source: str, kind: str, path: Path, options: Mapping[str, Any]) -> Any:
    """The rows as they are on disk: the cache of `datasets` knows a file by its name and time, so
    the digest of its content is made part of the key."""
    import datasets

    try:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        given = {**options, "name": content, "data_files": glob.escape(str(path))}
        return datasets.load_dataset(kind, **given)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError) as error:
        reason = first_line(error.__cause__ or error)
        unread = _cache_failure(error, path) or f"cannot be read: {reason}"
        raise DatasetError(f"{source}: {unread}") from error


def _cache_failure(error: Exception, path: Path | None = None) -> str | None:
    """What `datasets` could not do in its cache, where it writes what it reads; None for a failure
    to read `path` itself."""
    cause = error.__cause__ or error
    place = getattr(cause, "filename", None)
    if not isinstance(cause, OSError) or place is None:
        return None
    if path is not None and os.path.abspath(str(place)) == os.path.abspath(path):
        return None
    return (
        f"the cache of `datasets` cannot be written: {place}: {cause.strerror}; set HF_HOME to a "
        "folder that can be (it is below the home folder by default)"
    )


def _saved_rows(path: Path, source: str) -> Any:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{source}: {first_line(error).rstrip('.')}; name {KINDS}") from error
    if isinstance(found, datasets.Dataset):
        return found
    raise DatasetError(
        f"{source} has the splits {', '.join(found)}: name the folder of one, "
        f"{source}/{next(iter(found))}"
    )


def _csv_options(path: Path, source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by which every value of a CSV file is text as it is written: 1.50 and 007 are not
    the numbers 1.5 and 7. The separator is that of which the header has most, unless it is named.
    Raises DatasetError for a first row that is longer than the header: pandas makes an index of its
    beginning."""
    import datasets

    given = {"keep_default_na": False, **options}
    try:
        with path.open(encoding=given.get("encoding", "utf-8-sig"), newline="") as file:
            given.setdefault("sep", max(SEPARATORS, key=file.readline().count))
            file.seek(0)
            lines = csv.reader(file, delimiter=given["sep"])
            names, first = next(lines, []), next(lines, [])
    except (OSError, UnicodeDecodeError, LookupError, TypeError, csv.Error) as error:
        raise DatasetError(
            f"{source}: cannot be read: {error}; save it as UTF-8, or set prompts.dataset_options "
            "to its {sep: …, encoding: …}"
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
    return {**given, "names": names, "header": 0, "features": features}


def _without_blank_end(rows: Any) -> Any:
    """The rows without blank ones at the end, which spreadsheets write."""
    size = len(rows)
    while size and not any((value or "").strip() for value in rows[size - 1].values()):
        size -= 1
    return rows.select(range(size))


def _json_rows(path: Path, source: str) -> tuple[list[Any], str, list[int] | None]:
    """The objects of JSON lines, the source and the line numbers, or those of one JSON array."""
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
        place = f"{source}:{number}" if number else source
        raise DatasetError(
            f"{place}: cannot be read: {error}; every line is one JSON object in UTF-8, or a .json "
            "file one array of them"
        ) from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            place = f"{source}:{lines[index]}" if lines else f"{source} row {index}"
            raise DatasetError(f"{place}: found {shown(row)}, expected a JSON object")
    return rows, source, lines or None


ChatMessage = dict[str, Any]
ProblemStatement = str | list[ChatMessage]
"""Text, or the messages of a chat."""

PROBLEM_FIELDS = ("problem", "prompt", "question", "messages")
ANSWER_FIELDS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
"""Where TRL, verl, open-instruct and GSM8K have problems and answers; the first is the default."""

_Value = TypeVar("_Value")


def known_field(field: str, known: Sequence[str], names: Collection[str]) -> str:
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


def unique_ids(rows: ProblemRows, id_field: str | None) -> list[str]:
    """The ids of the rows; their numbers if there is no field.

    Raises DatasetError for a duplicate.
    """
    if id_field is None:
        return [str(index) for index in range(len(rows))]
    ids = checked_column(rows, id_field, answer_text)
    first_with: dict[str, int] = {}
    for index, each in enumerate(ids):
        if (first := first_with.setdefault(each, index)) != index:
            raise DatasetError(
                f"{rows.place(index)}: id {each!r} in field {id_field!r} is also the id of "
                f"{rows.place(first)}; ids must be unique"
            )
    return ids


def problem_statement(value: Any) -> ProblemStatement:
    """A problem: text, or a list of chat messages that ends with one to be answered."""
    if not isinstance(value, list):
        return text(value)
    messages = [_message(each) for each in value]
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError(
            f"has {shown(value)}, expected messages that end with one of the user: the model is to "
            "write what the assistant says"
        )
    return messages


def _message(value: Any) -> ChatMessage:
    # Arrow gives every message the keys of all, with None where there is no value.
    given = value if isinstance(value, Mapping) else {}
    message = {key: each for key, each in given.items() if each is not None}
    if not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise ValueError(f"has the message {shown(value)}, expected {{role: text, content: text}}")
    return whole_characters(message)


def answer_text(value: Any) -> str:
    """A reference answer or an id as text. Text is unchanged; a number becomes its digits, without
    zeros after those of its fraction."""
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return _digits(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_whole else text(value)


def _digits(value: float | Decimal) -> str:
    """The decimal number that was written. Raises ValueError for a float that is too large for its
    type to keep whole numbers apart, and has more digits than the type keeps."""
    written = value if isinstance(value, Decimal) else Decimal(repr(value))
    number = f"{getattr(value, 'decimal', written):f}"
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    if isinstance(value, float) and "." not in number:
        kept = np.finfo(getattr(value, "kind", "float64"))
        is_exact = abs(value) < 2 ** (kept.nmant + 1)
        if not is_exact and len(number.strip("-0")) > kept.precision:
            raise ValueError(
                f"found {number} as a float, which stands for several whole numbers: write it as "
                "an integer, or put it in quotes"
            )
    return "0" if number == "-0" else number


def reference_answer(value: Any) -> str:
    """A reference answer; of `8 + 10 = 18\n#### 18` only what is after the last marker, `18`."""
    answer = answer_text(value)
    return text(answer.rpartition(ANSWER_MARKER)[2].strip()) if ANSWER_MARKER in answer else answer


def text(value: Any) -> str:
    """Text that is not blank and valid Unicode."""
    if not isinstance(value, str):
        raise ValueError(
            f"found {value!r} ({type(value).__name__}), expected text (or, as an answer or id, a "
            "number; as a problem, a list of messages): put it in quotes"
        )
    if not value.strip():
        raise ValueError("is empty: fill it in, or remove the row")
    return whole_characters(value)


def statement_text(problem: ProblemStatement) -> str:
    """The problem, or the content of its messages, but for those of the system."""
    if isinstance(problem, str):
        return problem
    return "\n".join(each["content"] for each in problem if each["role"] != "system")


def fingerprint(problem: ProblemStatement) -> int:
    """Equal for problems that differ only in spaces and capitals, for chats if all of their
    messages do; valid within this process."""
    chat = () if isinstance(problem, str) else problem
    of_system = "".join(each["content"] for each in chat if each["role"] == "system")
    plain = ["".join(text.casefold().split()) for text in (of_system, statement_text(problem))]
    return hash(tuple(plain))


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
