"""An inspection: its data types, which `compute` fills and panels, figures, page and JSON show; and
warnings about an unhealthy buffer.

Ages are in training steps; "replayed" counts rows of the draw log up to the inspected step. With
the pool composition, draws at age 0 count as fresh, not as replayed. The thresholds of warnings are
rules of thumb (docs/buffer.md, "Healthy ranges").
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_replay.recipe import ReplaySection


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The size of the buffer, with its limits."""

    stored_rollouts: int
    capacity_rollouts: int | None  # None: a run without replay settings
    stored_groups: int
    stored_tokens: int  # completion tokens
    survivors_per_step: float | None  # B': mean over the last τ_max steps; None without a log
    expected_rollouts: int | None  # min(capacity, survivors of the last τ_max steps)
    evicted_by_age: int | None
    evicted_by_capacity: int | None


@dataclass(frozen=True, slots=True)
class StalenessRow:
    """Rollouts of one age: in updates, where a step draws for each of its updates."""

    age_steps: int
    stored: int
    replayed: int
    age_updates: int | None = None

    @property
    def age(self) -> int:
        return self.age_steps if self.age_updates is None else self.age_updates


@dataclass(frozen=True, slots=True)
class Bin:
    """Counts of values in [low, high), or of the single value `low` if low equals high. The last
    bin of a histogram includes `high`. `kept` counts all survivors of the run."""

    low: float
    high: float
    kept: int
    replayed: int


@dataclass(frozen=True, slots=True)
class LastUse:
    """Draws by steps, or updates, since the previous use of the rollout (paper B); 0 if drawn twice
    in one batch. `new` counts first uses. Training on a rollout at birth is a use."""

    new: int
    gaps: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class RunUses:
    """Survivors of the run by the times that they were trained on, evicted ones included (paper B's
    replay ratio). Training on a rollout at birth is a use."""

    counts: Mapping[int, int]
    mean: float
    never_share: float


@dataclass(frozen=True, slots=True)
class DrawLaw:
    """Distribution of the next draw from the stored rollouts. A unit is a rollout or a query."""

    unit: str
    units: int
    effective_sample_size: float  # 1/ΣP²
    largest_probability: float


@dataclass(frozen=True, slots=True)
class Population:
    """One set of rollouts: generated, kept, stored, or replayed (counted once per use)."""

    name: str
    rollouts: int
    prompts: int
    largest_prompt_share: float
    positive_share: float | None  # with advantage above 0; None where groups were dropped
    abs_advantage_mean: float | None
    tokens_mean: float
    truncated_share: float


@dataclass(frozen=True, slots=True)
class AgeOutcome:
    """Token-weighted outcome of all uses at one age (steps, or updates)."""

    uses: int
    tokens: int
    clip_fraction: float  # share of tokens whose gradient was removed by clipping
    log_ratio_mean: float  # nats, policy minus behaviour
    log_ratio_square: float  # nats², mean square of the log-ratio
    approx_kl: float  # nats per token (k3)

    @property
    def ratio(self) -> float:
        """Geometric mean of the per-token importance ratio."""
        return float(np.exp(self.log_ratio_mean))


@dataclass(frozen=True, slots=True)
class Inspection:
    """All numbers of an inspection. If steps make several draws, one for each of their updates,
    `updates_per_step` is their number, and ages and gaps count updates."""

    path: str
    kind: str
    step: int
    updates_per_step: int
    recipe_name: str | None
    settings: Mapping[str, Any]  # the replay section
    replays: bool
    rebuilt: bool  # the buffer was rebuilt from the rollout log
    occupancy: Occupancy
    staleness: tuple[StalenessRow, ...]
    abs_advantage: tuple[Bin, ...]
    uses_over_run: RunUses | None  # None without a rollout log, or without survivors
    last_use: LastUse | None
    draw_law: DrawLaw
    populations: tuple[Population, ...]
    by_age: Mapping[int, AgeOutcome]
    trends: Mapping[str, tuple[tuple[int, float], ...]]  # metric -> (step, value)
    replayed_rollouts: int
    missing_rewards: int  # rollouts of the log whose reward did not come
    warnings: tuple[str, ...]

    @property
    def age_unit(self) -> str:
        return "steps" if self.updates_per_step == 1 else "updates"


def staleness_rows(
    births: np.ndarray, replayed_ages: np.ndarray, step: int, updates: int = 1
) -> tuple[StalenessRow, ...]:
    """The ages after `step` of the rollouts born in `births`, next to `replayed_ages`: one row per
    age from 0 to the largest; empty if there are no rollouts. Ages are in steps, or, if a step
    counts several `updates`, in these."""
    stored_ages = updates * (step - births) + updates - 1
    if stored_ages.size + replayed_ages.size == 0:
        return ()
    rows = 1 + max(int(ages.max()) for ages in (stored_ages, replayed_ages) if ages.size)
    stored = np.bincount(stored_ages, minlength=rows)
    replayed = np.bincount(replayed_ages, minlength=rows)
    return tuple(
        StalenessRow(
            age // updates, int(stored[age]), int(replayed[age]), age if updates > 1 else None
        )
        for age in range(rows)
    )


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
"""The metrics of a run that an inspection shows over training, with their names on the screen."""


