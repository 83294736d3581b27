"""The screen of inspect-buffer: a heading, warnings and panels."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grpo_replay.lab.inspection.buffer_summary import (
    TREND_LABELS,
    Bin,
    CountRow,
    Inspection,
    StalenessRow,
    first_and_last,
    plural,
)
from grpo_replay.storage.atomic import write_text_whole
from grpo_replay.terminal.console import bar, open_console, sparkline

PANEL_WIDTH = 57
_ROWS = 12  # maximum rows of a histogram; more are merged


def print_inspection(inspection: Inspection, console: Console) -> None:
    console.print(_heading(inspection))
    console.print(_verdict(inspection))
    found = (
        *(_occupancy(inspection), staleness_panel(inspection.staleness), _populations(inspection)),
        *(_magnitude(inspection), _reuse(inspection), _by_age(inspection)),
    )
    panels = [panel for panel in found if panel is not None]
    per_row = 2 if console.width >= 2 * PANEL_WIDTH + 1 else 1
    for start in range(0, len(panels), per_row):
        console.print(Columns(panels[start : start + per_row], padding=(0, 1)))
    if inspection.trends:
        width = per_row * PANEL_WIDTH + per_row - 1
        console.print(_panel("over training", trends_table(inspection, width - 52), width))


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
    fifo = inspection.settings["max_age_steps"] is None
    if capacity:
        lines.append(_level(stored, capacity, f"of capacity {capacity:,}"))
    if occupancy.expected_rollouts and not fifo:
        rule = f"of {_expected_rule(inspection)} ≈ {occupancy.expected_rollouts:,.0f}"
        lines.append(_level(stored, occupancy.expected_rollouts, rule))
    facts = f"{occupancy.stored_groups:,} groups · {occupancy.stored_tokens:,} completion tokens"
    if occupancy.survivors_per_step is not None:
        facts += f"\nB' ≈ {occupancy.survivors_per_step:.1f} survivors per step"
    if occupancy.evicted_by_age is not None:
        facts += (
            f"\nevicted so far: {occupancy.evicted_by_age:,} by age, "
            f"{occupancy.evicted_by_capacity:,} by capacity"
        )
    lines.append(Text(facts, style="dim"))
    lines.append(_law_text(inspection))
    return _panel(f"occupancy: {stored:,} rollouts stored", Group(*lines))


def _expected_rule(inspection: Inspection) -> str:
    """What limits the stored rollouts at this step, as a formula of `Occupancy`."""
    if inspection.occupancy.expected_rollouts == inspection.occupancy.capacity_rollouts:
        return "the capacity"
    early = inspection.step < inspection.settings["max_age_steps"]
    return f"{inspection.step}·B'" if early else "τ_max·B'"


def _level(value: float, limit: float, label: str) -> Text:
    text = Text(bar(value, limit, 20).ljust(20, "░"), style=STORED)
    text.append(f" {value / limit:6.1%} {label}", style="default")
    return text


def _law_text(inspection: Inspection) -> Text:
    law = inspection.draw_law
    if law.units == 0:
        return Text("nothing to draw from", style="dim")
    return Text(
        f"next draw: ESS {law.effective_sample_size:,.1f} of {law.units:,} {plural(law.unit)} "
        f"({law.effective_sample_size / law.units:.0%})\n"
        f"  entropy {law.entropy_nats:.2f} nats of {math.log(law.units):.2f} · "
        f"largest P {law.largest_probability:.2%}"
    )


def _populations(inspection: Inspection) -> Panel | None:
    if not inspection.populations:
        return None
    table = panel_table()
    table.add_column("")
    colours = {"stored": STORED, "replayed": REPLAYED}
    for rows in inspection.populations:
        table.add_column(rows.name, justify="right", style=colours.get(rows.name, ""))
    lines = (
        ("rollouts", lambda p: f"{p.rollouts:,}"),
        ("prompts", lambda p: f"{p.prompts:,}"),
        ("top prompt's share", lambda p: f"{p.largest_prompt_share:.1%}"),
        ("A > 0", lambda p: _number_or_dash(p.positive_share, ".1%")),
        ("mean |advantage|", lambda p: _number_or_dash(p.abs_advantage_mean, ".2f")),
        ("tokens, mean", lambda p: f"{p.tokens_mean:,.0f}"),
        ("  median", lambda p: f"{p.tokens_median:,.0f}"),
        ("  95th percentile", lambda p: f"{p.tokens_p95:,.0f}"),
        ("truncated", lambda p: f"{p.truncated_share:.1%}"),
    )
    for label, cell in lines:
        table.add_row(label, *(cell(rows) for rows in inspection.populations))
    return _panel("populations", table)


def _number_or_dash(value: float | None, format_spec: str) -> str:
    return "–" if value is None else format(value, format_spec)


def staleness_panel(staleness: Sequence[StalenessRow]) -> Panel | None:
    """Ages of stored rollouts next to ages at use; None if nothing was stored or replayed."""
    if not staleness:
        return None
    rows = merge_rows([(row.age, row.stored, row.replayed) for row in staleness], _ROWS)
    stored = sum(row.stored for row in staleness)
    replayed = sum(row.replayed for row in staleness)
    means = []
    if stored:
        means.append(f"{sum(row.age * row.stored for row in staleness) / stored:.1f} stored")
    if replayed:
        means.append(f"{sum(row.age * row.replayed for row in staleness) / replayed:.1f} at use")
    unit = "steps" if staleness[0].age_updates is None else "updates"
    title = f"staleness, {unit}" + (f": mean {', '.join(means)}" if means else "")
    return _panel(title, bars("age", rows, {"stored": STORED, "replayed": REPLAYED}))


def _magnitude(inspection: Inspection) -> Panel | None:
    if not inspection.abs_advantage:
        return None
    logged = any(b.kept for b in inspection.abs_advantage)
    rows = [
        (bin_label(b), b.kept if logged else b.stored, b.replayed) for b in inspection.abs_advantage
    ]
    colours = {"survivors" if logged else "stored": STORED, "replayed": REPLAYED}
    body: RenderableType = bars("|A|", rows, colours)
    if inspection.priority is not None:
        p = inspection.priority
        line = (
            f"p: median {p.median:.3g} · quartiles {p.quarter:.3g}–{p.three_quarters:.3g} · "
            f"max {p.maximum:.3g}"
        )
        body = Group(body, Text(line, style="dim"))
    return _panel("|advantage|", body)


def bin_label(span: Bin) -> str:
    return f"{span.low:.2f}" if span.low == span.high else f"{span.low:.2f}–{span.high:.2f}"


def _reuse(inspection: Inspection) -> Panel | None:
    if not inspection.times_used and inspection.last_use is None:
        return None
    left = bars("times drawn", cap_counts(inspection.times_used, 6), {"": STORED}, 5)
    if inspection.last_use is None:
        return _panel("reuse: times drawn", left)
    gaps = cap_counts(inspection.last_use.gaps, 6)
    if inspection.last_use.new:
        gaps.append(("new", inspection.last_use.new))
    right = bars("since last use", gaps, {"": REPLAYED}, 5)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(left, right)
    body: RenderableType = grid
    if (run := inspection.uses_over_run) is not None:
        words = f"over the run: {run.mean:.2f} uses a rollout, {run.never_share:.1%} never used"
        body = Group(grid, Text(words, style="dim"))
    return _panel(f"reuse: times drawn, and {inspection.age_unit} since last use", body)


def _by_age(inspection: Inspection) -> Panel | None:
    if not inspection.by_age:
        return None
    table = panel_table()
    for name in ("age", "uses", "clipped", "", "ratio", "KL, nats"):
        table.add_column(
            name, justify="left" if not name else "right", width=11 if not name else None
        )
    known = len(inspection.by_age)
    places = np.linspace(0, known - 1, min(known, _ROWS)).round().astype(int)
    ages = np.array(sorted(inspection.by_age))[places].tolist()
    largest = max(inspection.by_age[age].clip_fraction for age in ages)
    for age in ages:
        row = inspection.by_age[age]
        table.add_row(
            "fresh" if age == 0 else str(age),
            f"{row.uses:,}",
            f"{row.clip_fraction:.2%}",
            Text(bar(row.clip_fraction, largest, 11), style=REPLAYED if age else "green"),
            f"{row.ratio:.4f}",
            f"{row.approx_kl:.4f}",
        )
    if len(ages) < known:
        table.caption = f"{len(ages)} of {known} ages; --json has all"
    return _panel("clip fraction, ratio and KL by age at use", table)


def trends_table(inspection: Inspection, width: int) -> Table:
    """One line per metric: mean of the first and last eighth of the run, and a sparkline."""
    table = panel_table()
    for name in ("", "first", "", "last"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for metric, points in inspection.trends.items():
        first, last = first_and_last(points)
        course = sparkline([value for _, value in points], max(12, width))
        table.add_row(TREND_LABELS[metric], _short(first), Text(course, style="cyan"), _short(last))
    return table


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.2g}"


STORED, REPLAYED = "blue", "dark_orange"


def panel_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")


def bars(
    heading: str, rows: Sequence[tuple[Any, ...]], colours: Mapping[str, str], width: int = 11
) -> Table:
    """A histogram for each name in `colours`, side by side; `rows` have a label and a count for
    each. Each is scaled to its own largest count."""
    table = panel_table()
    table.add_column(heading, justify="right", style="dim")
    for name, colour in colours.items():
        table.add_column(name, justify="right", style=colour)
        table.add_column("", style=colour, width=width)
    largest = [max(column) for column in zip(*(counts for _, *counts in rows), strict=True)]
    for label, *counts in rows:
        cells = [label]
        for count, most in zip(counts, largest, strict=True):
            cells += [f"{count:,}", bar(count, most, width)]
        table.add_row(*cells)
    return table


def merge_rows(rows: Sequence[tuple[int, int, int]], limit: int) -> list[tuple[str, int, int]]:
    """(label, first, second), with adjacent values merged into at most `limit` equal spans."""
    if not rows:
        return []
    low, high = rows[0][0], rows[-1][0]
    span = math.ceil((high - low + 1) / limit)
    merged = []
    for start in range(low, high + 1, span):
        inside = [row for row in rows if start <= row[0] < start + span]
        end = min(start + span - 1, high)
        label = f"{start}" if end == start else f"{start}–{end}"
        merged.append((label, sum(r[1] for r in inside), sum(r[2] for r in inside)))
    return merged


def cap_counts(rows: Sequence[CountRow], limit: int) -> list[tuple[str, int]]:
    """At most `limit` pairs (label, count). The last one sums all larger values."""
    shown = [(str(row.value), row.rollouts) for row in rows[: limit - 1]]
    rest = rows[limit - 1 :]
    if len(rest) == 1:
        shown.append((str(rest[0].value), rest[0].rollouts))
    elif rest:
        shown.append((f"{rest[0].value}+", sum(row.rollouts for row in rest)))
    return shown
