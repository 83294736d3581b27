"""Notices and refusals about rewards: at a start, at a resume, and in each step."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from grpo_replay.errors import RewardError
from grpo_replay.evaluation.benchmarks import EvaluationPlan, try_verifier
from grpo_replay.prompts.prompt_set import PromptSet
from grpo_replay.recipe import BUILTIN_VERIFIERS, RewardSection
from grpo_replay.recipe.input_sections import SamplingSection
from grpo_replay.recipe.open_lists import VERIFIERS
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.rewards.trial import CHECKED_ANSWERS, Sample, try_rewards
from grpo_replay.sampling.completion_text import CompletionText
from grpo_replay.types import FAILED, Rollout, first_score

FIRST_NOTICE_STEPS = 5
"""Steps that a watch waits before its first notice."""


def notices_of_rewards(
    reward: RewardSection, scorer: RewardScorer, prompts: PromptSet, text: CompletionText
) -> list[str]:
    """Try the reward functions on a few problems, and return notices about them. Raises RecipeError
    or DatasetError if no completion could earn a reward."""
    sample = Sample(prompts.sample(CHECKED_ANSWERS), len(prompts), "prompts.source", text.encode)
    return try_rewards(reward, scorer, sample)


def notices_of_verifier(
    verifier: str, reward: RewardSection, evaluation: EvaluationPlan
) -> list[str]:
    """Try the `verifier` of evaluations on a few problems, and return notices about it."""
    trained = reward.main_function
    if verifier not in BUILTIN_VERIFIERS:
        return try_verifier(reward, evaluation)
    if trained in BUILTIN_VERIFIERS:
        return []
    return [
        f"evaluations are graded by {verifier} (eval.reward), not by the reward function "
        f"{trained}: set eval.reward to grade them alike"
    ]


def reward_digests(reward: RewardSection, sources: Mapping[str, str]) -> dict[str, str | None]:
    """SHA-256 of the source file of each reward function, by function name; None if it is built in.
    `sources` are those of the scorer. Imported files are not included."""
    return {
        str(weighted.name): sources.get(VERIFIERS.import_path(weighted.function))
        for weighted in reward.functions
    }


def refuse_failed_verdicts(
    rollouts: Sequence[Rollout], step: int, reward: RewardSection, first_error: str | None
) -> None:
    """Raises RewardError if a reward function failed on more than `reward.max_failed_share` of a
    step's completions. `first_error` is the first exception, if known."""
    failed = [rollout.verdict for rollout in rollouts if rollout.verdict in FAILED]
    limit = reward.max_failed_share
    if not rollouts or len(failed) <= limit * len(rollouts):
        return
    functions = ", ".join(weighted.function for weighted in reward.functions)
    raise RewardError(
        f"step {step}: the reward function ({functions}) failed on {len(failed)} of "
        f"{len(rollouts)} completions ({describe_failures(failed)}), more than "
        f"reward.max_failed_share {limit:g}. First error: {_described(first_error, failed)}. Fix "
        "what it calls or its limit (reward.time_limit_seconds), then resume; a function that was "
        "edited itself needs a new run"
    )


def _described(first_error: str | None, failed: Sequence[str]) -> str:
    """The first error of the reward function on any rank, or the reason why there is none."""
    if first_error is None and set(failed) <= {"timeout", "memory"}:
        return "none was raised, the function exceeded its limits (reward.time_limit_seconds)"
    return first_error or "none was raised; see log/"


def notices_of_ids(step: int, generated: Sequence[Rollout], vocabulary: int) -> list[str]:
    """Returns a notice if completions have token ids beyond the tokenizer's `vocabulary` (size)."""
    unknown = sum(bool((r.completion_token_ids >= vocabulary).any()) for r in generated)
    if unknown == 0:
        return []
    return [
        f"step {step}: {unknown} of {len(generated)} completions have token ids from {vocabulary} "
        "on, which the tokenizer does not have (the model's vocabulary is padded): no text shows "
        "them"
    ]


class CorrectWatch:
    """Reports once that the user's scores vary, but none of them counts as correct."""

    def __init__(self, reward: RewardSection) -> None:
        self._reward = reward
        self._steps, self._best = 0, -math.inf  # the best score of these steps
        self._is_done = reward.main_function in BUILTIN_VERIFIERS

    def observe(self, step: int, generated: Sequence[Rollout]) -> list[str]:
        """Called after every step. Returns a notice, once, if no completion has been correct in at
        least `FIRST_NOTICE_STEPS` steps with scores and the scores of this step differ. Silent for
        good once a completion was correct."""
        scores = [
            first_score(rollout.reward_scores, rollout.reward)
            for rollout in generated
            if rollout.reward is not None
        ]
        self._is_done = self._is_done or any(rollout.group_correct for rollout in generated)
        if self._is_done or not scores:
            return []
        self._steps, self._best = self._steps + 1, max(self._best, *scores)
        if self._steps < FIRST_NOTICE_STEPS or min(scores) == max(scores):
            return []
        self._is_done = True
        return [
            f"step {step}: in {self._steps} steps no completion was correct, which means a score "
            f"of at least reward.correct {self._reward.correct} by {self._reward.main_function}; "
            f"the scores differ, and the highest was {self._best:g}. If right answers score less, "
            "set reward.correct to their score"
        ]


