"""The numbers of a report. Accuracies and rates are fractions.

`low` and `high` are always the quartiles over seeds; `interval` is always a 95 % interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_replay.evaluation.statistics import Interval


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and quartiles over the seeds of the `runs` that have a quantity."""

    mean: float
    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        return cls(float(np.mean(values)), median, low, high, len(values))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A `Spread` with the interval of its mean, and what the interval is over.

    `values` has the value of every run. Fewer than three seeds have no interval.
    """

    mean: float
    median: float
    low: float
    high: float
    values: tuple[float, ...]
    interval: Interval | None
    interval_over: str | None


@dataclass(frozen=True, slots=True)
class Difference(Estimate):
    """The `Estimate` of an arm minus the baseline, paired by seed and problem, with a test over
    seeds.

    `p_value` is None for fewer than two seeds; `smallest_p_value` is what that many seeds can
    give at best.
    """

    seeds: tuple[int, ...]
    seeds_better: int
    p_value: float | None
    smallest_p_value: float


@dataclass(frozen=True, slots=True)
class Reach:
    """The cost to reach an accuracy: median over seeds, and its 95 % interval.

    Infinite where the accuracy was not reached. `interval` is None for fewer than six seeds.
    `ratio` is the median over seeds of this cost over the baseline's, of the `ratio_seeds` in
    which both reached it.
    """

    median: float
    interval: Interval | None
    ratio: float | None
    ratio_seeds: int


@dataclass(frozen=True, slots=True)
class Target:
    """The cost of an arm to reach one accuracy, by axis, and how many of its runs reached it."""

    accuracy: float
    reached: int
    runs: int
    costs: dict[str, Reach]


@dataclass(frozen=True, slots=True)
class Score:
    """One kind of accuracy of an arm, by benchmark and `mean`, and its difference to the baseline
    (None for the baseline itself, and without a common seed)."""

    estimates: dict[str, Estimate]
    difference: dict[str, Difference] | None


@dataclass(frozen=True, slots=True)
class EqualCost:
    """Differences to the baseline, by benchmark and `mean`, when both runs of a seed have spent
    what the cheaper one spent in all. `spent` is over seeds."""

    spent: Spread
    difference: dict[str, Difference]


@dataclass(frozen=True, slots=True)
class ArmFindings:
    """All numbers of one arm. `scores` is empty if it has no finished run.

    `quantities` are spreads over seeds: lengths, clip fractions, tokens, seconds, compute, AES. One
    that no run has is left out. `equal_cost` is by axis, and empty for the baseline and where a run
    has too few evaluations.
    """

    name: str
    seeds: tuple[int, ...]
    runs: int
    missing: dict[int, str]
    settings: dict[str, Any]
    scores: dict[str, Score]
    quantities: dict[str, Spread] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    equal_cost: dict[str, EqualCost] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Findings:
    """All numbers of a report. `shown` is the benchmark, or `mean`, that tables of one number and
    curves are about, and `metric` is `avg_at_k` or `pass_at_k`, that of the curves."""

    name: str
    baseline: str
    benchmarks: tuple[str, ...]
    shown: str
    metric: str
    titles: dict[str, str]
    graded_by: str
    measured_mu: float | None
    given_mu: tuple[float, ...]
    axes: dict[str, str]
    arms: tuple[ArmFindings, ...]
    notes: tuple[str, ...]
    tuned: dict[str, str]
    main: str | None = None  # the axis of tables with one cost
    frontier: tuple[tuple[float, float, str, int], ...] = ()  # cost, outcome, arm, step

    @property
    def cost_title(self) -> str:
        """The label of the main axis; empty without a cost."""
        return self.axes.get(self.main or "", "")

    @property
    def outcome_title(self) -> str:
        """`avg@k, mean over benchmarks`."""
        return f"{self.metric.replace('_at_', '@')}, {self.shown_title}"

    @property
    def shown_title(self) -> str:
        """What is shown, in words: `mean over benchmarks`, or the title of one."""
        if self.shown == "mean" and len(self.benchmarks) > 1:
            return "mean over benchmarks"
        return self.titles.get(self.shown, ", ".join(self.titles.values()))

    def arm(self, name: str) -> ArmFindings:
        return next(arm for arm in self.arms if arm.name == name)
