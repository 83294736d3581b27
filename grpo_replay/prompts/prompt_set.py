"""Renders and tokenises the problems of a run once, then yields them in a seeded order.

The order depends only on (seed, cursor), so that a run resumes from the cursor alone.
"""

import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.prompts.gym_problems import gym_rows, lenient_scorer_notice
from grpo_replay.prompts.sources import (
    ANSWER_FIELDS,
    PROBLEM_FIELDS,
    ChatMessage,
    ProblemRows,
    ProblemStatement,
    checked_column,
    containing_column,
    fingerprint,
    known_field,
    notices_of_duplicates,
    notices_of_reading,
    problem_statement,
    read_hub_rows,
    read_local_rows,
    reference_answer,
    statement_text,
    unique_ids,
)
from grpo_replay.recipe import PromptsSection
from grpo_replay.recipe.input_sections import GYM
from grpo_replay.recipe.layers import is_on_hub, short_path
from grpo_replay.tiny import TASKS
from grpo_replay.types import Prompt, stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ORDER_STREAM = 0x70726F6D
"""Identifies the random stream of epoch orders ("prom" in ASCII)."""

BUILTIN_SOURCES = tuple(f"builtin:{name}" for name in TASKS)
CLOCK = "strftime_now"
"""The function by which a chat template prints the date."""
BATCH_PROMPTS = 2048
"""Prompts rendered and tokenised at once."""


