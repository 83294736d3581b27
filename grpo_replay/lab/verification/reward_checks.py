"""Checks of rewards, group statistics, kept flags and advantages, group by group."""

import math
from itertools import compress

import numpy as np

from grpo_replay.lab.verification.run_files import Check, RunFiles, Tally
from grpo_replay.recipe import AdvantageSection, RewardSection
from grpo_replay.recipe.open_lists import ADVANTAGES
from grpo_replay.storage.rollout_log import read_rollout_table, step_path

_TOLERANCE = 2e-6  # relative; rounding a number to float32 once gives at most 6e-8


def check_rewards(run: RunFiles) -> list[Check]:
    """Σ weight · score against the reward of each rollout, and the overlong score against its
    length. No check if no step combines scores."""
    tally = Tally("rewards", "weighted sums of the scores; overlong scores follow from lengths")
    for step, rows in run.rows_of_step.items():
        if run.recipe_at(step).reward.is_combined:
            _check_rewards_of_step(run, step, rows, tally)
    return [tally.result()] if tally.checked else []


def logged_scores(run: RunFiles, step: int) -> np.ndarray | None:
    """The scores [rollouts, functions] of the rollouts of a step whose reward came, as logged; None
    if the recipe does not combine several, or a rollout has another number of them."""
    names = run.recipe_at(step).reward.score_names
    if not run.recipe_at(step).reward.is_combined:
        return None
    came = ~np.isnan(run.rollouts["reward"][run.rows_of_step[step]])
    scores = list(compress(_scores(run, step), came))
    if not scores or any(len(each) != len(names) for each in scores):
        return None
    return np.array(scores, np.float64).reshape(-1, len(names))


def _check_rewards_of_step(run: RunFiles, step: int, rows: slice, tally: Tally) -> None:
    section = run.recipe_at(step).reward
    weights = _weights(section)
    longest = run.recipe_at(step).sampling.max_completion_length
    columns = ("rollout_id", "reward", "completion_token_ids")
    ids, rewards, lengths = (run.rollouts[name][rows].tolist() for name in columns)
    for rollout_id, reward, length, scores in zip(
        ids, rewards, lengths, _scores(run, step), strict=True
    ):
        place = f"step {step}, rollout {rollout_id}"
        if np.isnan(reward):
            tally.expect(not scores, f"{place}: {len(scores)} scores, but no reward")
            continue
        counted = tally.expect(
            len(scores) == len(weights),
            f"{place}: {len(scores)} scores, expected {len(weights)} "
            f"({', '.join(section.score_names)})",
        )
        if not counted:
            continue
        _check_sum(place, reward, scores, weights, tally)
        if section.overlong_buffer_tokens is not None:
            # DAPO's equation 13: 0 outside the buffer before the length limit, then linear to -1.
            excess = length - (longest - section.overlong_buffer_tokens)
            expected = -min(max(excess, 0) / section.overlong_buffer_tokens, 1.0)
            tally.expect(
                abs(scores[-1] - expected) <= _TOLERANCE,
                f"{place}: overlong score {scores[-1]:.7g}, {length} tokens give {expected:.7g}",
            )


def _check_sum(
    place: str, reward: float, scores: list[float], weights: list[float], tally: Tally
) -> None:
    parts = [weight * score for weight, score in zip(weights, scores, strict=True)]
    tally.expect(
        abs(reward - sum(parts)) <= _TOLERANCE * max(1.0, sum(map(abs, parts))),
        f"{place}: reward {reward:.7g}, the weighted sum of its scores "
        f"{', '.join(f'{score:g}' for score in scores)} is {sum(parts):.7g}",
    )


def _weights(section: RewardSection) -> list[float]:
    penalty = [] if section.overlong_buffer_tokens is None else [1.0]
    return [*(each.weight for each in section.functions), *penalty]


def _scores(run: RunFiles, step: int) -> list[list[float]]:
    table = read_rollout_table(step_path(run.folder / "rollouts", step), ["reward_scores"])
    return [scores or [] for scores in table["reward_scores"].to_pylist()]


def check_advantages(run: RunFiles) -> list[Check]:
    """Group statistics, kept flags and advantages against the rewards, group by group."""
    checks = _AdvantageChecks(run)
    for step, rows in run.rows_of_step.items():
        for group_id, members in run.groups(rows).items():
            checks.check_group(step, f"step {step}, group {group_id}", members)
    tallies = (checks.kept, checks.statistics, checks.advantages)
    return [tally.result() for tally in tallies]


