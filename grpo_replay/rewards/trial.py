"""Reward functions are tried on a few rows before a run, also in the dry run.

A function that fails on every row, or a verifier that accepts no reference answer as equal to
itself, would let a run train on nothing until its last step.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.recipe import BUILTIN_VERIFIERS, RewardSection
from grpo_replay.rewards.scorer import GradingRequest, RewardScorer
from grpo_replay.types import FAILED, Prompt, Verdict

TRIED_ROWS = 4
CHECKED_ANSWERS = 100
SHOWN_CHARACTERS = 30
REWRITES = (
    (r"\dfrac", r"\\frac(?=[{\d ])", r"\\dfrac"),
    ("spaces", r"(?<=[\d)}])([-+=,])(?=[\w({]|\\[a-z])", r" \1 "),
    (r"\left and \right", r"^([(\[])([^()\[\]]*)([)\]])$", r"\\left\1\2\\right\3"),
    ("a list in another order", r"^([^,()\[\]{}]+), *([^,()\[\]{}]+)$", r"\2,\1"),
    ("the value of an equation", r"^[a-zA-Z] *= *([^=]+)$", r"\1"),
    ("without a unit", r"(?<=\d)(?:\\[, ]| )*\\text ?\{[^{}]*\}$", ""),
)
"""Usual ways to write an answer otherwise, each a pattern and what replaces it."""
THOUSANDS = r"\d{1,3}(,\d{3})+"


@dataclass(frozen=True, slots=True)
class Sample:
    """Some problems of a set of `total`, the key of the recipe that names the set, and what gives
    the token ids of a text."""

    problems: Sequence[Prompt]
    total: int
    place: str
    encode: Callable[[str], Sequence[int]]


def right_completion(answer: str) -> str:
    """A completion that ends as a right one does."""
    return f"The answer is \\boxed{{{answer}}}."


def try_rewards(
    section: RewardSection, scorer: RewardScorer, sample: Sample, step: int | None = 1
) -> list[str]:
    """Notices about the reward functions of `scorer`, which are those of `section`. `step` is what
    they get as the training step: None for evaluations.

    Functions of the user are called on `TRIED_ROWS` rows, a built-in verifier on all of the sample.
    Raises RecipeError if every call fails and `reward.max_failed_share` is below 1, or if a
    verifier has too little time, and DatasetError if no answer can be read.
    """
    notices, functions = [], [each.function for each in section.functions]
    own = [function for function in functions if function not in BUILTIN_VERIFIERS]
    if own:
        notices += _try_calls(", ".join(own), section, scorer, sample, step)
    if own == functions:
        return notices
    if not own:
        return notices + _check_answers(section, scorer, sample)
    # Calls of a user's function may be slow: verifiers are tried alone.
    verifier = next(each for each in functions if each in BUILTIN_VERIFIERS)
    only = section.alone(verifier)
    with RewardScorer.open(only) as alone:
        return notices + _check_answers(only, alone, sample)


def _try_calls(
    function: str,
    section: RewardSection,
    scorer: RewardScorer,
    sample: Sample,
    step: int | None,
) -> list[str]:
    tried = sample.problems[:TRIED_ROWS]
    verdicts = _graded(scorer, tried, [each.answer for each in tried], sample, step)
    failed = [verdict.status for verdict in verdicts if verdict.status in FAILED]
    if not failed:
        if section.main_function in BUILTIN_VERIFIERS:
            return []
        if notices := _compare_scores(section, verdicts):
            return notices
        wrong = [_another_answer(each, sample.problems) for each in tried]
        of_wrong = _graded(scorer, tried, wrong, sample, step)
        return _compare_with_wrong(function, verdicts, of_wrong)
    limit = (
        f" (reward.time_limit_seconds {section.time_limit_seconds:g}: raise it, or import what "
        "takes long at the top of the file)"
    )
    reason = scorer.first_error or failed[0] + (limit if failed[0] == "timeout" else "")
    if section.max_failed_share == 1 or len(failed) < len(verdicts):
        return [
            f"reward function {function} failed on {len(failed)} of the {len(verdicts)} rows that "
            f"it was tried on; such completions get no reward and are left out: {reason}"
        ]
    raise RecipeError(
        f"reward function {function} failed on all {len(verdicts)} rows that it was tried on: "
        f"{reason}. It must return a finite number for each completion (they end in the reference "
        "answer, in a box). To train though nearly all have no reward: reward.max_failed_share 1"
    )


def _graded(
    scorer: RewardScorer,
    problems: Sequence[Prompt],
    answers: Sequence[str],
    sample: Sample,
    step: int | None,
) -> list[Verdict]:
    """Of a completion to each problem that ends in the answer beside it, in a box."""
    for place, (each, answer) in enumerate(zip(problems, answers, strict=True)):
        completion = right_completion(answer)
        encoded, group = sample.encode(completion), f"trial {place}"
        request = GradingRequest.of(each, completion, encoded, step=step, group=group)
        scorer.submit(place, request)
    return list(scorer.results().values())


def _another_answer(problem: Prompt, problems: Sequence[Prompt]) -> str:
    """The reference answer of the first problem that has another one; none if all are alike."""
    return next((each.answer for each in problems if each.answer != problem.answer), "")


def _compare_with_wrong(
    function: str, right: Sequence[Verdict], wrong: Sequence[Verdict]
) -> list[str]:
    """A notice if right completions get no more than wrong ones, on average."""
    of_right, of_wrong = (
        [verdict.reward for verdict in verdicts if verdict.reward is not None]
        for verdicts in (right, wrong)
    )
    if not of_right or not of_wrong or fmean(of_right) > fmean(of_wrong):
        return []
    return [
        f"reward function {function} gives {fmean(of_right):g} to completions that end in the "
        f"boxed reference answer, and {fmean(of_wrong):g} to the same with another problem's: it "
        "does not tell them apart. Fix it, unless it reads another form than a box: --dry-run "
        "--sample 8 shows what it gives to a completion of the model"
    ]


def _compare_scores(section: RewardSection, verdicts: Sequence[Verdict]) -> list[str]:
    """A notice if the first function rewards right completions, but with less than what counts as
    correct. One that gives nothing may read another form of answer."""
    function = section.main_function
    best = max((verdict.scores[0] for verdict in verdicts if verdict.scores), default=0.0)
    if not max(0.0, section.incorrect) < best < section.correct:
        return []
    return [
        f"reward function {function} gives {best} at most for a completion that ends in the boxed "
        f"reference answer, and reward.correct is {section.correct}: such completions count as not "
        "correct, in metrics and, if it grades them, in evaluations. If that is its score for a "
        f"right answer, set reward.correct {best}"
    ]


def _check_answers(section: RewardSection, scorer: RewardScorer, sample: Sample) -> list[str]:
    """Grade each reference answer against itself, in a box, with the one verifier of `section`."""
    verifier = section.main_function
    answers = [each.answer for each in sample.problems]
    items = [(right_completion(each), each, None) for each in answers]
    verdicts = scorer.score(items[:TRIED_ROWS])
    if verdicts and all(verdict.status == "timeout" for verdict in verdicts):
        raise RecipeError(
            f"reward.time_limit_seconds {section.time_limit_seconds:g} is too little: {verifier} "
            f"could grade none of {len(verdicts)} completions in it; raise it"
        )
    verdicts += scorer.score(items[TRIED_ROWS:])
    unread = [
        answer
        for answer, verdict in zip(answers, verdicts, strict=True)
        if verdict.status != "correct"
    ]
    if not unread:
        return _check_rewritten(verifier, scorer, sample)
    shown = ", ".join(repr(each[-SHOWN_CHARACTERS:]) for each in unread[:3])
    if len(unread) < len(answers):
        return [
            f"{verifier} cannot read {len(unread)} of {len(answers)} reference answers checked, of "
            f"{sample.total} (ending in {shown}): it grades them as different from themselves, so "
            "no completion can be right there",
            *_check_rewritten(verifier, scorer, sample, set(unread)),
        ]
    raise DatasetError(
        f"{sample.place}: {verifier} can read none of {len(answers)} reference answers checked, of "
        f"{sample.total} (ending in {shown}): it grades them as different from themselves, so no "
        "completion could be right; name the field with the final answer (prompts.answer_field), "
        "or choose another reward function"
    )


def _check_rewritten(
    verifier: str, scorer: RewardScorer, sample: Sample, left_out: Collection[str] = ()
) -> list[str]:
    """Grade reference answers that are written otherwise, but for those `left_out`."""
    golds = [each.answer for each in sample.problems if each.answer not in left_out]
    others = [
        (way, gold, re.sub(pattern, replacement, gold))
        for gold in golds
        for way, pattern, replacement in REWRITES
        if re.search(pattern, gold) and not re.fullmatch(THOUSANDS, gold)
    ]
    if not others:
        return []
    verdicts = scorer.score([(right_completion(other), gold, None) for _, gold, other in others])
    pairs = zip(others, verdicts, strict=True)
    wrong = [each for each, verdict in pairs if verdict.status != "correct"]
    ways = ", ".join(f"{way}: {n}" for way, n in Counter(way for way, _, _ in wrong).items())
    return [
        f"{len({gold for _, gold, _ in wrong})} of {len(sample.problems)} reference answers "
        f"checked, of {sample.total}, may be graded wrongly: {verifier} takes for different what "
        f"is written otherwise ({ways}), for example {other!r} for {gold!r}"
        for _, gold, other in wrong[:1]
    ]
