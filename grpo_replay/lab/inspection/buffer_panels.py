"""The screen of inspect-buffer: a heading, warnings and panels."""

import io
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
    plural,
)
from grpo_replay.storage.atomic import write_text_whole
from grpo_replay.terminal.console import bar, open_console, sparkline

PANEL_WIDTH = 57
_ROWS = 12  # ages shown at most


def print_inspection(inspection: Inspection, console: Console) -> None:
    console.print(_heading(inspection))
    console.print(_verdict(inspection))
    limit = inspection.settings["max_age_steps"]
    ages = ages_panel(inspection.staleness, inspection.by_age, limit)
    found = (_occupancy(inspection), _populations(inspection), ages)
    panels = [panel for panel in found if panel is not None]
    per_row = 2 if console.width >= 2 * PANEL_WIDTH + 1 else 1
    for start in range(0, len(panels), per_row):
        console.print(Columns(panels[start : start + per_row], padding=(0, 1)))
    if inspection.trends:
        width = per_row * PANEL_WIDTH + per_row - 1
        console.print(_trends(inspection, width))


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
        text.append(
            "\nno checkpoint at this step; buffer rebuilt from the rollout log",
            style="dim not bold",
        )
    return text


def describe_settings(inspection: Inspection) -> str:
    """The replay settings in one line."""
    settings = inspection.settings
    if not inspection.replays:
        return f"preset {settings['preset']}: this recipe does not replay"
    age = settings["max_age_steps"]
    priority = settings["priority"].replace("abs_advantage", "|advantage|")
    law = priority if priority == "uniform" else f"{priority}^{settings['priority_exponent']:g}"
    return (
        f"preset {settings['preset']}: {plural(settings['unit'])}, {law}, "
        f"{settings['composition']} · "
        f"ratio {settings['ratio']:g} · max age {'none' if age is None else age} · warm-up "
        f"{settings['warmup_steps']} · capacity {settings['capacity_rollouts']:,}"
    )


def _verdict(inspection: Inspection) -> Text:
    if not inspection.warnings:
        return Text("✓ no warnings", style="green")
    return Text("\n".join(f"! {warning}" for warning in inspection.warnings), style="yellow")


def _panel(title: str, body: RenderableType, width: int = PANEL_WIDTH) -> Panel:
    return Panel(
        body, title=title, title_align="left", width=width, box=box.ROUNDED, border_style="dim"
    )


def _occupancy(inspection: Inspection) -> Panel | None:
    occupancy = inspection.occupancy
    if not inspection.replays:
        return None
    lines: list[RenderableType] = []
    stored, capacity = occupancy.stored_rollouts, occupancy.capacity_rollouts
    if capacity:
        lines.append(_level(stored, capacity, f"of capacity {capacity:,}"))
    if occupancy.expected_rollouts and inspection.settings["max_age_steps"] is not None:
        rule = f"of {_expected_rule(inspection)} ≈ {occupancy.expected_rollouts:,.0f}"
        lines.append(_level(stored, occupancy.expected_rollouts, rule))
    facts = [f"{occupancy.stored_groups:,} groups · {occupancy.stored_tokens:,} completion tokens"]
    if occupancy.survivors_per_step is not None:
        facts.append(f"B' ≈ {occupancy.survivors_per_step:.1f} survivors per step")
    if occupancy.evicted_by_age is not None:
        by_capacity = f"{occupancy.evicted_by_capacity:,} by capacity"
        facts.append(f"evicted so far: {occupancy.evicted_by_age:,} by age, {by_capacity}")
    if (run := inspection.uses_over_run) is not None:
        never = f"{run.never_share:.1%} never"
        facts.append(f"uses of a survivor: {run.mean:.2f} so far, {never} used")
    lines += [Text("\n".join(facts), style="dim"), _law_text(inspection)]
    return _panel(f"occupancy: {stored:,} rollouts stored now", Group(*lines))


def _expected_rule(inspection: Inspection) -> str:
    """What limits the stored rollouts at this step, as a formula of `Occupancy`."""
    if inspection.occupancy.expected_rollouts == inspection.occupancy.capacity_rollouts:
        return "the capacity"
    early = inspection.step < inspection.settings["max_age_steps"]
    return f"{inspection.step}·B'" if early else "τ_max·B'"


def _level(value: float, limit: float, label: str) -> Text:
    text = Text(bar(value, limit, 20).ljust(20, "░"), style=_COLOURS["stored"])
    text.append(f" {value / limit:6.1%} {label}", style="default")
    return text


