"""Prompts: problems that are rendered and tokenised once, then visited in a seeded order.

The order depends only on (seed, cursor), so that a run resumes from the cursor alone.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.prompts.fields import (
    ChatMessage,
    ProblemStatement,
    answer_after,
    checked_column,
    count_marked,
    problem_statement,
    unique_ids,
)
from grpo_replay.prompts.sources import (
    MappingRows,
    ProblemRows,
    is_local_source,
    read_hub_rows,
    read_local_rows,
)
from grpo_replay.recipe import PromptsSection
from grpo_replay.recipe.input_sections import ANSWER_MARKER
from grpo_replay.recipe.paths import short_path
from grpo_replay.replay.seeding import stream
from grpo_replay.tiny import TASKS
from grpo_replay.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ORDER_STREAM = 0x70726F6D
"""Identifies the random stream of epoch orders ("prom" in ASCII)."""

BUILTIN_SOURCES = tuple(f"builtin:{name}" for name in TASKS)
BATCH_PROMPTS = 2048
"""Prompts rendered and tokenised at once."""


class PromptSet:
    """The prompts of a run. `skipped_too_long` counts skipped ones over `max_prompt_length`."""

    def __init__(
        self,
        prompts: "_TokenisedPrompts",
        rows: ProblemRows,
        skipped_too_long: int,
        seed: int,
        shuffle: bool,
        notices: Sequence[str] = (),
    ) -> None:
        self._prompts = prompts
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._cached_order: tuple[int, np.ndarray] | None = None
        self.skipped_too_long = skipped_too_long
        self.notices = tuple(notices)
        """Messages for the user on how the rows were read."""

    def __len__(self) -> int:
        return len(self._prompts.row_numbers)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(token_ids) for token_ids in self._prompts.token_ids)

    def take(self, cursor: int, count: int) -> tuple[Prompt, ...]:
        """The prompts at positions `cursor` … `cursor + count - 1` of the run's endless order.

        Positions count from 0. With n prompts, epoch e has positions e·n to (e+1)·n - 1 and visits
        every prompt once: in a permutation seeded by (seed, e), or in file order without shuffling.
        """
        if cursor < 0 or count < 0:
            raise ValueError(f"take(cursor={cursor}, count={count}): both must be at least 0")
        return tuple(self._prompt(position) for position in range(cursor, cursor + count))

    def sample(self, count: int) -> tuple[Prompt, ...]:
        """At most `count` prompts, evenly spaced in the order of the source."""
        count = min(count, len(self))
        return tuple(self._prompt_of(index * len(self) // count) for index in range(count))

    def _prompt(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self))
        return self._prompt_of(int(self._order(epoch)[offset]))

    def _prompt_of(self, index: int) -> Prompt:
        prompts = self._prompts
        return Prompt(
            prompt_id=prompts.ids[index],
            text=prompts.texts[index],
            token_ids=prompts.token_ids[index],
            answer=prompts.answers[index],
            row=self._rows.row(prompts.row_numbers[index]),
        )

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached_order is None or self._cached_order[0] != epoch:
            generator = stream(self._seed, ORDER_STREAM, epoch)
            order = generator.permutation(len(self)) if self._shuffle else np.arange(len(self))
            self._cached_order = (epoch, order)
        return self._cached_order[1]


class _TokenisedPrompts:
    """Columns of equal length with the data of every prompt that is kept."""

    def __init__(self) -> None:
        self.row_numbers: list[int] = []
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.token_ids: list[np.ndarray] = []
        self.answers: list[str] = []


def load_prompts(
    section: PromptsSection,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    whole_rows: bool = True,
) -> PromptSet:
    """The prompts of the section's source, rendered and tokenised. `seed` determines their order.
    If `whole_rows` is false, rows have only the fields that the section names, and no others are
    read; only reward functions written by the user need the others.

    Raises DatasetError for a source that cannot be read, a row without problem or answer, a
    duplicate id, or if all prompts are over the length limit, and RecipeError for a template that
    cannot be rendered.
    """
    rows, id_field = _open_source(section, seed, whole_rows)
    if len(rows) == 0:
        raise DatasetError(f"prompts.source {short_path(section.source)!r} has no rows")
    problems = checked_column(rows, section.problem_field, problem_statement)
    answers = checked_column(rows, section.answer_field, answer_after(ANSWER_MARKER))
    ids = unique_ids(rows, id_field)
    kept, skipped, shortest = _TokenisedPrompts(), 0, np.inf
    for number, (text, tokens_P) in enumerate(_rendered(section, tokenizer, problems)):
        if len(tokens_P) > section.max_prompt_length:
            skipped, shortest = skipped + 1, min(shortest, len(tokens_P))
            continue
        kept.row_numbers.append(number)
        kept.ids.append(ids[number])
        kept.texts.append(text)
        kept.token_ids.append(tokens_P)
        kept.answers.append(answers[number])
    if skipped == len(rows):
        raise DatasetError(
            f"prompts.source {short_path(section.source)!r}: none of {skipped} prompts has at most "
            f"prompts.max_prompt_length {section.max_prompt_length} tokens; the shortest has "
            f"{shortest}: raise the limit or shorten prompts.user_template"
        )
    notices = _notices(section, problems, rows.column(section.answer_field))
    return PromptSet(kept, rows, skipped, seed, section.shuffle, notices)


def read_problems(section: PromptsSection, seed: int) -> dict[str, tuple[str, str]]:
    """Problem and reference answer by prompt id, without rendering them; of chat messages the last
    one. Raises DatasetError as `load_prompts` does."""
    rows, id_field = _open_source(section, seed, whole_rows=False)
    problems = checked_column(rows, section.problem_field, problem_statement)
    answers = checked_column(rows, section.answer_field, answer_after(ANSWER_MARKER))
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in problems]
    return dict(zip(unique_ids(rows, id_field), zip(texts, answers, strict=True), strict=True))


def _notices(
    section: PromptsSection, problems: Sequence[ProblemStatement], answers: Sequence[Any]
) -> list[str]:
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


def render_prompt(
    section: PromptsSection, tokenizer: "PreTrainedTokenizerBase", problem: ProblemStatement
) -> tuple[str, np.ndarray]:
    """Text and token ids (int32 [P]) of one problem, rendered with the section's template.

    Raises RecipeError if the template cannot be rendered.
    """
    return next(_rendered(section, tokenizer, [problem]))


def _open_source(
    section: PromptsSection, seed: int, whole_rows: bool
) -> tuple[ProblemRows, str | None]:
    """The rows, and the field with their ids. None: the row number is the id."""
    source = section.source
    if source in BUILTIN_SOURCES:
        problems = TASKS[source.removeprefix("builtin:")].train_problems(seed)
        return MappingRows(problems, source), "problem_id"
    if source.startswith("builtin:"):
        raise DatasetError(
            f"prompts.source {source!r}: no such builtin; there are: {', '.join(BUILTIN_SOURCES)}"
        )
    named = (section.problem_field, section.answer_field, section.id_field)
    fields = None if whole_rows else [field for field in named if field is not None]
    if is_local_source(source):
        return read_local_rows(source, None, fields), section.id_field
    rows = read_hub_rows(source, section.config_name, section.split, section.revision, None, fields)
    return rows, section.id_field


def _rendered(
    section: PromptsSection,
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[ProblemStatement],
) -> Iterator[tuple[str, np.ndarray]]:
    chat = section.in_chat
    for start in range(0, len(problems), BATCH_PROMPTS):
        batch = problems[start : start + BATCH_PROMPTS]
        if chat:
            texts = _chat_texts(section, tokenizer, [_messages(section, each) for each in batch])
        else:
            texts = [_plain_text(section, each) for each in batch]
        # A chat template contains its special tokens; for plain text the tokenizer adds them.
        encoded = tokenizer(texts, add_special_tokens=not chat, return_attention_mask=False)
        for text, ids in zip(texts, encoded["input_ids"], strict=True):
            written = text.endswith(str(tokenizer.eos_token))
            if not (chat or written) and ids and ids[-1] == tokenizer.eos_token_id:
                raise RecipeError(
                    f"prompts.template 'plain': the tokenizer ends every text with its EOS token "
                    f"{tokenizer.eos_token}, so completions would begin after an end; set "
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


def _messages(section: PromptsSection, problem: ProblemStatement) -> list[ChatMessage]:
    """The chat of a problem: its own messages, or those that the section makes of its text."""
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
) -> list[str]:
    if not tokenizer.chat_template:
        raise RecipeError(
            "prompts.template 'chat': the tokenizer has no chat template; set prompts.template "
            "plain, or model.tokenizer to a tokenizer with a chat template"
        )
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(chats), tokenize=False, add_generation_prompt=True, **section.chat_template_kwargs
        )
    except TemplateError as error:
        raise RecipeError(
            f"prompts.template 'chat': the tokenizer's chat template failed: {error}; if it "
            "does not support system messages, set prompts.system_prompt null"
        ) from error