class PromptSet:
    """The prompts of a run, in the endless order in which its steps take them."""

    def __init__(
        self,
        prompts: "_TokenisedPrompts",
        seed: int,
        sha256: str,
        notices: Sequence[str] = (),
    ) -> None:
        """Use `load_prompts`. `seed` decides the order of every epoch."""
        self._prompts = prompts
        self._seed = seed
        self._cached_order: tuple[int, np.ndarray] | None = None
        self.sha256 = sha256
        """Digest of all ids, problems and answers in order, including prompts that are too long."""
        self.notices = tuple(notices)
        """Messages for the user: how the rows were read, and how many were left out."""

    def __len__(self) -> int:
        """Counts the prompts of an epoch."""
        return sum(source.per_epoch for source in self._prompts.sources)

    @property
    def longest_prompt(self) -> int:
        """Length of the longest prompt, in tokens."""
        return max(len(token_ids) for token_ids in self._prompts.token_ids)

    @property
    def mean_prompt(self) -> float:
        """Mean length of the prompts, in tokens."""
        return fmean(len(token_ids) for token_ids in self._prompts.token_ids)

    def notices_of_use(
        self, prompts_per_step: int, held_out: Iterable[tuple[str, str]]
    ) -> list[str]:
        """Return notices about too few prompts for a step, and about prompts that are also problems
        of evaluations: `held_out` has their (benchmark, text)."""
        notices = []
        if (count := len(self._prompts.ids)) < prompts_per_step:
            notices.append(
                f"{count} prompts are fewer than sampling.prompts_per_step {prompts_per_step}: a "
                "step samples the same prompt in several groups"
            )
        problems = set(held_out)
        statements = (statement_text(problem) for _, problem in self._prompts.problems if problems)
        trained = set(map(fingerprint, statements))
        totals = Counter(name for name, _ in problems)
        shared = Counter(name for name, text in problems if fingerprint(text) in trained)
        notices += [
            f"{shared[name]} of {totals[name]} problems of benchmark {name!r} are also training "
            "prompts: its accuracy is not held-out; remove them from one of the two"
            for name in sorted(shared)
        ]
        return notices

    def take(self, cursor: int, count: int) -> tuple[Prompt, ...]:
        """Take the prompts at positions `cursor` … `cursor + count - 1` of the run's endless order.

        Positions count from 0. With n prompts, epoch e has positions e·n to (e+1)·n - 1 and visits
        every prompt once, in a permutation seeded by (seed, e). If sources have weights, an epoch
        visits the next weight · size prompts of each.
        """
        if cursor < 0 or count < 0:
            raise ValueError(f"take(cursor={cursor}, count={count}): both must be at least 0")
        return tuple(self._prompt(position) for position in range(cursor, cursor + count))

    def sample(self, count: int) -> tuple[Prompt, ...]:
        """Choose at most `count` prompts, evenly spaced in the order of the source."""
        total = len(self._prompts.ids)
        count = min(count, total)
        return tuple(self._prompt_at_index(index * total // count) for index in range(count))

    def _prompt(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self))
        return self._prompt_at_index(int(self._order(epoch)[offset]))

    def _prompt_at_index(self, index: int) -> Prompt:
        """Returns a prompt by its index in the columns, not in the order of the run."""
        prompts = self._prompts
        return Prompt(
            prompt_id=prompts.ids[index],
            text=prompts.texts[index],
            token_ids=prompts.token_ids[index],
            answer=prompts.answers[index],
            row=prompts.row(index),
            messages=prompts.messages(index),
        )

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached_order is None or self._cached_order[0] != epoch:
            sources = self._prompts.sources
            order = np.concatenate([self._prompts_of_epoch(source, epoch) for source in sources])
            shuffled = stream(self._seed, ORDER_STREAM, epoch).permutation(len(order))
            self._cached_order = (epoch, order[shuffled])
        return self._cached_order[1]

    def _prompts_of_epoch(self, source: "_Source", epoch: int) -> np.ndarray:
        """Returns the indices of the prompts of a source that an epoch visits, int64: the ones that
        follow those of the epoch before, in one fixed order that is repeated."""
        order = np.arange(source.first, source.end)
        if source.per_epoch != len(order):
            order = stream(self._seed, ORDER_STREAM, source.first, 1).permutation(order)
        return np.take(order, epoch * source.per_epoch + np.arange(source.per_epoch), mode="wrap")


class _Source(NamedTuple):
    """The prompts of one source, `first` … `end - 1`; an epoch visits `per_epoch` of them."""

    first: int
    end: int
    per_epoch: int


class _TokenisedPrompts:
    """Columns of equal length with the data of every prompt within the length limit, and the number
    of the prompts that were skipped."""

    def __init__(self) -> None:
        """Starts empty; `add` appends the prompts of a source."""
        self.sources: list[_Source] = []
        self.rows: list[tuple[ProblemRows | None, int]] = []
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.token_ids: list[np.ndarray] = []
        self.answers: list[str] = []
        self.fingerprints: list[int] = []
        self.problems: list[tuple[PromptsSection, ProblemStatement]] = []
        self.skipped, self.shortest_skipped = 0, np.inf

    def row(self, index: int) -> Mapping[str, Any]:
        """Returns all fields of the row of a prompt; empty if rows are not kept."""
        rows, number = self.rows[index]
        return {} if rows is None else rows.row(number)

    def messages(self, index: int) -> list[ChatMessage]:
        return prompt_messages(*self.problems[index])

    def add(
        self,
        read: "ReadSource",
        prefix: str,
        section: PromptsSection,
        weight: float,
        tokenizer: "PreTrainedTokenizerBase",
        whole_rows: bool,
    ) -> None:
        """Render and tokenise the problems of a source with its `section`, and keep the prompts
        within the length limit; an epoch visits `weight` times as many."""
        first = len(self.ids)
        for number, (text, tokens_P) in enumerate(_render(section, tokenizer, read.problems)):
            if len(tokens_P) > section.max_prompt_length:
                self.skipped += 1
                self.shortest_skipped = min(self.shortest_skipped, len(tokens_P))
                continue
            self.rows.append((read.rows if whole_rows else None, number))
            self.ids.append(prefix + read.ids[number])
            self.texts.append(text)
            self.token_ids.append(tokens_P)
            self.answers.append(read.answers[number])
            self.problems.append((section, read.problems[number]))
            self.fingerprints.append(fingerprint(read.problems[number]))
        size = len(self.ids) - first
        self.sources.append(_Source(first, len(self.ids), max(round(weight * size), size > 0)))


def load_prompts(
    section: PromptsSection,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    whole_rows: bool = True,
) -> PromptSet:
    """Load the prompts of the section's sources, rendered and tokenised. `seed` determines their
    order, and which problems a builtin or generated source has. Without `whole_rows`, `Prompt.row`,
    which only a user's reward function reads, is empty.

    Raises DatasetError if a source cannot be read, a row lacks its problem or answer, an id occurs
    twice, or all prompts exceed the length limit; RecipeError for a faulty template.
    """
    kept, notices, digest = _TokenisedPrompts(), list[str](), hashlib.sha256()
    for prefix, source, weight in _sources(section):
        read = read_source(source, seed)
        notices += read.notices
        digest.update(read.as_bytes(prefix))
        kept.add(read, prefix, source, weight, tokenizer, whole_rows)
    limit = f"prompts.max_prompt_length {section.max_prompt_length}"
    if not kept.ids:
        raise DatasetError(
            f"prompts.source {_quoted_sources(section)}: none of {kept.skipped} prompts has at "
            f"most {limit} tokens; the shortest has {kept.shortest_skipped}: raise the limit or "
            "shorten prompts.user_template"
        )
    if kept.skipped:
        remain = sum(source.per_epoch for source in kept.sources)
        left_out = f"{kept.skipped} prompts are longer than {limit} and were left out"
        notices.insert(0, f"{left_out}; {remain} remain")
    notices += notices_of_duplicates(kept.fingerprints, kept.answers)
    if unreadable := _count_unreadable(kept.token_ids, tokenizer):
        notices.append(
            f"{unreadable} of {len(kept.ids)} prompts have characters that the tokenizer does not "
            "have: the model cannot read them"
        )
    if section.in_chat and CLOCK in str(tokenizer.chat_template):
        notices.append(
            f"the chat template prints the date: all prompts have {section.date} (prompts.date)"
        )
    return PromptSet(kept, seed, digest.hexdigest(), notices)


def _count_unreadable(token_ids: Sequence[np.ndarray], tokenizer: "PreTrainedTokenizerBase") -> int:
    # A byte-level tokenizer may use its BOS or EOS token as the unknown token.
    unknown = tokenizer.unk_token_id
    if unknown in (None, tokenizer.bos_token_id, tokenizer.eos_token_id):
        return 0
    return sum(unknown in tokens_P for tokens_P in token_ids)


def _sources(section: PromptsSection) -> list[tuple[str, PromptsSection, float]]:
    """Returns prefix of the ids, section and weight of every source. A prefix is empty for a single
    source, else the source's name, with a number if names repeat."""
    names = [Path(name).name for name in section.source_names]
    if len(names) == 1:
        prefixes = [""]
    elif len(set(names)) == len(names):
        prefixes = [f"{name}:" for name in names]
    else:
        prefixes = [f"{number}:{name}:" for number, name in enumerate(names, start=1)]
    return list(zip(prefixes, section.sources, section.weights, strict=True))


class ReadSource(NamedTuple):
    """The checked rows of one source."""

    rows: ProblemRows
    problems: list[ProblemStatement]
    answers: list[str]
    ids: list[str]
    notices: list[str]

    def as_bytes(self, prefix: str) -> bytes:
        """Encode ids, problems and answers as JSON, for a digest."""
        return json.dumps([prefix, self.ids, self.problems, self.answers]).encode()


def read_source(
    section: PromptsSection, seed: int | None = 0, any_columns: bool = False
) -> ReadSource:
    """Read and check the rows of one source. `seed` selects the problems of a builtin source or of
    `reasoning_gym:NAME`; None selects the problems that such a family holds out.

    If the section has the default fields, problems and answers are also read from the columns that
    other trainers use. `any_columns` does so for all fields, and reads ids only if their column
    exists. Raises DatasetError for a source that cannot be read, a row without problem or answer, a
    repeated id.
    """
    rows, id_field = _open_source(section, seed)
    if len(rows) == 0:
        raise DatasetError(f"prompts.source {_quoted_sources(section)} has no rows")
    fields = [
        known_field(field, known if any_columns or field == known[0] else (), rows.names)
        for field, known in (
            (section.problem_field, PROBLEM_FIELDS),
            (section.answer_field, ANSWER_FIELDS),
        )
    ]
    has_ids = id_field is not None and containing_column(id_field, rows.names) in rows.names
    if any_columns and not has_ids:
        id_field = None
    problems = checked_column(rows, fields[0], problem_statement)
    answers = checked_column(rows, fields[1], reference_answer)
    notices = notices_of_reading(problems, rows.column(fields[1]))
    if fields != [section.problem_field, section.answer_field]:
        columns = f"problems from {fields[0]!r}, answers from {fields[1]!r}, by their column names"
        notices.insert(0, f"prompts.source {_quoted_sources(section)}: {columns}")
    if str(section.source).startswith(GYM):
        notices += lenient_scorer_notice(str(section.source), rows)
    return ReadSource(rows, problems, answers, unique_ids(rows, id_field), notices)


def _quoted_sources(section: PromptsSection) -> str:
    return ", ".join(repr(short_path(name)) for name in section.source_names)


def render_prompt(
    section: PromptsSection, tokenizer: "PreTrainedTokenizerBase", problem: ProblemStatement
) -> tuple[str, np.ndarray]:
    """Render one problem with the section's template: its text, and token ids (int32 [P]).

    Raises RecipeError if the template cannot be rendered.
    """
    return next(_render(section, tokenizer, [problem]))


def _open_source(section: PromptsSection, seed: int | None) -> tuple[ProblemRows, str | None]:
    """Open the rows of a source; also returns the field with their ids, None for row numbers."""
    source = str(section.source)
    if source in BUILTIN_SOURCES:
        problems = TASKS[source.removeprefix("builtin:")].train_problems(seed or 0)
        return ProblemRows(problems, source), "problem_id"
    if source.startswith(GYM):
        return gym_rows(source, section.dataset_options, seed), "problem_id"
    if source.startswith("builtin:"):
        raise DatasetError(
            f"prompts.source {source!r}: no such builtin; there are: {', '.join(BUILTIN_SOURCES)}"
        )
    options = section.dataset_options.model_dump()
    if is_on_hub(source):
        return read_hub_rows(source, options), section.id_field
    options = {name: value for name, value in options.items() if value is not None}
    return read_local_rows(source, options), section.id_field


def _render(
    section: PromptsSection,
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[ProblemStatement],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields text and token ids (int32 [P]) of problems, rendered in batches. Raises RecipeError
    for a template that fails, and for a tokenizer that ends plain prompts with EOS."""
    chat = section.in_chat
    for start in range(0, len(problems), BATCH_PROMPTS):
        batch = problems[start : start + BATCH_PROMPTS]
        if chat:
            are_messages = not isinstance(batch[0], str)
            chats = [_chat_messages(section, problem) for problem in batch]
            texts = _chat_texts(section, tokenizer, chats, are_messages)
        else:
            texts = [_plain_text(section, problem) for problem in batch]
        # A chat template contains its special tokens; for plain text the tokenizer adds them.
        encoded = tokenizer(texts, add_special_tokens=not chat, return_attention_mask=False)
        for text, ids in zip(texts, encoded["input_ids"], strict=True):
            contains_eos = chat or text.endswith(str(tokenizer.eos_token))
            ends_with_eos = bool(ids) and ids[-1] == tokenizer.eos_token_id
            if ends_with_eos and not contains_eos:
                raise RecipeError(
                    f"prompts.template 'plain': the tokenizer ends every text with its EOS token "
                    f"{tokenizer.eos_token}, so completions would begin after it; set "
                    "add_eos_token to false in its tokenizer_config.json"
                )
            yield text, np.array(ids, dtype=np.int32)


def _plain_text(section: PromptsSection, problem: ProblemStatement) -> str:
    if isinstance(problem, str):
        return section.user_template.format(problem=problem)
    raise RecipeError(
        f"prompts.template 'plain': field {section.problem_field!r} has chat messages, which the "
        "chat template renders; set prompts.template chat"
    )


def prompt_messages(section: PromptsSection, problem: ProblemStatement) -> list[ChatMessage]:
    """Returns the messages of a prompt; without a chat template, one user message."""
    if section.in_chat:
        return _chat_messages(section, problem)
    return [{"role": "user", "content": _plain_text(section, problem)}]


def _chat_messages(section: PromptsSection, problem: ProblemStatement) -> list[ChatMessage]:
    """Returns the chat of a problem: its own messages, or its text in the section's user template
    after the system prompt, if any."""
    if not isinstance(problem, str):
        return problem
    user = {"role": "user", "content": section.user_template.format(problem=problem)}
    if section.system_prompt is None:
        return [user]
    return [{"role": "system", "content": section.system_prompt}, user]


def _chat_texts(
    section: PromptsSection,
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[list[ChatMessage]],
    are_messages: bool,
) -> list[str]:
    """Renders chats as texts with the tokenizer's template; one that prints today's date prints
    `section.date` instead. `are_messages`: the data set has chats (for the error's advice only).
    Raises RecipeError."""
    if not tokenizer.chat_template:
        other = "model.tokenizer to that of an instruction-tuned model of the same family"
        remedy = other if are_messages else f"prompts.template plain, or {other}"
        raise RecipeError(
            f"prompts.template 'chat': the tokenizer has no chat template, which renders "
            f"{'the messages of the data set' if are_messages else 'the prompts'}; set {remedy}"
        )
    from jinja2 import TemplateError

    template_kwargs = section.chat_template_kwargs
    try:
        template = tokenizer.get_chat_template(template_kwargs.get("chat_template"))
        if CLOCK in template:
            template = with_date(template, section.date)
            template_kwargs = {**template_kwargs, "chat_template": template}
        return tokenizer.apply_chat_template(
            list(chats), tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise RecipeError(
            f"prompts.template 'chat': the tokenizer's chat template failed: {error}; if it "
            "does not support system messages, set prompts.system_prompt null"
        ) from error


def with_date(template: str, date: str) -> str:
    """Return the chat template with a macro `strftime_now` that prints `date`, at midnight. It
    replaces the function of transformers, which asks the clock."""
    time = datetime.datetime.fromisoformat(date)
    codes = [f"%{pad}{letter}" for letter in "aAbBcdDeFGhHIjmMpRSTuUVwWxXyY" for pad in ("-", "")]
    values = "".join(f" | replace({code!r}, {time.strftime(code)!r})" for code in codes)
    # Jinja removes the newline after a block, so that the template begins as it did.
    return f"{{% macro {CLOCK}(format) -%}}{{{{ format{values} }}}}{{%- endmacro %}}\n{template}"
