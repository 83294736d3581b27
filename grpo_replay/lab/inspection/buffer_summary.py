"""The data types of an inspection, which `compute` fills and panels, figures, page and JSON show;
and warnings about an unhealthy buffer.

"Replayed" counts rows of the draw log up to the inspected step; with the pool composition, draws at
age 0 count as fresh. Ages and gaps are in training steps; in updates if a step makes a draw for
each of its updates. The thresholds of warnings are rules of thumb (docs/buffer.md, "Healthy
ranges").
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_replay.types import HIGH_CLIP_FRACTION


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The content of the buffer, and the number of rollouts to expect in it."""

    stored_rollouts: int
    stored_groups: int
    stored_tokens: int  # completion tokens
    survivors_per_step: float | None  # B': mean over the last τ_max steps; None without a log
    expected_rollouts: int | None  # min(capacity, survivors of the last τ_max steps)


@dataclass(frozen=True, slots=True)
class StalenessRow:
    """Rollouts of one age."""

    age: int
    stored: int
    replayed: int


@dataclass(frozen=True, slots=True)
class LastUse:
    """Numbers of draws by the time since the previous use of the rollout (paper B): 0 for a second
    draw in one batch. `new` counts first uses. Training on a rollout at birth is a use."""

    new: int
    gaps: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Population:
    """Statistics of one set of rollouts: generated, kept, stored, or replayed (counted per use)."""

    name: str
    rollouts: int
    prompts: int
    largest_prompt_share: float
    positive_share: float | None  # with advantage above 0; None if it has dropped rollouts
    abs_advantage_mean: float | None
    tokens_mean: float
    truncated_share: float


@dataclass(frozen=True, slots=True)
class AgeOutcome:
    """Token-weighted outcome of all uses at one age."""

    uses: int
    tokens: int
    clip_fraction: float  # share of tokens whose gradient a clip or mask removed
    log_ratio_mean: float  # nats, policy minus behaviour
    log_ratio_square: float  # nats², mean square of the log-ratio
    approx_kl: float  # nats per token (k3)
    ratio_ess: float  # (Σρ)² / (N·Σρ²) of the per-token ratios

    @property
    def ratio(self) -> float:
        """Geometric mean of the per-token importance ratio."""
        return float(np.exp(self.log_ratio_mean))


@dataclass(frozen=True, slots=True)
class Inspection:
    """All numbers of an inspection."""

    path: str
    step: int
    updates_per_step: int  # that ages and gaps count; 1 if they count steps
    recipe_name: str | None
    settings: Mapping[str, Any]  # the replay section
    replays: bool
    rebuilt: bool  # the buffer was rebuilt from the rollout log
    occupancy: Occupancy
    staleness: tuple[StalenessRow, ...]  # every age from 0 to the largest
    uses_over_run: Mapping[int, int]  # number of uses -> kept rollouts, evicted ones included
    last_use: LastUse | None
    populations: tuple[Population, ...]
    by_age: Mapping[int, AgeOutcome]
    trends: Mapping[str, tuple[tuple[int, float], ...]]  # metric -> (step, value)
    replayed_rollouts: int
    warnings: tuple[str, ...]

    @property
    def age_unit(self) -> str:
        return "steps" if self.updates_per_step == 1 else "updates"


def staleness_rows(
    births: np.ndarray, replayed_ages: np.ndarray, step: int, updates: int = 1
) -> tuple[StalenessRow, ...]:
    """Count by age the rollouts stored after `step`, which were born in `births`, and the replayed
    ones. Ages are in steps, or in updates if a step has several `updates`."""
    stored_ages = updates * (step - births) + updates - 1
    rows = 1 + max([-1, *stored_ages.tolist(), *replayed_ages.tolist()])
    stored = np.bincount(stored_ages, minlength=rows)
    replayed = np.bincount(replayed_ages, minlength=rows)
    return tuple(StalenessRow(age, int(stored[age]), int(replayed[age])) for age in range(rows))


TREND_LABELS = {
    "reward": "reward, mean",
    "frac_reward_zero_std": "groups without signal",
    "completions/mean_length": "completion tokens, mean",
    "entropy": "policy entropy, nats",
    "fresh/clip_fraction": "clip fraction, fresh",
    "replay/clip_fraction": "clip fraction, replayed",
    "replay/approx_kl": "KL of replayed, nats",
    "replay/ess": "effective sample size",
    "replay/ratio": "replayed per fresh",
    "buffer/rollouts": "rollouts stored",
}
"""The metrics that an inspection shows over training, with their labels."""


STARVED_SHARE = 0.9
FEW_SURVIVORS_SHARE = 0.1


def find_warnings(inspection: Inspection) -> Iterator[str]:
    """Yield one warning per problem, none for a healthy buffer: few survivors, a full buffer, fewer
    replayed than asked for, unknown or much clipping."""
    settings, warmup = inspection.settings, inspection.settings["warmup_steps"]
    counts = {rows.name: rows.rollouts for rows in inspection.populations}
    share = counts.get("kept", 0) / max(counts.get("generated", 0), 1)
    if counts.get("generated", 0) >= 100 and share < FEW_SURVIVORS_SHARE:
        yield (
            f"Only {share:.1%} of the generated rollouts are in groups with mixed rewards: most "
            "prompts are too hard or too easy for this model, or its reward function does not read "
            "the completions."
        )
    if not inspection.replays:
        return
    stored, groups = inspection.occupancy.stored_rollouts, inspection.occupancy.stored_groups
    capacity, limit = settings["capacity_rollouts"], settings["max_age_steps"]
    # Eviction removes whole units.
    unit_size = stored / max(groups, 1) if settings["unit"] == "query" else 1
    if limit is not None and stored + unit_size > capacity:
        yield (
            f"The buffer is full, at its capacity of {capacity:,} rollouts: they leave it before "
            f"max_age_steps {limit}. Raise replay.capacity_rollouts."
        )
    points = inspection.trends.get("replay/ratio", ())
    ratios = [value for step, value in points if step > warmup]
    recent = ratios[-max(1, len(ratios) // 4) :]
    actual, requested = sum(recent) / max(len(recent), 1), settings["ratio"]
    anchored = settings["composition"] == "fresh_anchored"
    is_below_ratio = anchored and actual < STARVED_SHARE * requested
    is_starved = is_below_ratio or not inspection.replayed_rollouts
    if inspection.step > warmup + 1 and is_starved and counts.get("kept"):
        yield (
            f"Only {actual:.2f} rollouts were replayed per fresh rollout; replay.ratio requests "
            f"{requested:.2f}. The buffer has too few: raise replay.max_age_steps or lower "
            "replay.ratio."
        )
    clipped = {age: row.clip_fraction for age, row in inspection.by_age.items() if age > 0}
    if any(map(math.isnan, clipped.values())):
        yield (
            "It is unknown which tokens were clipped (TRL's use_bias_correction_kl gives every "
            "token a gradient): see ratio and KL by age, and clip_ratio/region_mean in TRL's log."
        )
    worst = max(clipped, key=lambda age: clipped[age], default=0)
    if clipped and clipped[worst] > HIGH_CLIP_FRACTION:
        are = "would be" if settings["shadow"] else "are"
        yield (
            f"At age {worst}, {clipped[worst]:.1%} of the replayed tokens {are} clipped and have "
            "no gradient: the bias of replay grows with staleness times rate. Lower "
            "optimizer.learning_rate or replay.max_age_steps."
        )
