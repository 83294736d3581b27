"""Rows of problems from local files, the hub, or a built-in set; their values, checked and
converted (problems, reference answers, ids); and what a run says about them at the start.

Reading does not check values. A conversion raises ValueError with the value found;
`checked_column` adds the place of the row.
"""

import csv
import glob
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_replay.errors import DatasetError, did_you_mean, first_line
from grpo_replay.hub import use_cache_without_hub
from grpo_replay.recipe.input_sections import ANSWER_MARKER
from grpo_replay.recipe.layers import DATA_SUFFIXES, short_path, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NAMED = (
    f"a file ({', '.join(DATA_SUFFIXES)}), a folder of `save_to_disk`, or a hub dataset id; a list "
    "may name several"
)
SEPARATORS = ",;\t"
"""Those that are found in the header of a CSV file; others are named by `sep`."""

Options = Mapping[str, Any]
"""Arguments of `datasets.load_dataset`, with the split."""
NO_OPTIONS: Options = {"split": "train"}


class ProblemRows:
    """Rows by index (0-based), in memory or of a `datasets.Dataset`. `lines[i]` is the line number
    of row i, 1-based. `names` are the columns, of rows in memory those of the first."""

    def __init__(self, rows: Any, source: str, lines: Sequence[int] | None = None) -> None:
        self._rows, self._source, self._lines = rows, source, lines
        self._in_memory = isinstance(rows, Sequence)
        self.names: list[str] = (
            rows.column_names if not self._in_memory else list(rows[0]) if rows else []
        )

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]

    def column(self, field: str) -> list[Any]:
        """The field's value in every row. `reward_model.ground_truth` is the value of
        `ground_truth` inside the column `reward_model`, unless a column has the whole name. Raises
        DatasetError if a row does not have the field."""
        rows: Iterable[Mapping[str, Any]] = self._rows
        if not self._in_memory:
            column = column_of(field, self.names)
            if column not in self.names:
                raise DatasetError(f"{self._source}: {_no_field(field, self.names)}")
            rows = ({column: value} for value in self._rows[column][:])
        return [self._value(index, row, field) for index, row in enumerate(rows)]

    def _value(self, index: int, row: Mapping[str, Any], field: str) -> Any:
        column = column_of(field, row)
        if column not in row:
            raise DatasetError(f"{self.place(index)}: {_no_field(field, row)}")
        value, path = row[column], column
        for key in [] if _plain(column) == _plain(field) else field.split(".")[1:]:
            if not isinstance(value, Mapping) or key not in value:
                kind = type(value).__name__
                has = ", ".join(value) if isinstance(value, Mapping) else f"no keys, it is a {kind}"
                raise DatasetError(f"{self.place(index)}: no field {field!r}: {path} has {has}")
            value, path = value[key], f"{path}.{key}"
        return value

    def place(self, index: int) -> str:
        """The place of the row for error messages, for example `problems.jsonl:12`."""
        if self._lines is None:
            return f"{self._source} row {index}"
        return f"{self._source}:{self._lines[index]}"


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


def _no_field(field: str, known: Collection[str]) -> str:
    return (
        f"no field {field!r}{did_you_mean(field, known)}; there are: {', '.join(known)}. "
        "prompts.problem_field, answer_field and id_field (null: row numbers) name the columns"
    )


def is_local_source(source: str) -> bool:
    """True if `source` is a local file or folder, by its suffix or because it exists."""
    local = source.startswith(("/", ".", "~")) or Path(source).exists()
    return local or source.endswith(DATA_SUFFIXES)


def read_local_rows(
    source: str, limit: int | None = None, options: Options = NO_OPTIONS
) -> ProblemRows:
    """The first `limit` rows (all if None) of a file, or of a folder of `save_to_disk`.

    JSON is read here: `datasets` makes numbers of `007` and dates of texts that look like them.
    Raises DatasetError with the place if something cannot be read.
    """
    path, source = Path(source).expanduser(), short_path(source)
    if not path.exists():
        there = os.listdir(path.parent) if path.parent.is_dir() else ()
        raise DatasetError(f"{source} does not exist{did_you_mean(path.name, there)}; name {NAMED}")
    if path.suffix in (".csv", ".tsv") and path.is_file():
        given = _csv_options(path, source, options)
        rows = _without_blank_end(_by_datasets(source, "csv", path, given))
        return _first_rows(rows, limit, source)
    if path.suffix == ".parquet" and path.is_file():
        return _first_rows(_by_datasets(source, "parquet", path, options), limit, source)
    if options != NO_OPTIONS:
        raise DatasetError(
            f"prompts.dataset_options {shown(dict(options))} with {source}: only a CSV or Parquet "
            "file and a hub dataset have options; put a part of other rows into a file of its own"
        )
    if path.is_dir():
        return _first_rows(_saved_rows(path, source), limit, source)
    if path.suffix not in (".jsonl", ".json"):
        raise DatasetError(f"{source}: the kind of file {path.suffix!r} is not read; name {NAMED}")
    rows, lines = _json_rows(path, source)
    return ProblemRows(rows[:limit], source, lines)


