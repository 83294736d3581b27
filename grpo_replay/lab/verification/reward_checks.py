"""Check of rollouts/: a reward that combines several scores is their weighted sum."""

from itertools import compress

import numpy as np

from grpo_replay.lab.verification.run_files import RunFiles
from grpo_replay.lab.verification.verification_report import Check, Tally
from grpo_replay.recipe import Recipe
from grpo_replay.storage.rollout_log import read_rollout_table, step_path

_TOLERANCE = 2e-6  # relative; scores and rewards are rounded to float32


def check_rewards(run: RunFiles) -> list[Check]:
    """Σ weight · score against the reward of each rollout, and the overlong score against its
    length. No check if no step combines scores."""
    tally = Tally("rewards", "weighted sums of the scores; overlong scores follow from lengths")
    for step, rows in run.rows_of_step.items():
        if run.recipe_at(step).reward.is_combined:
            _check_step(run, step, rows, tally)
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


def _check_step(run: RunFiles, step: int, rows: slice, tally: Tally) -> None:
    recipe = run.recipe_at(step)
    weights, names = _weights(recipe), recipe.reward.score_names
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
            f"{place}: {len(scores)} scores, expected {len(weights)} ({', '.join(names)})",
        )
        if not counted:
            continue
        parts = [weight * score for weight, score in zip(weights, scores, strict=True)]
        tally.expect(
            abs(reward - sum(parts)) <= _TOLERANCE * max(1.0, sum(map(abs, parts))),
            f"{place}: reward {reward:.7g}, the weighted sum of its scores "
            f"{', '.join(f'{score:g}' for score in scores)} is {sum(parts):.7g}",
        )
        if recipe.reward.overlong_buffer_tokens is not None:
            expected = _overlong(length, recipe, recipe.reward.overlong_buffer_tokens)
            tally.expect(
                abs(scores[-1] - expected) <= _TOLERANCE,
                f"{place}: overlong score {scores[-1]:.7g}, {length} tokens give {expected:.7g}",
            )


def _weights(recipe: Recipe) -> list[float]:
    section = recipe.reward
    penalty = [] if section.overlong_buffer_tokens is None else [section.overlong_weight]
    return [*(each.weight for each in section.functions), *penalty]


def _overlong(length: int, recipe: Recipe, buffer_tokens: int) -> float:
    """DAPO's equation 13: 0 outside the buffer before the length limit, then linear to -1."""
    excess = length - (recipe.sampling.max_completion_length - buffer_tokens)
    return -min(max(excess, 0) / buffer_tokens, 1.0)


def _scores(run: RunFiles, step: int) -> list[list[float]]:
    table = read_rollout_table(step_path(run.folder / "rollouts", step), ["reward_scores"])
    return [scores or [] for scores in table["reward_scores"].to_pylist()]
