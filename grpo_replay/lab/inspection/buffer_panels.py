"""The terminal output of inspect-buffer: a heading with warnings, and panels."""

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
"""Bounds of the output's width, in columns; between them it is that of the terminal."""

TWO_PANELS = 116
"""Minimum width, in columns, for two panels next to each other."""

_COLOURS = {"stored": "blue", "replayed": "dark_orange"}


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Print an inspection as wide as the console, within `NARROWEST` and `WIDEST`: heading, panels
    that have data (two side by side if it is wide), and trends."""
    whole = min(WIDEST, max(NARROWEST, console.width))
    width = (whole - 1) // 2 if whole >= TWO_PANELS else whole
    console.print(_heading(inspection))
    if inspection.staleness:
        console.print(_staleness(inspection, whole))
    panels = [_occupancy(inspection, width)] if inspection.replays else []
    if inspection.populations:
        panels.append(_table_panel(populations_table(inspection), width))
    if any(age > 0 for age in inspection.by_age):
        panels.append(_table_panel(outcomes_table(inspection), width))
    per_row = 1 if width == whole else 2
    for start in range(0, len(panels), per_row):
        console.print(Columns(panels[start : start + per_row], padding=(0, 1)))
    if inspection.trends:
        console.print(_trends(inspection, whole))


def _heading(inspection: Inspection) -> Text:
    """Make the heading: title, settings, whether the buffer was rebuilt, and warnings."""
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
    """Draw bars of stored and of replayed rollouts by age, with each age's share of its column."""
    bins = age_bins(inspection.staleness)
    series = {
        "stored now": ("stored", [age_bin.stored for age_bin in bins]),
        "replayed": ("replayed", [age_bin.replayed for age_bin in bins]),
    }
    series = {heading: column for heading, column in series.items() if sum(column[1])}
    counts = {name: max(len(f"{max(values):,}"), 5) for name, values in series.values()}
    ages = max(3, *(len(age_bin.label) for age_bin in bins))
    # Two spaces of the border on each side, one between columns.
    cells = (width - 4 - ages - sum(1 + digits + 8 for digits in counts.values())) // len(series)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("age", justify="right", no_wrap=True)
    for heading in series:
        table.add_column(heading, no_wrap=True, width=cells)
        table.add_column("", justify="right", no_wrap=True, width=counts[series[heading][0]])
        table.add_column("", justify="right", no_wrap=True, width=5)
    for index, age_bin in enumerate(bins):
        row: list[str | Text] = [age_bin.label]
        for name, values in series.values():
            share = values[index] / sum(values)
            drawn = bar(values[index], max(values), cells)
            row += [Text(drawn, style=_COLOURS[name]), f"{values[index]:,}"]
            row.append(f"{share:.0%}" if share else "")
        table.add_row(*row)
    return _with_legend(staleness_title(inspection), table, [*staleness_legend(inspection)], width)


def _with_legend(title: str, table: Table, legend: Sequence[str], width: int) -> Panel:
    lines = [Text(line, style="dim") for line in legend]
    return _panel(title, Group(table, *lines), width)


def _occupancy(inspection: Inspection, width: int) -> Panel:
    """List the facts of the occupancy; shares also as bars."""
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
    """Draw one line per metric, with a sparkline between its first and last means."""
    trends = trends_of(inspection)
    numbers = max(8, *(len(trend.last) for trend in trends))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in trends_header(inspection):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for trend in trends:
        course = Text(sparkline(trend.values, max(12, width - 44 - numbers)), style="cyan")
        table.add_row(trend.label, trend.first, course, trend.last)
    return _panel(trends_title(inspection), table, width)
