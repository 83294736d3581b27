"""A table as text, and how numbers are written in it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_replay.evaluation.results import Interval
from grpo_replay.lab.report.report_findings import ArmFindings
from grpo_replay.lab.report.two_level import FEWEST_SEEDS

MISSING = "–"


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text. `brief` tables are those that the terminal shows."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str
    brief: bool = True


def amount(value: float | None) -> str:
    """A count or a cost in at most six characters."""
    if value is None:
        return MISSING
    if math.isinf(value):
        return "∞"
    rounded = abs(float(f"{value:.3g}"))
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rounded >= size:
            return f"{_three_digits(value / size)}{unit}"
    if abs(value) >= 1e4:
        return f"{_three_digits(value / 1e3)}k"
    return f"{value:,.0f}" if abs(value) >= 100 else _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{value:#.3g}".removesuffix(".")


def seeds_of(arm: ArmFindings) -> str:
    """`8`, or `7 of 8` if seeds are missing; empty for evaluation files."""
    if not arm.seeds and not arm.missing:
        return ""
    known = len(arm.seeds)
    return f"{known} of {known + len(arm.missing)}" if arm.missing else str(known)


def points(value: float) -> str:
    return f"{100 * value:+.1f}"


def seed_values(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The values of one or two seeds, which have no interval; `MISSING` for more."""
    return ", ".join(map(form, values)) if len(values) < FEWEST_SEEDS else MISSING


def points_interval(bounds: Interval | None) -> str:
    return MISSING if bounds is None else f"[{100 * bounds[0]:+.1f}, {100 * bounds[1]:+.1f}]"
