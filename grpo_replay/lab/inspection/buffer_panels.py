"""The screen of inspect-buffer: a heading with warnings, the staleness, and panels."""

from collections.abc import Sequence

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grpo_replay.lab.inspection.buffer_summary import Inspection
from grpo_replay.lab.inspection.buffer_tables import (
    age_bins,
    describe_settings,
    occupancy_facts,
    outcomes_table,
    populations_table,
    staleness_legend,
    staleness_title,
    title_of,
    trends_header,
    trends_of,
    trends_title,
)
from grpo_replay.terminal.console import bar, sparkline
from grpo_replay.terminal.text_table import TextTable

NARROWEST, WIDEST = 80, 120
"""Columns of the screen: those of the terminal, within these bounds."""

TWO_PANELS = 116
"""Columns from which two panels stand side by side."""

_COLOURS = {"stored": "blue", "replayed": "dark_orange"}


def print_inspection(inspection: Inspection, console: Console) -> None:
    """The screen, as wide as the console, from 80 to 120 columns."""
    whole = min(WIDEST, max(NARROWEST, console.width))
    width = (whole - 1) // 2 if whole >= TWO_PANELS else whole
    console.print(_heading(inspection))
    if inspection.staleness:
        console.print(_staleness(inspection, whole))
    found = [_occupancy(inspection, width)] if inspection.replays else []
    if inspection.populations:
        found.append(_table_panel(populations_table(inspection), width))
    if any(age > 0 for age in inspection.by_age):
        found.append(_table_panel(outcomes_table(inspection), width))
    per_row = 1 if width == whole else 2
    for start in range(0, len(found), per_row):
        console.print(Columns(found[start : start + per_row], padding=(0, 1)))
    if inspection.trends:
        console.print(_trends(inspection, whole))


def _heading(inspection: Inspection) -> Text:
    text = Text(title_of(inspection), style="bold")
    text.append(f"\n{describe_settings(inspection)}", style="dim not bold")
    if inspection.rebuilt:
        note = "no checkpoint at this step; buffer rebuilt from the rollout log"
        text.append(f"\n{note}", style="dim not bold")
    warnings = "".join(f"\n! {warning}" for warning in inspection.warnings)
    good, bad = "green not bold", "yellow not bold"
    return text.append(warnings or "\n✓ no warnings", style=bad if warnings else good)


def _panel(title: str, body: RenderableType, width: int) -> Panel:
    return Panel(
        body, title=title, title_align="left", width=width, box=box.ROUNDED, border_style="dim"
    )


def _staleness(inspection: Inspection, width: int) -> Panel:
    """Bars of what is stored and of all replays by age, as shares of each."""
    bins = age_bins(inspection.staleness)
    shown = {
        "stored now": ("stored", [each.stored for each in bins]),
        "replayed": ("replayed", [each.replayed for each in bins]),
    }
    shown = {heading: each for heading, each in shown.items() if sum(each[1])}
    counts = {name: max(len(f"{max(values):,}"), 5) for name, values in shown.values()}
    ages = max(3, *(len(each.label) for each in bins))
    # Two spaces of the border on each side, one between columns.
    cells = (width - 4 - ages - sum(1 + digits + 8 for digits in counts.values())) // len(shown)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("age", justify="right", no_wrap=True)
    for heading in shown:
        table.add_column(heading, no_wrap=True, width=cells)
        table.add_column("", justify="right", no_wrap=True, width=counts[shown[heading][0]])
        table.add_column("", justify="right", no_wrap=True, width=5)
    for place, each in enumerate(bins):
        row: list[str | Text] = [each.label]
        for name, values in shown.values():
            share = values[place] / sum(values)
            drawn = bar(values[place], max(values), cells)
            row += [Text(drawn, style=_COLOURS[name]), f"{values[place]:,}"]
            row.append(f"{share:.0%}" if share else "")
        table.add_row(*row)
    return _with_legend(staleness_title(inspection), table, [*staleness_legend(inspection)], width)


def _with_legend(title: str, table: Table, legend: Sequence[str], width: int) -> Panel:
    lines = [Text(line, style="dim") for line in legend]
    return _panel(title, Group(table, *lines), width)


def _occupancy(inspection: Inspection, width: int) -> Panel:
    """Shares with bars, then facts."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in occupancy_facts(inspection):
        share = float(value.rstrip("%")) if name.startswith("of ") else None
        level = "" if share is None else bar(share, 100, 10).ljust(10, "░")
        table.add_row(name, value, Text(level, style=_COLOURS["stored"]))
    return _panel("occupancy", table, width)


def _table_panel(table: TextTable, width: int) -> Panel:
    legend = [table.legend] if table.legend else []
    return _with_legend(table.title, table.drawn(in_panel=True), legend, width)


def _trends(inspection: Inspection, width: int) -> Panel:
    """One line per metric, with a sparkline between its first and last means."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in trends_header(inspection):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for trend in trends_of(inspection):
        course = Text(sparkline(trend.values, max(12, width - 52)), style="cyan")
        table.add_row(trend.label, trend.first, course, trend.last)
    return _panel(trends_title(inspection), table, width)