class SlowWatch:
    """Reports once that the first steps spent most of their time in the reward functions."""

    def __init__(self, reward: RewardSection) -> None:
        self._reward, self._seconds = reward, Counter[str]()

    def observe(self, step: int, seconds: Mapping[str, float]) -> list[str]:
        """Called after every step with its `seconds` by stage. Returns a notice after exactly
        `FIRST_NOTICE_STEPS` steps of a process, if the reward functions took at least a second per
        step and half of the time."""
        self._seconds += Counter({"steps": 1.0, **seconds})
        spent, steps = self._seconds["reward"], self._seconds["steps"]
        is_slow = spent >= max(steps, self._seconds["step"] / 2)
        if steps != FIRST_NOTICE_STEPS or not is_slow:
            return []
        return [
            f"step {step}: {spent / self._seconds['step']:.0%} of the steps' time, "
            f"{spent / steps:.1f} s each, went into {self._reward.main_function}: make it faster, "
            f"or raise reward.workers, {self._reward.workers} now"
        ]


def describe_failures(verdicts: Sequence[str]) -> str:
    """Returns the number of each kind of failure, such as "3 timeout, 1 crash"."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[status]} {status}" for status in FAILED if counts[status])


def advice_on_cut_off(sampling: SamplingSection) -> str:
    """Advice for many completions that were cut off."""
    return (
        f"raise sampling.max_completion_length, {sampling.max_completion_length} tokens, or set "
        "sampling.stop_tokens: the model may never sample those that end a completion now"
    )


class LearningWatch:
    """Counts consecutive steps in which no rollout had an advantage, and reports why."""

    def __init__(self, reward: RewardSection, sampling: SamplingSection, last_step: int) -> None:
        self._reward, self._sampling, self._last_step = reward, sampling, last_step
        self._counts: Counter[str] = Counter()  # steps and rollouts since the last signal
        self._next_notice = FIRST_NOTICE_STEPS

    def observe(self, step: int, generated: Sequence[Rollout]) -> list[str]:
        """Called after every step. A step with an advantage resets the count; otherwise returns a
        notice after `FIRST_NOTICE_STEPS` such steps in a row, again at every doubling, and at the
        end of a run that never had an advantage."""
        if any(rollout.kept and rollout.group_reward_std for rollout in generated):
            self._counts.clear()
            self._next_notice = FIRST_NOTICE_STEPS
            return []
        self._count(generated)
        never_trained = step == self._last_step == self._counts["steps"]
        if self._counts["steps"] < self._next_notice and not never_trained:
            return []
        self._next_notice *= 2
        return [self._notice(step)]

    def _count(self, generated: Sequence[Rollout]) -> None:
        """Adds a step's completions to the counts. Every member has the number correct in its
        group, so the sum is divided by the group size."""
        size = self._sampling.group_size
        self._counts += Counter(
            steps=1,
            rollouts=len(generated),
            correct=sum(rollout.group_correct for rollout in generated) // size,
            truncated=sum(rollout.finish_reason == "length" for rollout in generated),
            unparsable=sum(rollout.verdict == "unparsable" for rollout in generated),
            failed=sum(rollout.verdict in FAILED for rollout in generated),
        )

    def _notice(self, step: int) -> str:
        """Returns the notice: why no completion got an advantage, shares of faults, and advice."""
        counts, rollouts = self._counts, self._counts["rollouts"]
        shares = ", ".join(
            f"{counts[name] / rollouts:.0%} {what}"
            for name, what in (
                ("correct", "correct"),
                ("truncated", "cut off"),
                ("unparsable", "without an answer"),
                ("failed", "failures of the reward function"),
            )
        )
        cut_off = " or its completions cut off" if self._reward.mask_truncated else ""
        cut_off += " or masked by the sampler" if self._sampling.facts.masks_tokens else ""
        return (
            f"step {step}: nothing to learn from for {counts['steps']} steps: no completion got an "
            f"advantage, because the rewards of each group were equal{cut_off}. Of "
            f"{rollouts:,} completions: {shares}. {self._advice()}"
        )

    def _advice(self) -> str:
        """Returns what most of the counted completions have in common, and what to do about it."""
        counts, half = self._counts, self._counts["rollouts"] / 2
        if counts["failed"] > half:
            return "The reward function fails: see log/ for its first error"
        if counts["correct"] > half:
            if counts["failed"]:
                return (
                    "The reward function fails on what is not right: see log/ for its first error"
                )
            if self._reward.main_function in BUILTIN_VERIFIERS:
                return "The problems are too easy: choose harder ones"
            function = f"{self._reward.main_function} gives all the same: fix it"
            return f"The problems are too easy: choose harder ones, or {function}"
        if counts["truncated"] > half:
            return f"The completions are cut off: {advice_on_cut_off(self._sampling)}"
        if counts["unparsable"] > half:
            return (
                "The completions have no answer in the form that the verifier reads: check "
                "prompts.user_template and reward.function"
            )
        return (
            "The problems are too hard, or the reference answers have another form than the "
            f"completions, or {self._reward.main_function} does not read them: look at some with "
            "grpo-replay inspect-buffer RUN --show ROLLOUT_ID"
        )
