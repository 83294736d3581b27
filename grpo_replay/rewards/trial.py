"""Tries reward functions on a few rows before a run, also in the dry run.

With a function that fails on every row, or a verifier that does not accept any reference answer as
equal to itself, a run would train on nothing until its last step.
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
"""Common rewritings of an answer: name, pattern and replacement."""
THOUSANDS = r"\d{1,3}(,\d{3})+"


@dataclass(frozen=True, slots=True)
class Sample:
    """Some problems of `total`, the recipe key that names them, and the encoder of texts."""

    problems: Sequence[Prompt]
    total: int
    recipe_key: str
    encode: Callable[[str], Sequence[int]]


def right_completion(answer: str) -> str:
    """Returns a completion that ends like a correct one."""
    return f"The answer is \\boxed{{{answer}}}."


def try_rewards(
    section: RewardSection, scorer: RewardScorer, sample: Sample, step: int | None = 1
) -> list[str]:
    """Try the reward functions of `section`, which `scorer` has open, and return notices about
    them. `step` is the training step that they get; None for evaluations.

    Functions of the user are called on `TRIED_ROWS` rows, a built-in verifier on the whole sample.
    Raises RecipeError if every call fails and `reward.max_failed_share` is below 1, or if a
    verifier has too little time; DatasetError if no answer can be read.
    """
    notices, functions = [], [weighted.function for weighted in section.functions]
    user_functions = [function for function in functions if function not in BUILTIN_VERIFIERS]
    if user_functions:
        notices += _try_calls(", ".join(user_functions), section, scorer, sample, step)
    if user_functions == functions:
        return notices
    if not user_functions:
        return notices + _check_answers(section, scorer, sample)
    # Calls of a user's function may be slow, so the verifier gets a scorer without it.
    verifier = next(function for function in functions if function in BUILTIN_VERIFIERS)
    verifier_section = section.with_single_function(verifier)
    with RewardScorer.open(verifier_section) as verifier_scorer:
        return notices + _check_answers(verifier_section, verifier_scorer, sample)


def _try_calls(
    function: str,
    section: RewardSection,
    scorer: RewardScorer,
    sample: Sample,
    step: int | None,
) -> list[str]:
    """Calls the user's functions with right answers, then with other problems' answers. Returns a
    notice if some calls fail or right answers do not get more; RecipeError if all calls fail."""
    tried = sample.problems[:TRIED_ROWS]
    verdicts = _graded(scorer, tried, [problem.answer for problem in tried], sample, step)
    failed = [verdict.status for verdict in verdicts if verdict.status in FAILED]
    if not failed:
        if section.main_function in BUILTIN_VERIFIERS:
            return []
        if notices := _compare_scores(section, verdicts):
            return notices
        wrong_answers = [_another_answer(problem, sample.problems) for problem in tried]
        wrong_verdicts = _graded(scorer, tried, wrong_answers, sample, step)
        return _compare_with_wrong(function, verdicts, wrong_verdicts)
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
    """Grades, for every problem, a completion that ends in its element of `answers`, in a box."""
    for index, (problem, answer) in enumerate(zip(problems, answers, strict=True)):
        completion = right_completion(answer)
        encoded, group = sample.encode(completion), f"trial {index}"
        request = GradingRequest.for_prompt(problem, completion, encoded, step=step, group=group)
        scorer.submit(index, request)
    return list(scorer.results().values())


def _another_answer(problem: Prompt, problems: Sequence[Prompt]) -> str:
    """The first reference answer that differs from the problem's; empty if all are equal."""
    return next((other.answer for other in problems if other.answer != problem.answer), "")


def _compare_with_wrong(
    function: str, right: Sequence[Verdict], wrong: Sequence[Verdict]
) -> list[str]:
    """Returns a notice if correct completions do not get more than wrong ones, on average."""
    right_rewards, wrong_rewards = (
        [verdict.reward for verdict in verdicts if verdict.reward is not None]
        for verdicts in (right, wrong)
    )
    if not right_rewards or not wrong_rewards or fmean(right_rewards) > fmean(wrong_rewards):
        return []
    return [
        f"reward function {function} gives {fmean(right_rewards):g} to completions that end in the "
        f"boxed reference answer, and {fmean(wrong_rewards):g} to the same with another problem's: "
        "it does not tell them apart. Fix it, unless it reads another form than a box: --dry-run "
        "--sample 8 shows what it gives to a completion of the model"
    ]


def _compare_scores(section: RewardSection, verdicts: Sequence[Verdict]) -> list[str]:
    """Returns a notice if the first function rewards correct completions with less than
    `reward.correct`; none if it gives nothing: it may read another form of answer."""
    function = section.main_function
    best = max((verdict.scores[0] for verdict in verdicts if verdict.scores), default=0.0)
    if not max(0.0, section.incorrect) < best < section.correct:
        return []
    return [
        f"reward function {function} gives at most {best} for a completion that ends in the boxed "
        f"reference answer, and reward.correct is {section.correct}: such completions count as not "
        "correct, in metrics and, if it grades them, in evaluations. If that is its score for a "
        f"right answer, set reward.correct {best}"
    ]


def _check_answers(section: RewardSection, scorer: RewardScorer, sample: Sample) -> list[str]:
    """Grades every reference answer against itself, in a box, with the verifier of `section`.
    Returns notices about those that are not correct; raises DatasetError if none is, RecipeError if
    the time limit is too short."""
    verifier = section.main_function
    answers = [problem.answer for problem in sample.problems]
    items = [(right_completion(answer), answer, None) for answer in answers]
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
    shown = ", ".join(repr(answer[-SHOWN_CHARACTERS:]) for answer in unread[:3])
    if len(unread) < len(answers):
        return [
            f"{verifier} cannot read {len(unread)} of {len(answers)} reference answers checked, of "
            f"{sample.total} (ending in {shown}): it grades them as different from themselves, so "
            "no completion can be right there",
            *_check_rewritten(verifier, scorer, sample, set(unread)),
        ]
    raise DatasetError(
        f"{sample.recipe_key}: {verifier} can read none of {len(answers)} reference answers "
        f"checked, of {sample.total} (ending in {shown}): it grades them as different from "
        "themselves, so no completion could be right; name the field with the final answer "
        "(prompts.answer_field), or choose another reward function"
    )


def _check_rewritten(
    verifier: str, scorer: RewardScorer, sample: Sample, excluded: Collection[str] = ()
) -> list[str]:
    """Grades common rewritings (`REWRITES`) of reference answers, except those `excluded`, against
    the originals, and returns one notice if the verifier takes some for different."""
    golds = [problem.answer for problem in sample.problems if problem.answer not in excluded]
    rewritten = [
        (name, gold, re.sub(pattern, replacement, gold))
        for gold in golds
        for name, pattern, replacement in REWRITES
        if re.search(pattern, gold) and not re.fullmatch(THOUSANDS, gold)
    ]
    if not rewritten:
        return []
    verdicts = scorer.score([(right_completion(text), gold, None) for _, gold, text in rewritten])
    pairs = zip(rewritten, verdicts, strict=True)
    wrong = [rewrite for rewrite, verdict in pairs if verdict.status != "correct"]
    counts = Counter(name for name, _, _ in wrong)
    kinds = ", ".join(f"{name}: {count}" for name, count in counts.items())
    return [
        f"{len({gold for _, gold, _ in wrong})} of {len(sample.problems)} reference answers "
        f"checked, of {sample.total}, may be graded wrongly: {verifier} grades as different what "
        f"is written otherwise ({kinds}), for example {text!r} for {gold!r}"
        for _, gold, text in wrong[:1]
    ]
