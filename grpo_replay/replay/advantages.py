"""Group-relative advantages (paper A, section 3).

`A_i = (r_i - μ_g) / (σ_g + ε_σ)` over the G completions of one prompt. With k correct of G under
rewards that take two values, `|A_correct| = √((G-k)/k)` and `|A_incorrect| = √(k/(G-k))`, up to
ε_σ; these closed forms need the population standard deviation. Dr. GRPO (arXiv 2503.20783) leaves
the division out: dividing by σ_g gives very easy and very hard prompts more weight.

Every number returned is exact in float32, the precision of the rollout files. The logged values are
the trained ones, and a buffer restored from disk has the same priorities bit for bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_replay.errors import NonFiniteError


@dataclass(frozen=True, slots=True, eq=False)
class GroupAdvantage:
    """Statistics of one group, in units of the reward.

    `advantages_G` (float32 [G]) is None if all rewards are equal: the group has no signal and is
    dropped. `std` is then exactly 0. Example: rewards [1, 1, 1, -1] have mean 0.5, std √0.75
    and advantages [√(1/3), √(1/3), √(1/3), -√3], up to ε.
    """

    mean: float
    std: float
    advantages_G: np.ndarray | None


def group_advantages(
    rewards_G: Sequence[float | None] | np.ndarray,
    std: str = "population",
    epsilon: float = 1e-6,
    divide_by_std: bool = True,
) -> GroupAdvantage:
    """Mean, standard deviation and advantages of one group of G ≥ 2 rewards.

    Without `divide_by_std`, `A_i = r_i - μ_g` (Dr. GRPO): rewards [1, 1, 1, -1] give
    [0.5, 0.5, 0.5, -1.5].

    A group has no signal if its float32 rewards are equal; σ_g is not compared with a tolerance.
    Sums are exactly rounded, so permuting a group permutes its advantages.
    Raises NonFiniteError for a reward that is not finite.
    """
    if std not in ("population", "sample"):
        raise ValueError(f"std {std!r}: expected 'population' or 'sample'")
    rewards = np.asarray(rewards_G, dtype=np.float32).astype(np.float64)
    if rewards.ndim != 1 or rewards.size < 2:
        raise ValueError(f"rewards of one group have shape [G] with G ≥ 2, found {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise NonFiniteError(
            f"rewards of one group are {list(rewards_G)}: every reward must be a finite float32; "
            "check reward.function"
        )
    if (rewards == rewards[0]).all():
        return GroupAdvantage(mean=float(rewards[0]), std=0.0, advantages_G=None)
    mean = math.fsum(rewards) / rewards.size
    deviations = rewards - mean
    divisor = rewards.size if std == "population" else rewards.size - 1
    sigma = math.sqrt(math.fsum(deviations**2) / divisor)
    return GroupAdvantage(
        mean=float(np.float32(mean)),
        std=float(np.float32(sigma)),
        advantages_G=(deviations / (sigma + epsilon if divide_by_std else 1.0)).astype(np.float32),
    )