class _AdvantageChecks:
    def __init__(self, run: RunFiles) -> None:
        self.run = run
        rule = "where the group has a signal, the reward came and the recipe masks nothing"
        self.kept = Tally("kept flags", f"kept exactly {rule}; nulls only elsewhere")
        self.statistics = Tally(
            "group statistics", "mean, standard deviation, correct count recomputed"
        )
        self.advantages = Tally(
            "advantages", "(r - mean) / (std + epsilon) recomputed from the rewards"
        )

    def check_group(self, step: int, place: str, members: np.ndarray) -> None:
        run, recipe = self.run, self.run.recipe_at(step)
        rewards = [float(reward) for reward in run.rollouts["reward"][members]]
        came = [reward for reward in rewards if not math.isnan(reward)]
        differ = len(set(came)) > 1
        has_signal = differ or (len(came) > 1 and not recipe.replay.drop_zero_variance)
        mean, std = _mean_and_std(came, recipe.advantage.std)
        first_scores = run.rollouts["first_score"][members]
        correct = int((first_scores >= np.float32(recipe.reward.correct)).sum())
        expected = _advantages(recipe.advantage, rewards, mean, std)
        for row, reward, advantage in zip(members, rewards, expected, strict=True):
            here = f"{place}, rollout {run.rollouts['rollout_id'][row]}"
            masked = recipe.reward.mask_truncated and bool(run.rollouts["truncated"][row])
            keeps = has_signal and not masked and not run.is_dropped(step, row)
            trainable, tokens = (
                run.rollouts[name][row] for name in ("trainable", "completion_token_ids")
            )
            keeps &= not math.isnan(reward) and bool(trainable > 0 or tokens == 0)
            self._check_statistics(row, here, mean, std, correct)
            self._check_kept(row, here, keeps, rewards)
            if keeps:
                found = run.rollouts["advantage"][row]
                self.advantages.expect(
                    _close(found, advantage),
                    f"{here}: advantage {found}, recomputed {advantage:.7g}",
                )

    def _check_statistics(self, row: int, here: str, mean: float, std: float, correct: int) -> None:
        names = ("group_reward_mean", "group_reward_std", "group_correct")
        found = [self.run.rollouts[name][row] for name in names]
        self.statistics.expect(
            _close(found[0], mean) and _close(found[1], std),
            f"{here}: mean {found[0]}, std {found[1]}, recomputed {mean:.7g}, {std:.7g}",
        )
        self.statistics.expect(
            found[2] == correct, f"{here}: group_correct {found[2]}, recomputed {correct}"
        )

    def _check_kept(self, row: int, here: str, keeps: bool, rewards: list[float]) -> None:
        rollout = {name: column[row] for name, column in self.run.rollouts.items()}
        self.kept.expect(
            rollout["kept"] == keeps,
            f"{here}: kept is {rollout['kept']}, but rewards are {rewards}",
        )
        logprobs, tokens = rollout["behavior_logprobs"], rollout["completion_token_ids"]
        self.kept.expect(
            logprobs == (tokens if keeps else -1),
            f"{here}: {logprobs} behaviour log-probs (-1: null) for {tokens} tokens",
        )
        if not keeps:
            self.kept.expect(rollout["advantage_is_null"], f"{here}: dropped, but has an advantage")


def _advantages(
    settings: AdvantageSection, rewards: list[float], mean: float, std: float
) -> list[float]:
    """The advantage of each member of a group; NaN where a reward did not come. An estimator that
    is not the papers' is the function that the recipe names."""
    came = np.array([reward for reward in rewards if not math.isnan(reward)])
    if len(set(came.tolist())) < 2:
        return [reward * 0.0 for reward in rewards]
    if settings.estimator == "group_relative":
        divisor = std + settings.epsilon if settings.divide_by_std else 1.0
        return [(reward - mean) / divisor for reward in rewards]
    own = iter(ADVANTAGES.load(settings.estimator)(came, settings))
    return [math.nan if math.isnan(reward) else float(next(own)) for reward in rewards]


def _mean_and_std(rewards: list[float], kind: str) -> tuple[float, float]:
    """Mean and standard deviation of a group's rewards; the latter exactly 0 if all are equal. NaN
    for fewer than two: the group has no statistics."""
    if len(rewards) < 2:
        return math.nan, math.nan
    mean = math.fsum(rewards) / len(rewards)
    if max(rewards) == min(rewards):
        return mean, 0.0
    divisor = len(rewards) - (kind == "sample")
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / divisor)


def _close(found: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isnan(found)
    return abs(float(found) - expected) <= _TOLERANCE * max(1.0, abs(expected))
