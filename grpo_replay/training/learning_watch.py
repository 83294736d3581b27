"""A run that cannot learn says so: failing reward functions, and steps without any signal."""

from collections import Counter
from collections.abc import Sequence

from grpo_replay.errors import RewardError
from grpo_replay.recipe import Recipe
from grpo_replay.types import FAILED, Rollout

FIRST_NOTICE_STEPS = 5
"""Consecutive steps without signal before the first notice. Each further notice waits twice as
long."""


def refuse_failed_verdicts(
    rollouts: Sequence[Rollout], step: int, recipe: Recipe, first_error: str | None
) -> None:
    """Raise RewardError if a reward function gave no score for more than `reward.max_failed_share`
    of a step's completions. `first_error` is the first exception, if one is known."""
    failed = [rollout.verdict for rollout in rollouts if rollout.verdict in FAILED]
    limit = recipe.reward.max_failed_share
    if not rollouts or len(failed) <= limit * len(rollouts):
        return
    functions = ", ".join(each.function for each in recipe.reward.functions)
    raise RewardError(
        f"step {step}: the reward function ({functions}) failed on {len(failed)} of "
        f"{len(rollouts)} completions ({describe_failures(failed)}), more than "
        f"reward.max_failed_share {limit:g}. First error: "
        f"{first_error or 'none was raised on this rank; see log/'}. Mend the function or its "
        "limits (reward.time_limit_seconds, reward.memory_limit_mib), then resume"
    )


class MissingWatch:
    """Says once that rewards do not come. The metric `reward/missing_fraction` goes on."""

    def __init__(self) -> None:
        self._told = False

    def observe(
        self, step: int, generated: Sequence[Rollout], first_error: str | None
    ) -> list[str]:
        """The notice, after the first step with a rollout without a reward; else nothing."""
        missing = [rollout.verdict for rollout in generated if rollout.reward is None]
        if self._told or not missing:
            return []
        self._told = True
        return [
            f"step {step}: the reward function gave no reward for {len(missing)} of "
            f"{len(generated)} completions ({describe_failures(missing)}). They are left out of "
            "their groups, neither trained on nor stored; the metric reward/missing_fraction has "
            f"the share of every step. First error: {first_error or 'see log/'}"
        ]


def describe_failures(verdicts: Sequence[str]) -> str:
    """The number of each kind of failure, such as "3 timeout, 1 crash"."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[status]} {status}" for status in FAILED if counts[status])


class LearningWatch:
    """Counts consecutive steps in which no rollout had an advantage, and says why."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._counts: Counter[str] = Counter()  # of steps and rollouts since the last signal
        self._next_notice = FIRST_NOTICE_STEPS

    def observe(self, step: int, generated: Sequence[Rollout]) -> list[str]:
        """A notice, if one is due after this step; else nothing."""
        if any(rollout.kept and rollout.group_reward_std for rollout in generated):
            self._counts.clear()
            self._next_notice = FIRST_NOTICE_STEPS
            return []
        self._count(generated)
        never_trained = step == self._recipe.run.steps == self._counts["steps"]
        if self._counts["steps"] < self._next_notice and not never_trained:
            return []
        self._next_notice *= 2
        return [self._notice(step)]

    def _count(self, generated: Sequence[Rollout]) -> None:
        size = self._recipe.sampling.group_size
        self._counts += Counter(
            steps=1,
            rollouts=len(generated),
            correct=sum(rollout.group_correct for rollout in generated) // size,
            truncated=sum(rollout.finish_reason == "length" for rollout in generated),
            unparsable=sum(rollout.verdict == "unparsable" for rollout in generated),
            failed=sum(rollout.verdict in FAILED for rollout in generated),
        )

    def _notice(self, step: int) -> str:
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
        cut_off = " or its completions cut off" if self._recipe.reward.mask_truncated else ""
        return (
            f"step {step}: nothing to learn from for {counts['steps']} steps: no completion got an "
            f"advantage, because the rewards of each group were equal{cut_off}. Of "
            f"{rollouts:,} completions: {shares}. {self._advice()}"
        )

    def _advice(self) -> str:
        """What most completions have in common, and what to do about it."""
        counts, most = self._counts, self._counts["rollouts"] / 2
        if counts["failed"] > most:
            return "The reward function fails: see log/ for its first error"
        if counts["correct"] > most:
            return "The problems are too easy: choose harder ones"
        if counts["truncated"] > most:
            longest = self._recipe.sampling.max_completion_length
            return f"Raise sampling.max_completion_length, {longest} tokens"
        if counts["unparsable"] > most:
            return (
                "The completions have no answer in the form that the verifier reads: check "
                "prompts.user_template and reward.function"
            )
        return (
            "The problems are too hard, or the reference answers have another form than the "
            "completions: read some with grpo-replay inspect-buffer RUN --show ROLLOUT_ID"
        )