def read_hub_rows(source: str, limit: int | None, options: Options = NO_OPTIONS) -> ProblemRows:
    """The first `limit` rows of a split of a Hugging Face dataset, from the cache or the hub. The
    library memory-maps its files.

    Raises DatasetError, with the command to download it, if the dataset is not available.
    """
    use_cache_without_hub()
    import datasets

    try:
        rows = datasets.load_dataset(source, **options)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise DatasetError(
            f"dataset {source!r} (config {options.get('name')}, split {options['split']!r}) is not "
            f"in the local cache and cannot be fetched from the hub: {first_line(error)}."
            f" On a machine with network access, run `hf download --repo-type dataset {source} "
            "--local-dir DIR` and set prompts.source to the .parquet or .jsonl file in DIR"
        ) from error
    return _first_rows(rows, limit, f"{source}[{options['split']}]")


def _first_rows(rows: Any, limit: int | None, source: str) -> ProblemRows:
    """Those of a `datasets.Dataset`."""
    return ProblemRows(rows if limit is None else rows.take(min(limit, len(rows))), source)


def _by_datasets(source: str, kind: str, path: Path, options: Options) -> Any:
    import datasets

    try:
        return datasets.load_dataset(kind, data_files=glob.escape(str(path)), **options)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError) as error:
        reason = first_line(error.__cause__ or error)
        raise DatasetError(f"{source}: cannot be read: {reason}") from error


def _saved_rows(path: Path, source: str) -> Any:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"{source}: a folder that is none of `save_to_disk`; name {NAMED}"
        ) from error
    if isinstance(found, datasets.Dataset):
        return found
    first, *_ = found
    raise DatasetError(
        f"{source} has the splits {', '.join(found)}: name the folder of one, {source}/{first}"
    )


def _csv_options(path: Path, source: str, options: Options) -> dict[str, Any]:
    """The options by which every value of a CSV file is text as it is written: 1.50 and 007 are not
    the numbers 1.5 and 7. The separator is that of which the header has most, unless it is named.
    Raises DatasetError for a first row that is longer than the header: pandas makes an index of its
    beginning."""
    import datasets

    given = {"keep_default_na": False, **options}
    try:
        with path.open(encoding=given.get("encoding", "utf-8-sig"), newline="") as file:
            header = next((line for line in file if line.strip()), "")
            given.setdefault("sep", max(SEPARATORS, key=header.count))
            file.seek(0)
            lines = filter(None, csv.reader(file, delimiter=given["sep"]))
            names, first = next(lines, []), next(lines, [])
    except (OSError, UnicodeDecodeError, LookupError, TypeError, csv.Error) as error:
        raise DatasetError(
            f"{source}: cannot be read: {error}; save it as UTF-8, or set prompts.dataset_options "
            "to its {sep: …, encoding: …}"
        ) from error
    if len(first) > len(names) > 0:
        raise DatasetError(
            f"{source} row 0: {len(first)} values, {shown(first)}, for {len(names)} columns, "
            f"{shown(names)}: put values that contain the separator in quotes, or name every "
            "column in the header"
        )
    if not names:
        raise DatasetError(f"{source} has no rows")
    names = [name.strip() or f"column {number}" for number, name in enumerate(names, start=1)]
    features = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
    return {**given, "names": names, "header": 0, "features": features}


def _without_blank_end(rows: Any) -> Any:
    """The rows without blank ones at the end, which spreadsheets write."""
    size = len(rows)
    while size and not any((value or "").strip() for value in rows[size - 1].values()):
        size -= 1
    return rows if size == len(rows) else rows.select(range(size))


def _json_rows(path: Path, source: str) -> tuple[list[Any], list[int] | None]:
    """The objects of JSON lines and the line numbers, or those of one JSON array."""
    rows, lines, number = list[Any](), list[int](), 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            is_array = path.suffix == ".json" and file.read(99).lstrip().startswith("[")
            file.seek(0)
            if is_array:
                rows = json.load(file)
            for number, text in enumerate(file, start=1):
                if text.strip():
                    rows.append(json.loads(text))
                    lines.append(number)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{source}: not UTF-8 after line {number}: {error.reason}") from error
    except OSError as error:
        raise DatasetError(f"{source}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        place = f"{source}:{number}" if number else source
        raise DatasetError(
            f"{place}: not valid JSON: {getattr(error, 'msg', error)}; every line is one object, "
            "or a .json file one array of them"
        ) from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            place = f"{source}:{lines[index]}" if lines else f"{source} row {index}"
            raise DatasetError(f"{place}: found a {type(row).__name__}, expected a JSON object")
    return rows, lines or None


ChatMessage = dict[str, Any]
ProblemStatement = str | list[ChatMessage]
"""Text, or the messages of a chat."""

PROBLEM_FIELDS = ("problem", "prompt", "question", "messages")
ANSWER_FIELDS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
"""Where TRL, verl, open-instruct and GSM8K have problems and answers; the first is the default."""

LARGEST_WHOLE = 1e15
"""Whole numbers below it are exact as floats."""

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


def problems_and_answers(
    rows: ProblemRows, problem_field: str, answer_field: str, by_recipe: bool = True
) -> tuple[list[ProblemStatement], list[str]]:
    """The problems and the reference answers. If the fields are `by_recipe`, answers are what is
    after the last `ANSWER_MARKER`."""
    as_answer = marked_answer if by_recipe else answer_text
    problems = checked_column(rows, problem_field, problem_statement)
    return problems, checked_column(rows, answer_field, as_answer)


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
    if not isinstance(value, str):
        raise ValueError(
            f"found {value!r} ({type(value).__name__}), expected text (or, as an answer or id, a "
            "number; as a problem, a list of messages): put it in quotes"
        )
    if not value.strip():
        raise ValueError("is empty: fill it in, or remove the row")
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