def plural(unit: str) -> str:
    """The plural of a unit of replay: rollouts or queries."""
    return "queries" if unit == "query" else f"{unit}s"


SMALL_ESS_SHARE = 0.10
HIGH_CLIP_FRACTION = 0.10
HIGH_KL_NATS = 0.1
STARVED_SHARE = 0.9
FEW_SURVIVORS_SHARE = 0.1


def find_warnings(inspection: Inspection) -> Iterator[str]:
    """One warning per finding, most important first; nothing for a healthy buffer."""
    yield from _generated(inspection)
    if inspection.replays:
        settings = ReplaySection.model_validate(inspection.settings)
        yield from _capacity(inspection, settings)
        yield from _starved(inspection, settings)
        yield from _draw_law(inspection)
        yield from _outcomes(inspection)


def _generated(inspection: Inspection) -> Iterator[str]:
    counts = {rows.name: rows.rollouts for rows in inspection.populations}
    generated, missing = counts.get("generated", 0), inspection.missing_rewards
    if missing:
        yield (
            f"{missing:,} of {generated:,} generated rollouts ({missing / generated:.1%}) have no "
            "reward: the reward function failed on them, or returned None. They were left out of "
            "their groups. See which: docs/queries.md; log/ has the first error."
        )
    share = counts.get("kept", 0) / generated if generated >= 100 else 1.0
    if share < FEW_SURVIVORS_SHARE:
        yield (
            f"Only {share:.1%} of the generated rollouts are in groups with mixed rewards: most "
            "prompts are too hard or too easy for this model."
        )


def _capacity(inspection: Inspection, settings: ReplaySection) -> Iterator[str]:
    occupancy, capacity = inspection.occupancy, inspection.occupancy.capacity_rollouts
    if settings.max_age_steps is None or capacity is None:
        return
    stored = occupancy.stored_rollouts
    is_query = settings.unit == "query"  # which capacity evicts as a whole
    unit = stored / max(occupancy.stored_groups, 1) if is_query else 1
    if stored + unit > capacity:
        oldest = max((row.age_steps for row in inspection.staleness if row.stored), default=0)
        yield (
            f"The buffer is full, at its capacity of {capacity:,} rollouts: the oldest stored "
            f"rollout is {oldest} steps old, of max_age_steps {settings.max_age_steps}. Raise "
            "replay.capacity_rollouts."
        )


def _starved(inspection: Inspection, settings: ReplaySection) -> Iterator[str]:
    """Fewer rollouts drawn than requested, over the last quarter of the steps after the warm-up."""
    points = inspection.trends.get("replay/ratio", ())
    ratios = [value for step, value in points if step > settings.warmup_steps]
    recent = ratios[-max(1, len(ratios) // 4) :]
    if not recent or inspection.step <= settings.warmup_steps + 1:
        return
    actual = sum(recent) / len(recent)
    if inspection.replayed_rollouts == 0:
        yield (
            f"Nothing was replayed up to step {inspection.step}, although warm-up ended at step "
            f"{settings.warmup_steps}."
        )
    elif settings.anchors_fresh and 0 < actual < STARVED_SHARE * settings.ratio:
        yield (
            f"Only {actual:.2f} rollouts were replayed per fresh rollout; replay.ratio requests "
            f"{settings.ratio:.2f}. The buffer has too few: raise replay.max_age_steps or lower "
            "replay.ratio."
        )


def _draw_law(inspection: Inspection) -> Iterator[str]:
    law = inspection.draw_law
    if law.units >= 20 and law.effective_sample_size < SMALL_ESS_SHARE * law.units:
        yield (
            "The draw is concentrated: its effective sample size is "
            f"{law.effective_sample_size:.0f} of {law.units:,} {plural(law.unit)}, so the same "
            "few are replayed repeatedly. Lower replay.priority_exponent."
        )


def _outcomes(inspection: Inspection) -> Iterator[str]:
    old = [(age, row) for age, row in inspection.by_age.items() if age > 0]
    age, worst = max(old, key=lambda each: each[1].clip_fraction, default=(0, None))
    if worst is not None and worst.clip_fraction > HIGH_CLIP_FRACTION:
        yield (
            f"At age {age}, {worst.clip_fraction:.1%} of the replayed tokens are clipped and have "
            "no gradient. Lower replay.max_age_steps."
        )
    far = [(age, row.approx_kl) for age, row in old if row.approx_kl > HIGH_KL_NATS]
    if far:
        yield (
            f"From age {far[0][0]}, the KL divergence from the policy that sampled the rollouts is "
            f"{far[0][1]:.2f} nats per token, too much for importance ratios. Lower "
            "replay.max_age_steps."
        )
