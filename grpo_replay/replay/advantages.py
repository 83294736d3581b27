"""Computes group-relative advantages (paper A, section 3).

`A_i = (r_i - μ_g) / (σ_g + ε_σ)` over the G completions of one prompt. With k correct of G under
rewards that take two values, `|A_correct| = √((G-k)/k)` and `|A_incorrect| = √(k/(G-k))`, up to
ε_σ; these closed forms need the population standard deviation. A missing reward (None) is ignored:
G, k, μ_g and σ_g are those of the other members. Dr. GRPO (arXiv 2503.20783) does not divide by
σ_g, because the division gives very easy and very hard prompts more weight.

Every number returned is exact in float32, the precision of the rollout files. The logged values are
the trained ones, and a buffer restored from disk has the same priorities bit for bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_replay.errors import NonFiniteError, RecipeError
from grpo_replay.recipe import AdvantageSection
from grpo_replay.recipe.open_lists import ADVANTAGES
from grpo_replay.replay.priorities import one_number_per_row


@dataclass(frozen=True, slots=True, eq=False)
class GroupAdvantage:
    """Statistics of one group, in units of the reward.

    `advantages_G` (float32 [G]) is None if all rewards are equal: the group has no signal and is
    dropped. `std` is then exactly 0. Example: rewards [1, 1, 1, -1] have mean 0.5, std √0.75
    and advantages [√(1/3), √(1/3), √(1/3), -√3], up to ε.

    The advantage of a member without a reward is NaN: rewards [1, None, -1] give [1, NaN, -1]. With
    fewer than two rewards, everything is None.
    """

    mean: float | None
    std: float | None
    advantages_G: np.ndarray | None


def group_advantages(
    rewards_G: Sequence[float | None] | np.ndarray,
    std: str = "population",
    epsilon: float = 1e-6,
    divide_by_std: bool = True,
) -> GroupAdvantage:
    """Compute mean, standard deviation and advantages of a group of G ≥ 1 rewards (None: missing).

    Without `divide_by_std`, `A_i = r_i - μ_g` (Dr. GRPO): rewards [1, 1, 1, -1] give
    [0.5, 0.5, 0.5, -1.5].

    A group has no signal if its float32 rewards are equal; σ_g is not compared with a tolerance.
    Sums are exactly rounded, so permuting a group permutes its advantages.
    Raises NonFiniteError for a reward that is not finite.
    """
    if std not in ("population", "sample"):
        raise ValueError(f"std {std!r}: expected 'population' or 'sample'")
    all_rewards_G = _as_rewards(rewards_G)
    rewarded_G = np.array([reward is not None for reward in rewards_G])
    rewards = all_rewards_G[rewarded_G]
    if rewards.size < 2:
        return GroupAdvantage(mean=None, std=None, advantages_G=None)
    if not np.isfinite(rewards).all():
        raise NonFiniteError(
            f"rewards of one group are {list(rewards_G)}: every reward must be a finite float32; "
            "check the reward function"
        )
    if (rewards == rewards[0]).all():
        return GroupAdvantage(mean=float(rewards[0]), std=0.0, advantages_G=None)
    mean = math.fsum(rewards) / rewards.size
    deviations = rewards - mean
    divisor = rewards.size if std == "population" else rewards.size - 1
    sigma = math.sqrt(math.fsum(deviations**2) / divisor)
    advantages_G = np.full(all_rewards_G.size, np.nan, np.float32)
    advantages_G[rewarded_G] = deviations / (sigma + epsilon if divide_by_std else 1.0)
    return GroupAdvantage(float(np.float32(mean)), float(np.float32(sigma)), advantages_G)


def _as_rewards(rewards_G: Sequence[float | None] | np.ndarray) -> np.ndarray:
    """Return the rewards, rounded to float32, as float64 [G]; a missing reward is NaN."""
    rewards = np.asarray(rewards_G, dtype=np.float32).astype(np.float64)
    if rewards.ndim != 1 or rewards.size < 1:
        raise ValueError(f"rewards of one group have shape [G] with G ≥ 1, found {rewards.shape}")
    return rewards


def group_relative(rewards_G: np.ndarray, settings: AdvantageSection) -> np.ndarray | None:
    """The default estimator (r - μ_g) / (σ_g + ε_σ), float32 [G]; None if all rewards are equal."""
    return _statistics(rewards_G, settings).advantages_G


def estimate_advantages(
    rewards_G: Sequence[float | None] | np.ndarray, settings: AdvantageSection
) -> GroupAdvantage:
    """Compute statistics and advantages of one group with `settings.estimator`. The advantages are
    None for a group without a signal, whatever the estimator, and NaN for a missing reward.

    Raises RecipeError if the estimator does not return one finite number for each reward.
    """
    group = _statistics(rewards_G, settings)
    if group.advantages_G is None:
        return group
    rewarded_G = np.array([reward is not None for reward in rewards_G])
    rewards = np.array([reward for reward in rewards_G if reward is not None], np.float64)
    option = f"advantage.estimator {settings.estimator}"
    returned = ADVANTAGES.load(settings.estimator)(rewards, settings)
    estimates = one_number_per_row(option, returned, len(rewards)).astype(np.float32)
    if not np.isfinite(estimates).all():
        raise RecipeError(
            f"{option}: returned {estimates} for rewards {rewards}: return one finite number for "
            "each reward"
        )
    advantages_G = np.full(rewarded_G.size, np.nan, np.float32)
    advantages_G[rewarded_G] = estimates
    return replace(group, advantages_G=advantages_G)


def _statistics(
    rewards_G: Sequence[float | None] | np.ndarray, settings: AdvantageSection
) -> GroupAdvantage:
    return group_advantages(rewards_G, settings.deviation, settings.epsilon, settings.divide_by_std)
