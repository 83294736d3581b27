"""Figures of an inspection: one panel per question, as wide as one column of a paper."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.inspection.summary import CountRow, Inspection
from grpo_replay.terminal.plot_style import (
    COLUMN_INCHES,
    FRESH,
    GREY,
    REPLAYED,
    STORED,
    figure_style,
    save_figure,
)

Drawing = Callable[[Any, Inspection], None]

_PANEL_INCHES = 1.35


def panels_of(inspection: Inspection) -> dict[str, Drawing]:
    """The panels that have data, by title, in reading order."""
    found: dict[str, Drawing] = {}
    if inspection.staleness:
        found["Staleness"] = draw_staleness
    if inspection.abs_advantage:
        found["|Advantage|"] = draw_magnitude
    if inspection.times_used or inspection.last_use:
        found["Reuse"] = draw_reuse
    if any(age > 0 for age in inspection.by_age):
        found["Clip fraction by age"] = draw_clipping
        found["Policy shift by age"] = draw_kl
    if "buffer/rollouts" in inspection.trends and inspection.replays:
        found["Occupancy over training"] = draw_occupancy
    if "replay/clip_fraction" in inspection.trends:
        found["Clip fraction over training"] = draw_clip_trend
    return found


def plot_inspection(inspection: Inspection, path: Path) -> None:
    """All panels stacked in one PNG or SVG figure. Raises UsageError for another extension."""
    drawings = panels_of(inspection)
    with figure_style() as figure_class:
        rows = max(1, len(drawings))
        figure = figure_class(figsize=(COLUMN_INCHES, _PANEL_INCHES * rows), layout="constrained")
        axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
        if not drawings:
            _draw_empty(axes[0])
        for axis, (title, draw) in zip(axes, drawings.items(), strict=False):
            draw(axis, inspection)
            axis.set_title(title)
        save_figure(figure, path)


def panel_svg(inspection: Inspection, title: str, draw: Drawing) -> str:
    """One panel as an SVG element for an HTML page."""
    import io

    with figure_style() as figure_class:
        figure = figure_class(figsize=(COLUMN_INCHES, 1.75), layout="constrained")
        draw(figure.subplots(), inspection)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    text = buffer.getvalue()
    return _unique_ids(text[text.index("<svg") :], "".join(filter(str.isalnum, title)))


def _unique_ids(svg: str, prefix: str) -> str:
    """Prefix the ids, because figures in one page must not share ids of clip paths."""
    for mark in ('id="', 'href="#', "url(#"):
        svg = svg.replace(mark, f"{mark}{prefix}-")
    return svg


def _draw_empty(axes: Any) -> None:
    axes.text(0.5, 0.5, "nothing stored or replayed", ha="center", color=GREY)
    axes.set_axis_off()


def draw_staleness(axes: Any, inspection: Inspection) -> None:
    ages = np.array([row.age_steps for row in inspection.staleness])
    stored = np.array([row.stored for row in inspection.staleness], dtype=float)
    replayed = np.array([row.replayed for row in inspection.staleness], dtype=float)
    _paired(axes, ages, ("stored", stored), replayed)
    limit = inspection.settings["max_age_steps"]
    if limit is not None:
        axes.axvline(limit + 0.5, color=GREY, linestyle=":", linewidth=0.9)
        axes.annotate(
            "$τ_{max}$",
            (limit + 0.5, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, -7),
            textcoords="offset points",
            color=GREY,
            fontsize=6.5,
        )
        axes.set_xlim(-0.6, 1.08 * max(limit, ages.max()) + 0.8)
    axes.set_xlabel("age (training steps)")
    _whole_numbers(axes.xaxis)


def _paired(
    axes: Any, places: np.ndarray, left: tuple[str, np.ndarray], replayed: np.ndarray
) -> None:
    """Shares of one population next to shares of the replayed rollouts."""
    width = 0.42
    sides = ((*left, STORED, -1), ("replayed", replayed, REPLAYED, 1))
    for name, counts, colour, side in sides:
        if counts.sum():
            label = f"{name} ({_short_count(int(counts.sum()))})"
            share = 100 * counts / counts.sum()
            axes.bar(places + side * width / 2, share, width, color=colour, label=label)
    axes.set_ylabel("rollouts (%)")
    _legend_above(axes)


def _short_count(count: int) -> str:
    """At most five characters, to keep the legend clear of the title."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return str(count)


def _legend_above(axes: Any) -> None:
    """A legend next to the title, where it does not cover data."""
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.98),
        ncols=3,
        borderaxespad=0,
        handlelength=1.0,
        columnspacing=1.0,
        handletextpad=0.4,
    )


def draw_magnitude(axes: Any, inspection: Inspection) -> None:
    bins = inspection.abs_advantage
    kept = np.array([b.kept for b in bins], dtype=float)
    stored = np.array([b.stored for b in bins], dtype=float)
    replayed = np.array([b.replayed for b in bins], dtype=float)
    places = np.arange(len(bins))
    _paired(axes, places, ("survivors", kept) if kept.any() else ("stored", stored), replayed)
    single = all(b.low == b.high for b in bins)
    labels = [f"{b.low:.2f}" if single else f"{(b.low + b.high) / 2:.2f}" for b in bins]
    every = max(1, round(len(bins) / 8))
    axes.set_xticks(places[::every], labels[::every])
    axes.set_xlabel("|advantage|" if single else "|advantage| (middle of bin)")


