"""What a run says about its prompts at the start: how they were read, and what may be wrong."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_replay.prompts.fields import ProblemStatement, count_marked
from grpo_replay.recipe.input_sections import ANSWER_MARKER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_CHARACTERS = 10


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
