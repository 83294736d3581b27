"""The screen of inspect-buffer: a heading, warnings and panels."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grpo_replay.lab.inspection.buffer_summary import (
    TREND_LABELS,
    AgeOutcome,
    Inspection,
    StalenessRow,
)
from grpo_replay.storage.atomic import write_text_whole
from grpo_replay.terminal.console import bar, open_console, sparkline

PANEL_WIDTH = 57
_ROWS = 12  # ages shown at most
_COLOURS = {"stored": "blue", "replayed": "dark_orange", "all": "dark_orange"}


def print_inspection(inspection: Inspection, console: Console) -> None:
    console.print(_heading(inspection))
    limit = inspection.settings["max_age_steps"]
    found = [_populations(inspection)] if inspection.populations else []
    if inspection.replays:
        found.insert(0, _occupancy(inspection))
    if inspection.staleness:
        by_age, unit = inspection.by_age, inspection.age_unit
        of_run = any(each.name == "generated" for each in inspection.populations)
        found.append(ages_panel(inspection.staleness, by_age, limit, unit, of_run))
    per_row = 2 if console.width >= 2 * PANEL_WIDTH + 1 else 1
    for start in range(0, len(found), per_row):
        console.print(Columns(found[start : start + per_row], padding=(0, 1)))
    if inspection.trends:
        console.print(_trends(inspection, per_row * PANEL_WIDTH + per_row - 1))


def write_page(inspection: Inspection, path: Path) -> None:
    """The screen as one self-contained HTML page."""
    console = open_console(file=io.StringIO())
    console.record, console.width = True, 2 * PANEL_WIDTH + 1
    print_inspection(inspection, console)
    write_text_whole(path, console.export_html())


def _heading(inspection: Inspection) -> Text:
    name = f" · {inspection.recipe_name}" if inspection.recipe_name else ""
    text = Text(f"{inspection.path}{name} · step {inspection.step}", style="bold")
    text.append(f"\n{describe_settings(inspection)}", style="dim not bold")
    if inspection.rebuilt:
        note = "no checkpoint at this step; buffer rebuilt from the rollout log"
        text.append(f"\n{note}", style="dim not bold")
    warnings = "".join(f"\n! {warning}" for warning in inspection.warnings)
    good, bad = "green not bold", "yellow not bold"
    return text.append(warnings or "\n✓ no warnings", style=bad if warnings else good)


def describe_settings(inspection: Inspection) -> str:
    """The replay settings in one line."""
    settings = inspection.settings
    if not inspection.replays:
        return f"preset {settings['preset']}: this recipe does not replay"
    law, age = settings["priority"], settings["max_age_steps"]
    if law != "uniform":
        law = f"{law}^{settings['priority_exponent']:g}"
    shadow = "in shadow, nothing drawn was trained on · " if settings["shadow"] else ""
    return (
        f"{shadow}{settings['preset']}: {settings['composition']}, {settings['unit']} by {law} · "
        f"ratio {settings['ratio']:g} · max age {'none' if age is None else age} · "
        f"warm-up {settings['warmup_steps']} · capacity {settings['capacity_rollouts']:,}"
    )


def _panel(title: str, body: RenderableType, width: int = PANEL_WIDTH) -> Panel:
    return Panel(
        body, title=title, title_align="left", width=width, box=box.ROUNDED, border_style="dim"
    )


def _occupancy(inspection: Inspection) -> Panel:
    occupancy, limit = inspection.occupancy, inspection.settings["max_age_steps"]
    stored, capacity = occupancy.stored_rollouts, inspection.settings["capacity_rollouts"]
    lines = [_level(stored, capacity, f"of capacity {capacity:,}")]
    expected = occupancy.expected_rollouts
    if expected and limit is not None and expected < capacity:
        steps = min(limit, inspection.step)
        lines.append(_level(stored, expected, f"of {expected:,} kept in {steps} steps"))
    facts = [f"{occupancy.stored_groups:,} groups · {occupancy.stored_tokens:,} completion tokens"]
    if occupancy.survivors_per_step is not None:
        facts.append(f"in these {occupancy.survivors_per_step:.1f} rollouts kept per step")
    if survivors := sum(inspection.uses_over_run.values()):
        uses = sum(number * count for number, count in inspection.uses_over_run.items())
        never = inspection.uses_over_run.get(0, 0) / survivors
        facts.append(f"uses of a kept rollout, fresh included: {uses / survivors:.2f} so far")
        facts.append(f"never used: {never:.1%}")
    body = Group(*lines, Text("\n".join(facts), style="dim"))
    return _panel(f"occupancy: {stored:,} rollouts stored now", body)


def _level(value: float, limit: float, label: str) -> Text:
    text = Text(bar(value, limit, 20).ljust(20, "░"), style=_COLOURS["stored"])
    return text.append(f" {value / limit:6.1%} {label}", style="default")


def _table(*names: str) -> Table:
    """Numbers to the right; the first column, if it has no name, is of names."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in names:
        style = _COLOURS.get(name.partition(" ")[0], "")
        table.add_column(name, justify="right" if name else "left", style=style, no_wrap=True)
    return table