def _law_text(inspection: Inspection) -> Text:
    law = inspection.draw_law
    if law.units == 0:
        return Text("nothing to draw from", style="dim")
    return Text(
        f"next draw: ESS {law.effective_sample_size:,.1f} of {law.units:,} {plural(law.unit)} "
        f"({law.effective_sample_size / law.units:.0%})\n"
        f"  largest P {law.largest_probability:.2%}"
    )


def _populations(inspection: Inspection) -> Panel | None:
    if not inspection.populations:
        return None
    table = panel_table()
    table.add_column("")
    for rows in inspection.populations:
        table.add_column(rows.name, justify="right", style=_COLOURS.get(rows.name, ""))
    lines = (
        ("rollouts", lambda p: f"{p.rollouts:,}"),
        ("prompts", lambda p: f"{p.prompts:,}"),
        ("top prompt's share", lambda p: f"{p.largest_prompt_share:.1%}"),
        ("A > 0", lambda p: _number_or_dash(p.positive_share, ".1%")),
        ("mean |advantage|", lambda p: _number_or_dash(p.abs_advantage_mean, ".2f")),
        ("tokens, mean", lambda p: f"{p.tokens_mean:,.0f}"),
        ("truncated", lambda p: f"{p.truncated_share:.1%}"),
    )
    for label, cell in lines:
        table.add_row(label, *(cell(rows) for rows in inspection.populations))
    return _panel("populations", table)


def _number_or_dash(value: float | None, format_spec: str) -> str:
    return "–" if value is None else format(value, format_spec)


def ages_panel(
    staleness: Sequence[StalenessRow],
    by_age: Mapping[int, AgeOutcome],
    limit: int | None = None,
) -> Panel | None:
    """For each age: what is stored now, all replays so far, and their outcomes, those of fresh
    rollouts at age 0; None if nothing was stored or replayed. `limit` is the age in steps at
    which rollouts are evicted."""
    if not staleness:
        return None
    table = panel_table()
    headings = ("age", "stored now", "all replays", "clipped", "ratio", "KL, nats")
    for name in headings if by_age else headings[:3]:
        table.add_column(name, justify="right", style=_COLOURS.get(name.split()[0], ""))
    places = np.linspace(0, len(staleness) - 1, min(len(staleness), _ROWS)).round().astype(int)
    for row in (staleness[place] for place in places):
        cells = [str(row.age), f"{row.stored:,}", f"{row.replayed:,}"]
        if (outcome := by_age.get(row.age)) is not None:
            cells += [f"{outcome.clip_fraction:.2%}", f"{outcome.ratio:.4f}"]
            cells.append(f"{outcome.approx_kl:.4f}")
        table.add_row(*cells)
    notes = ["age 0: outcomes of fresh rollouts"] if 0 in by_age else []
    if len(places) < len(staleness):
        notes.append(f"{len(places)} of {len(staleness)} ages; --json has all")
    unit = "steps" if staleness[0].age_updates is None else "updates"
    if limit is not None and unit == "steps":
        notes.append(f"age {limit}: the last draw, then the eviction")
    table.caption = "\n".join(notes)
    table.caption_justify = "left"
    means = [
        f"mean {sum(row.age * count for row, count in counts) / total:.1f} {name}"
        for name, counts in (
            ("stored", [(row, row.stored) for row in staleness]),
            ("replayed", [(row, row.replayed) for row in staleness]),
        )
        if (total := sum(count for _, count in counts))
    ]
    return _panel(f"age in {unit}: {', '.join(means)}", table)


def _trends(inspection: Inspection, width: int) -> Panel:
    """One line per metric: its means over the first and the last eighth of the steps, and a
    sparkline between them."""
    eighth = max(1, inspection.step // 8)
    table = panel_table()
    for name in ("", f"first {eighth}", "", f"last {eighth}"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for metric, points in inspection.trends.items():
        first = [value for step, value in points if step <= eighth]
        last = [value for step, value in points if step > inspection.step - eighth]
        course = sparkline([value for _, value in points], max(12, width - 52))
        table.add_row(TREND_LABELS[metric], _mean(first), Text(course, style="cyan"), _mean(last))
    steps = "step" if eighth == 1 else "steps"
    return _panel(f"over training: means of the first and the last {eighth} {steps}", table, width)


def _mean(values: Sequence[float]) -> str:
    return _short(sum(values) / len(values)) if values else "–"


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.2g}"


_COLOURS = {"stored": "blue", "replayed": "dark_orange", "all": "dark_orange"}


def panel_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
