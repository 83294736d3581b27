"""Data types of an inspection. `compute` fills them; panels, figures, page and JSON show them.

Ages are in training steps; "replayed" counts rows of the draw log up to the inspected step. With
the pool composition, draws at age 0 count as fresh, not as replayed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_replay.lab.inspection.ageing import AgeOutcome


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The size of the buffer, with its limits."""

    stored_rollouts: int
    capacity_rollouts: int | None  # None: a run without replay settings
    stored_groups: int
    stored_tokens: int  # completion tokens
    survivors_per_step: float | None  # B': mean over the last τ_max steps; None without a log
    expected_rollouts: float | None  # min(capacity, τ_max·B'); None if unknown
    evicted_by_age: int | None
    evicted_by_capacity: int | None
    limits: tuple[tuple[int, int], ...]
    """(step, min(capacity, survivors of the last τ_max steps)); empty without a log or τ_max."""


@dataclass(frozen=True, slots=True)
class StalenessRow:
    age_steps: int
    stored: int
    replayed: int


@dataclass(frozen=True, slots=True)
class Bin:
    """Counts of values in [low, high), or of the single value `low` if low equals high. The last
    bin of a histogram includes `high`. `kept` counts all survivors of the run."""

    low: float
    high: float
    kept: int
    stored: int
    replayed: int


@dataclass(frozen=True, slots=True)
class CountRow:
    """Number of rollouts with a value: a number of uses, or a gap in training steps."""

    value: int
    rollouts: int


@dataclass(frozen=True, slots=True)
class LastUse:
    """Training steps since the previous use (paper B); 0 if drawn twice in one batch. `new` counts
    first uses. Training on a rollout at birth is a use."""

    new: int
    gaps: tuple[CountRow, ...]


@dataclass(frozen=True, slots=True)
class RunUses:
    """Number of times each survivor of the run was trained on, evicted ones included (paper B's
    replay ratio). Training on a rollout at birth is a use."""

    counts: tuple[CountRow, ...]
    mean: float

    @property
    def never_share(self) -> float:
        """Share of survivors that were never trained on."""
        never = sum(row.rollouts for row in self.counts if row.value == 0)
        return never / sum(row.rollouts for row in self.counts)


@dataclass(frozen=True, slots=True)
class Quantiles:
    minimum: float
    quarter: float
    median: float
    three_quarters: float
    maximum: float
    mean: float


@dataclass(frozen=True, slots=True)
class DrawLaw:
    """Distribution of the next draw from the stored rollouts. A unit is a rollout or a query."""

    unit: str
    units: int
    effective_sample_size: float  # 1/ΣP²
    entropy_nats: float  # -ΣP ln P
    largest_probability: float


@dataclass(frozen=True, slots=True)
class Population:
    """One set of rollouts: generated, kept, stored, or replayed (counted once per use)."""

    name: str
    rollouts: int
    prompts: int
    largest_prompt: str
    largest_prompt_share: float
    correct_share: float | None  # None where groups were dropped
    abs_advantage_mean: float | None
    tokens_mean: float
    tokens_median: float
    tokens_p95: float
    truncated_share: float


@dataclass(frozen=True, slots=True)
class Inspection:
    """All numbers of an inspection."""

    path: str
    kind: str
    step: int
    recipe_name: str | None
    settings: Mapping[str, Any]  # the replay section
    replays: bool
    rebuilt: bool  # the buffer was rebuilt from the rollout log
    occupancy: Occupancy
    staleness: tuple[StalenessRow, ...]
    abs_advantage: tuple[Bin, ...]
    priority: Quantiles | None
    times_used: tuple[CountRow, ...]
    uses_over_run: RunUses | None  # None without a rollout log, or without survivors
    last_use: LastUse | None
    draw_law: DrawLaw
    populations: tuple[Population, ...]
    by_age: Mapping[int, AgeOutcome]
    trends: Mapping[str, tuple[tuple[int, float], ...]]  # metric -> (step, value)
    replayed_rollouts: int
    missing_rewards: int  # rollouts of the log whose reward did not come
    trained_tokens_per_generated: float | None
    warnings: tuple[str, ...]


def plural(unit: str) -> str:
    """The plural of a unit of replay: rollouts or queries."""
    return "queries" if unit == "query" else f"{unit}s"


def first_and_last(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Mean value of the first eighth and of the last eighth of a (step, value) series."""
    values = [value for _, value in points]
    eighth = max(1, len(values) // 8)
    return sum(values[:eighth]) / eighth, sum(values[-eighth:]) / eighth
