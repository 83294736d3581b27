"""The values of a row: problems, reference answers and ids, checked and converted; and what a run
says about its prompts at the start.

A conversion raises ValueError with the value found; `checked_column` adds the place of the row.
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_replay.errors import DatasetError
from grpo_replay.prompts.sources import ProblemRows, column_of
from grpo_replay.recipe.input_sections import ANSWER_MARKER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    message = {k: v for k, v in value.items() if v is not None} if _is_mapping(value) else {}
    if not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise ValueError(
            f"has {value!r:.80} as message {number}, expected {{role: text, content: text}}"
        )
    return message


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def answer_text(value: Any) -> str:
    """A reference answer or an id as text. Text is unchanged; a number becomes its digits, without
    a fraction if it is whole."""
    if isinstance(value, bool):
        return text(value)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        whole = float(value).is_integer() and abs(float(value)) < LARGEST_WHOLE
        return str(int(value)) if whole else str(value)
    if isinstance(value, int):
        return str(value)
    return text(value)


def answer_after(marker: str | None) -> Callable[[Any], str]:
    """A conversion of reference answers to the text after the last `marker` in them; to the whole
    answers if the marker is None. Example: `8 + 10 = 18\n#### 18` becomes `18`."""

    def convert(value: Any) -> str:
        answer = answer_text(value)
        if marker is None or marker not in answer:
            return answer
        after = answer.rpartition(marker)[2].strip()
        if not after:
            raise ValueError(f"has nothing after the marker {marker!r} (answer_marker)")
        return after

    return convert


def text(value: Any) -> str:
    """Text that is not blank and valid Unicode."""
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


def count_marked(values: Sequence[Any], marker: str | None) -> int:
    """The number of answers that contain the marker."""
    return sum(
        isinstance(value, str) and marker is not None and marker in value for value in values
    )


SHOWN_CHARACTERS, SHOWN_CONTENT = 10, 60


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
    if marked := count_marked(answers, ANSWER_MARKER):
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


def notices_of_characters(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], answers: Sequence[str]
) -> list[str]:
    """A notice if the tokenizer has no token for characters of prompts or answers."""
    characters = sorted(set().union(*texts, *answers))
    visible = [each for each in characters if not each.isspace()]
    encoded = tokenizer(visible, add_special_tokens=False)["input_ids"] if visible else []
    unknown = {
        each
        for each, ids in zip(visible, encoded, strict=True)
        if not ids or tokenizer.unk_token_id in ids
    }
    if not unknown:
        return []
    counts = [sum(not unknown.isdisjoint(each) for each in column) for column in (texts, answers)]
    shown = " ".join(sorted(unknown)[:SHOWN_CHARACTERS])
    more = " …" if len(unknown) > SHOWN_CHARACTERS else ""
    return [
        f"{counts[0]} of {len(texts)} prompts and {counts[1]} reference answers have characters "
        f"that the tokenizer does not have: {shown}{more}. The model cannot read or write them"
    ]


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