def draw_reuse(axes: Any, inspection: Inspection) -> None:
    """Shares of rollouts by number of uses over the run, and of draws by steps since last use.

    A snapshot without its run shows how often the stored rollouts were drawn instead.
    """
    run, last_use = inspection.uses_over_run, inspection.last_use
    name = "draws of stored" if run is None else "uses over the run"
    series = [(name, inspection.times_used if run is None else run.counts, 0, STORED, -1)]
    if last_use is not None:
        series.append(("steps since last use", last_use.gaps, last_use.new, REPLAYED, 1))
    counts_of = {name: _capped(rows) for name, rows, *_ in series}
    labels = list(dict.fromkeys(label for counts in counts_of.values() for label in counts))
    labels.sort(key=lambda label: int(label.rstrip("+")))
    places = np.arange(len(labels))
    for name, _, extra, colour, side in series:
        counts = counts_of[name]
        total = sum(counts.values()) + extra
        shares = [100 * counts.get(label, 0) / total if total else 0 for label in labels]
        axes.bar(places + side * 0.21, shares, 0.42, color=colour, label=name)
        if extra:
            axes.bar(len(labels) + 0.21, 100 * extra / total, 0.42, color=colour)
    new = last_use.new if last_use else 0
    ticks = [*labels, "new"] if new else labels
    axes.set_xticks(np.arange(len(ticks)), ticks)
    axes.set_xlabel("uses, or training steps")
    axes.set_ylabel("share (%)")
    _legend_above(axes)


def _capped(rows: Sequence[CountRow], limit: int = 9) -> dict[str, int]:
    """Counts by label, with all values from `limit` up under one label."""
    counts: dict[str, int] = {}
    for row in rows:
        label = f"{limit}+" if row.value >= limit else str(row.value)
        counts[label] = counts.get(label, 0) + row.rollouts
    return counts


def draw_clipping(axes: Any, inspection: Inspection) -> None:
    _by_age(axes, inspection, lambda row: 100 * row.clip_fraction, "clipped tokens (%)")


def draw_kl(axes: Any, inspection: Inspection) -> None:
    _by_age(axes, inspection, lambda row: row.approx_kl, "KL (nats per token)")


def _by_age(axes: Any, inspection: Inspection, value: Callable[[Any], float], label: str) -> None:
    ages = sorted(inspection.by_age)
    old = [age for age in ages if age > 0]
    axes.plot(
        old, [value(inspection.by_age[age]) for age in old], "o-", color=REPLAYED, label="replayed"
    )
    if 0 in inspection.by_age:
        fresh = value(inspection.by_age[0])
        axes.plot([0], [fresh], "D", color=FRESH, markersize=3.5, label="fresh")
        axes.axhline(fresh, color=FRESH, linewidth=0.7, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("age at use (training steps)")
    axes.set_ylabel(label)
    _whole_numbers(axes.xaxis)
    _legend_above(axes)


def draw_occupancy(axes: Any, inspection: Inspection) -> None:
    steps, stored = zip(*inspection.trends["buffer/rollouts"], strict=True)
    axes.plot(steps, stored, color=STORED, label="stored")
    capacity = inspection.occupancy.capacity_rollouts
    expected = inspection.occupancy.expected_rollouts
    if capacity is not None and capacity <= 2 * max(stored):
        axes.axhline(capacity, color=GREY, linestyle=":", linewidth=0.9, label="capacity")
    if expected is not None and inspection.settings["max_age_steps"] is not None:
        axes.axhline(expected, color=REPLAYED, linestyle="--", linewidth=0.9, label="expected")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("training step")
    axes.set_ylabel("rollouts")
    _whole_numbers(axes.xaxis)
    _legend_above(axes)


def draw_clip_trend(axes: Any, inspection: Inspection) -> None:
    for name, label, colour in (
        ("fresh/clip_fraction", "fresh", FRESH),
        ("replay/clip_fraction", "replayed", REPLAYED),
    ):
        if name in inspection.trends:
            steps, values = zip(*inspection.trends[name], strict=True)
            axes.plot(steps, 100 * np.array(values), color=colour, alpha=0.3, linewidth=0.7)
            window = max(1, len(values) // 12)
            axes.plot(steps, 100 * _smooth(np.array(values), window), color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("training step")
    axes.set_ylabel("clipped tokens (%)")
    _whole_numbers(axes.xaxis)
    _legend_above(axes)


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Moving mean over `window` values on either side, fewer at the ends."""
    sums = np.append(0.0, np.cumsum(values))
    low = np.maximum(np.arange(len(values)) - window, 0)
    high = np.minimum(np.arange(len(values)) + window + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=8))
