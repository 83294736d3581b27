"""Text tables of an inspection, for the terminal and the page. A legend explains only the columns
that its table has."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_replay.lab.inspection.buffer_summary import TREND_LABELS, Inspection, StalenessRow
from grpo_replay.terminal.text_table import TextTable

MOST_ROWS = 12
"""Maximum number of rows by age."""

MISSING = "–"


@dataclass(frozen=True, slots=True)
class Trend:
    """A metric over training: its values, and its means over the first and last eighth of the
    steps. If the last eighth has none, `last` is the last value measured, with its step."""

    label: str
    first: str
    values: tuple[float, ...]
    last: str


def title_of(inspection: Inspection) -> str:
    name = f" · {inspection.recipe_name}" if inspection.recipe_name else ""
    return f"{inspection.path}{name} · step {inspection.step}"


def describe_settings(inspection: Inspection) -> str:
    """Describe the replay settings in one line."""
    settings = inspection.settings
    if not inspection.replays:
        return f"preset {settings['preset']}: this recipe does not replay"
    priority, age = settings["priority"], settings["max_age_steps"]
    if priority != "uniform":
        priority = f"{priority}^{settings['priority_exponent']:g}"
    shadow = "in shadow, nothing drawn was trained on · " if settings["shadow"] else ""
    return (
        f"{shadow}{settings['preset']}: {settings['composition']}, {settings['unit']} by "
        f"{priority} · ratio {settings['ratio']:g} · max age {'none' if age is None else age} · "
        f"warm-up {settings['warmup_steps']} · capacity {settings['capacity_rollouts']:,}"
    )


@dataclass(frozen=True, slots=True)
class AgeBin:
    """Numbers of rollouts of one age, or of a range of ages (`4–7`)."""

    label: str
    stored: int
    replayed: int


def age_bins(staleness: Sequence[StalenessRow]) -> tuple[AgeBin, ...]:
    """Count by age, or by ranges of ages if there are more than `MOST_ROWS` of them."""
    width = max(1, -(-len(staleness) // MOST_ROWS))
    bins = []
    for start in range(0, len(staleness), width):
        rows = staleness[start : start + width]
        last = "" if len(rows) == 1 else f"–{rows[-1].age}"
        stored, replayed = sum(row.stored for row in rows), sum(row.replayed for row in rows)
        bins.append(AgeBin(f"{start}{last}", stored, replayed))
    return tuple(bins)


def staleness_title(inspection: Inspection) -> str:
    """Return the title of the staleness panel, with mean ages of stored and replayed rollouts."""
    means = [
        f"mean {sum(row.age * getattr(row, name) for row in inspection.staleness) / total:.1f} "
        f"{name}"
        for name in ("stored", "replayed")
        if (total := sum(getattr(row, name) for row in inspection.staleness))
    ]
    return f"staleness: age in {inspection.age_unit}, {', '.join(means)}"


def staleness_legend(inspection: Inspection) -> Iterator[str]:
    limit = inspection.settings["max_age_steps"]
    if inspection.replayed_rollouts:
        yield "replayed: of the whole run"
    if inspection.replays and limit is not None and inspection.age_unit == "steps":
        yield f"age {limit}: the last draw, then the eviction"


def occupancy_facts(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the names and values of facts on how full the buffer is, and how often it was used."""
    occupancy, limit = inspection.occupancy, inspection.settings["max_age_steps"]
    stored, capacity = occupancy.stored_rollouts, inspection.settings["capacity_rollouts"]
    yield "rollouts stored", f"{stored:,}"
    yield f"of capacity {capacity:,}", f"{stored / capacity:.1%}"
    expected = occupancy.expected_rollouts
    if expected and limit is not None and expected < capacity:
        steps = min(limit, inspection.step)
        yield f"of {expected:,} kept in {steps} steps", f"{stored / expected:.1%}"
    yield "groups stored", f"{occupancy.stored_groups:,}"
    yield "completion tokens stored", f"{occupancy.stored_tokens:,}"
    if occupancy.survivors_per_step is not None:
        yield "rollouts kept per step", f"{occupancy.survivors_per_step:.1f}"
    if survivors := sum(inspection.uses_over_run.values()):
        uses = sum(number * count for number, count in inspection.uses_over_run.items())
        never = inspection.uses_over_run.get(0, 0) / survivors
        drawn = "shadow draws" if inspection.settings["shadow"] else "draws"
        yield f"uses as fresh and {drawn}, mean", f"{uses / survivors:.2f}"
        yield "kept, neither fresh nor drawn", f"{never:.1%}"


