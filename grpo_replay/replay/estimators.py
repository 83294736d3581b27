"""The advantages of one group by the estimator that the recipe names."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import AdvantageSection
from grpo_replay.recipe.open_lists import ADVANTAGES
from grpo_replay.replay.advantages import GroupAdvantage, group_advantages


def group_relative(rewards_G: np.ndarray, settings: AdvantageSection) -> np.ndarray | None:
    """(r - μ_g) / (σ_g + ε_σ), float32 [G]; None if all rewards are equal."""
    return _statistics(rewards_G, settings).advantages_G


def estimate_advantages(
    rewards_G: Sequence[float | None] | np.ndarray, settings: AdvantageSection
) -> GroupAdvantage:
    """Statistics and advantages of one group. A group without a signal has none, whatever the
    estimator; a reward that is None has NaN.

    Raises RecipeError if the estimator does not return one finite number for each reward.
    """
    group = _statistics(rewards_G, settings)
    if group.advantages_G is None:
        return group
    came_G = np.array([reward is not None for reward in rewards_G])
    rewards = np.array([reward for reward in rewards_G if reward is not None], np.float64)
    found = np.asarray(ADVANTAGES.load(settings.estimator)(rewards, settings), np.float32)
    if found.shape != rewards.shape or not np.isfinite(found).all():
        raise RecipeError(
            f"advantage.estimator {settings.estimator}: returned {found} for rewards {rewards}: "
            "return one finite number for each"
        )
    advantages_G = np.full(came_G.size, np.nan, np.float32)
    advantages_G[came_G] = found
    return replace(group, advantages_G=advantages_G)


def _statistics(
    rewards_G: Sequence[float | None] | np.ndarray, settings: AdvantageSection
) -> GroupAdvantage:
    return group_advantages(rewards_G, settings.std, settings.epsilon, settings.divide_by_std)
