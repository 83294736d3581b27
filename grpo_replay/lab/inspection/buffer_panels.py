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
    Inspection,
    StalenessRow,
    plural,
)
from grpo_replay.storage.atomic import write_text_whole
from grpo_replay.terminal.console import bar, open_console, sparkline

PANEL_WIDTH = 57
_ROWS = 12  # maximum rows of a histogram; more are merged


def print_inspection(inspection: Inspection, console: Console) -> None:
    console.print(_heading(inspection))
    console.print(_verdict(inspection))
    limit = inspection.settings["max_age_steps"]
    found = (
        *(_occupancy(inspection), staleness_panel(inspection.staleness, limit)),
        *(_populations(inspection), _magnitude(inspection)),
        *(_reuse(inspection), _by_age(inspection)),
    )
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
        f"  largest P {law.largest_probability:.2%}"
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
        ("truncated", lambda p: f"{p.truncated_share:.1%}"),
    )
    for label, cell in lines:
        table.add_row(label, *(cell(rows) for rows in inspection.populations))
    return _panel("populations", table)


def _number_or_dash(value: float | None, format_spec: str) -> str:
    return "–" if value is None else format(value, format_spec)


def staleness_panel(staleness: Sequence[StalenessRow], limit: int | None = None) -> Panel | None:
    """Ages of what is stored now next to ages at use in all steps so far; None if nothing was
    stored or replayed. `limit` is the age in steps at which rollouts are evicted."""
    if not staleness:
        return None
    rows = merge_rows([(row.age, row.stored, row.replayed) for row in staleness], _ROWS)
    means = []
    for name, counts in (
        ("stored now", [row.stored for row in staleness]),
        ("at use", [row.replayed for row in staleness]),
    ):
        if sum(counts):
            ages = (row.age * count for row, count in zip(staleness, counts, strict=True))
            means.append(f"{sum(ages) / sum(counts):.1f} {name}")
    unit = "steps" if staleness[0].age_updates is None else "updates"
    table = bars("age", rows, {"stored now": STORED, "all replays": REPLAYED})
    if limit is not None and unit == "steps":
        table.caption = f"at age {limit} comes the last draw, then the eviction"
    return _panel(f"staleness in {unit}: mean {', '.join(means)}", table)


def _magnitude(inspection: Inspection) -> Panel | None:
    if not inspection.abs_advantage:
        return None
    rows = [(bin_label(b), b.kept, b.replayed) for b in inspection.abs_advantage]
    colours = {"survivors": STORED, "all replays": REPLAYED}
    return _panel("|advantage| over the run", bars("|A|", rows, colours))


def bin_label(span: Bin) -> str:
    return f"{span.low:.2f}" if span.low == span.high else f"{span.low:.2f}–{span.high:.2f}"


def _reuse(inspection: Inspection) -> Panel | None:
    """How often rollouts were used, of a snapshot without its run how often those stored were
    drawn; and how long before."""
    run = inspection.uses_over_run
    counts = inspection.times_used if run is None else run.counts
    if not counts or not inspection.replays:
        return None
    name = "draws" if run is None else "uses"
    tables = [bars(f"{name} so far", cap_counts(counts, 6), {"": STORED}, 5)]
    last_use = inspection.last_use
    if last_use is not None:
        gaps = cap_counts(last_use.gaps, 6)
        gaps += [("first use", last_use.new)] if last_use.new else []
        tables.append(bars("since last use", gaps, {"": REPLAYED}, 5))
    grid = Table.grid(padding=(0, 2))
    grid.add_row(*tables)
    if run is None:
        return _panel("reuse of the stored rollouts", grid)
    return _panel(f"reuse: {run.mean:.2f} uses, and {inspection.age_unit} since the last one", grid)


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


def cap_counts(counts: Mapping[int, int], limit: int) -> list[tuple[str, int]]:
    """At most `limit` pairs (label, count). The last one sums all larger values."""
    values = sorted(counts)
    if len(values) <= limit:
        return [(str(value), counts[value]) for value in values]
    shown = [(str(value), counts[value]) for value in values[: limit - 1]]
    rest = values[limit - 1 :]
    return [*shown, (f"{rest[0]}+", sum(counts[value] for value in rest))]