def _populations(inspection: Inspection) -> Panel:
    found = inspection.populations
    table = _table("", *(rows.name for rows in found))
    lines = (
        ("rollouts", "rollouts", ",.0f"),
        ("prompts", "prompts", ",.0f"),
        ("top prompt's share", "largest_prompt_share", ".1%"),
        ("A > 0", "positive_share", ".1%"),
        ("mean |advantage|", "abs_advantage_mean", ".2f"),
        ("tokens, mean", "tokens_mean", ",.0f"),
        ("truncated", "truncated_share", ".1%"),
    )
    for label, name, format_spec in lines:
        values = [getattr(rows, name) for rows in found]
        table.add_row(label, *("–" if each is None else f"{each:{format_spec}}" for each in values))
    return _panel("populations", table)


def ages_panel(
    staleness: Sequence[StalenessRow],
    by_age: Mapping[int, AgeOutcome],
    limit: int | None = None,
    unit: str = "steps",
    of_run: bool = True,
) -> Panel:
    """For each age: what is stored now, all replays so far (unless the snapshot is not seen as one
    `of_run`), and their outcomes, those of fresh rollouts at age 0. `limit` is the age in steps at
    which rollouts are evicted."""
    headings = ("age", "stored now", "replays", "clipped", "ratio", "ESS", "KL")
    table = _table(*(headings if by_age else headings[: 2 + of_run]))
    places = np.linspace(0, len(staleness) - 1, min(len(staleness), _ROWS)).round().astype(int)
    for row in (staleness[place] for place in places):
        cells = [str(row.age), f"{row.stored:,}", f"{row.replayed:,}"][: 2 + of_run]
        if (outcome := by_age.get(row.age)) is not None:
            clipped = outcome.clip_fraction
            cells += ["–" if math.isnan(clipped) else f"{clipped:.2%}", f"{outcome.ratio:.4f}"]
            cells += [f"{outcome.ratio_ess:.3f}", f"{outcome.approx_kl:.4f}"]
        table.add_row(*cells)
    notes = ["replays: of the whole run"] if of_run else []
    if by_age:
        notes = ["replays: of the whole run; KL in nats"]
        notes.append("ESS: effective share of tokens weighed by ratio")
    if 0 in by_age:
        notes.append("age 0: outcomes of fresh rollouts")
    if len(places) < len(staleness):
        notes.append(f"{len(places)} of {len(staleness)} ages; --json has all")
    if limit is not None and unit == "steps":
        notes.append(f"age {limit}: the last draw, then the eviction")
    table.caption, table.caption_justify = "\n".join(notes), "left"
    means = [
        f"mean {sum(row.age * getattr(row, name) for row in staleness) / total:.1f} {name}"
        for name in ("stored", "replayed")
        if (total := sum(getattr(row, name) for row in staleness))
    ]
    return _panel(f"age in {unit}: {', '.join(means)}", table)


def _trends(inspection: Inspection, width: int) -> Panel:
    """One line per metric: its means over the first and the last eighth of the steps, and a
    sparkline between them."""
    eighth = max(1, inspection.step // 8)
    table = _table("", f"first {eighth}", " ", f"last {eighth}")
    for metric, points in inspection.trends.items():
        first = [value for step, value in points if step <= eighth]
        last = [value for step, value in points if step > inspection.step - eighth]
        course = sparkline([value for _, value in points], max(12, width - 52))
        table.add_row(TREND_LABELS[metric], _mean(first), Text(course, style="cyan"), _mean(last))
    steps = "step" if eighth == 1 else "steps"
    return _panel(f"over training: means of the first and the last {eighth} {steps}", table, width)


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "–"
    value = sum(values) / len(values)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