_POPULATION = (
    ("rollouts", "rollouts", ",.0f"),
    ("prompts", "prompts", ",.0f"),
    ("top prompt's share", "largest_prompt_share", ".1%"),
    ("A > 0", "positive_share", ".1%"),
    ("mean |advantage|", "abs_advantage_mean", ".2f"),
    ("tokens, mean", "tokens_mean", ",.0f"),
    ("truncated", "truncated_share", ".1%"),
)


def populations_table(inspection: Inspection) -> TextTable:
    """Make the table of generated, kept, stored and replayed rollouts, one column each."""
    populations = inspection.populations
    rows = []
    for label, name, spec in _POPULATION:
        values = [getattr(population, name) for population in populations]
        cells = (MISSING if value is None else f"{value:{spec}}" for value in values)
        rows.append((label, *cells))
    header = ("", *(population.name for population in populations))
    return TextTable(header, rows, "populations")


def outcomes_table(inspection: Inspection) -> TextTable:
    """Make the table of outcomes by age at use, of at most `MOST_ROWS` ages spread evenly."""
    by_age = inspection.by_age
    ages = sorted(by_age)
    shown = np.linspace(0, len(ages) - 1, min(len(ages), MOST_ROWS)).round().astype(int)
    rows = []
    for age in (ages[index] for index in shown):
        outcome = by_age[age]
        clip_fraction = outcome.clip_fraction
        clipped = MISSING if math.isnan(clip_fraction) else f"{clip_fraction:.2%}"
        numbers = (f"{outcome.ratio:.4f}", f"{outcome.ratio_ess:.3f}", f"{outcome.approx_kl:.4f}")
        rows.append((str(age), f"{outcome.uses:,}", clipped, *numbers))
    legend = ["clipped: tokens without a gradient; KL in nats per token"]
    legend.append("ESS: effective share of tokens weighed by ratio")
    if 0 in by_age:
        legend.append("age 0: fresh rollouts")
    if len(shown) < len(ages):
        legend.append(f"{len(shown)} of {len(ages)} ages; --json has all")
    header = ("age", "uses", "clipped", "ratio", "ESS", "KL")
    title = f"outcomes by age at use, in {inspection.age_unit}"
    return TextTable(header, rows, title, " · ".join(legend))


def trends_title(inspection: Inspection) -> str:
    eighth = _eighth(inspection)
    return f"over training: means of the first and the last {eighth} {_steps(eighth)}"


def trends_of(inspection: Inspection) -> tuple[Trend, ...]:
    """Summarise every metric over training: means of the first and last eighth of the steps."""
    eighth, trends = _eighth(inspection), []
    for metric, points in inspection.trends.items():
        first = [value for step, value in points if step <= eighth]
        last = [value for step, value in points if step > inspection.step - eighth]
        values = tuple(value for _, value in points)
        last_step, last_value = points[-1]
        ending = _mean(last) if last else f"{_mean([last_value])} (step {last_step})"
        trends.append(Trend(TREND_LABELS[metric], _mean(first), values, ending))
    return tuple(trends)


def trends_header(inspection: Inspection) -> tuple[str, str, str, str]:
    eighth = _eighth(inspection)
    return "", f"first {eighth}", " ", f"last {eighth}"


def _eighth(inspection: Inspection) -> int:
    return max(1, inspection.step // 8)


def _steps(count: int) -> str:
    return "step" if count == 1 else "steps"


def _mean(values: Sequence[float]) -> str:
    if not values:
        return MISSING
    value = sum(values) / len(values)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
