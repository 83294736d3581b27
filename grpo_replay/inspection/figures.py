"""Figures of an inspection: one panel per question, as wide as one column of a paper."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.inspection.summary import Inspection
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


def panels_of(seen: Inspection) -> dict[str, Drawing]:
    """The panels that have data, by title, in reading order."""
    found: dict[str, Drawing] = {}
    if seen.staleness:
        found["Staleness"] = draw_staleness
    if seen.abs_advantage:
        found["|Advantage|"] = draw_magnitude
    if seen.times_used or seen.last_use:
        found["Reuse"] = draw_reuse
    if any(age > 0 for age in seen.by_age):
        found["Clip fraction by age"] = draw_clipping
        found["Policy shift by age"] = draw_kl
    if "buffer/rollouts" in seen.trends and seen.replays:
        found["Occupancy over training"] = draw_occupancy
    if "replay/clip_fraction" in seen.trends:
        found["Clip fraction over training"] = draw_clip_trend
    return found


def plot_inspection(seen: Inspection, path: Path) -> None:
    """All panels stacked in one PNG or SVG figure. Raises UsageError for another extension."""
    drawings = panels_of(seen)
    with figure_style() as figure_class:
        rows = max(1, len(drawings))
        figure = figure_class(figsize=(COLUMN_INCHES, _PANEL_INCHES * rows), layout="constrained")
        axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
        if not drawings:
            _draw_empty(axes[0])
        for axis, (title, draw) in zip(axes, drawings.items(), strict=False):
            draw(axis, seen)
            axis.set_title(title)
        save_figure(figure, path)


def panel_svg(seen: Inspection, title: str, draw: Drawing) -> str:
    """One panel as an SVG element for an HTML page."""
    import io

    with figure_style() as figure_class:
        figure = figure_class(figsize=(COLUMN_INCHES, 1.75), layout="constrained")
        draw(figure.subplots(), seen)
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


def draw_staleness(axes: Any, seen: Inspection) -> None:
    ages = np.array([row.age_steps for row in seen.staleness])
    stored = np.array([row.stored for row in seen.staleness], dtype=float)
    replayed = np.array([row.replayed for row in seen.staleness], dtype=float)
    _paired(axes, ages, ("stored", stored), replayed)
    limit = seen.settings["max_age_steps"]
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


def draw_magnitude(axes: Any, seen: Inspection) -> None:
    bins = seen.abs_advantage
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


def draw_reuse(axes: Any, seen: Inspection) -> None:
    """How often rollouts were used over the run (a snapshot alone: how often stored ones were
    drawn), and how long ago their last use was, as shares."""
    run = seen.uses_over_run
    counts = seen.times_used if run is None else run.counts
    left = _capped([(row.value, row.rollouts) for row in counts])
    gaps = seen.last_use.gaps if seen.last_use else ()
    right = _capped([(row.value, row.rollouts) for row in gaps])
    new = seen.last_use.new if seen.last_use else 0
    labels = list(dict.fromkeys([*left, *right]))
    labels.sort(key=lambda label: int(label.rstrip("+")))
    places = np.arange(len(labels))
    name = "draws of stored" if run is None else "uses over the run"
    sides = ((name, left, 0, STORED, -1),) + (
        (("steps since last use", right, new, REPLAYED, 1),) if seen.last_use else ()
    )
    for name, counts, extra, colour, side in sides:
        total = sum(counts.values()) + extra
        shares = [100 * counts.get(label, 0) / total if total else 0 for label in labels]
        axes.bar(places + side * 0.21, shares, 0.42, color=colour, label=name)
        if extra:
            axes.bar(len(labels) + 0.21, 100 * extra / total, 0.42, color=colour)
    ticks = [*labels, "new"] if new else labels
    axes.set_xticks(np.arange(len(ticks)), ticks)
    axes.set_xlabel("uses, or training steps")
    axes.set_ylabel("share (%)")
    _legend_above(axes)


def _capped(rows: Sequence[tuple[int, int]], limit: int = 9) -> dict[str, int]:
    """Counts by label, with all values from `limit` up under one label."""
    counts: dict[str, int] = {}
    for value, count in rows:
        label = f"{limit}+" if value >= limit else str(value)
        counts[label] = counts.get(label, 0) + count
    return counts


def draw_clipping(axes: Any, seen: Inspection) -> None:
    _by_age(axes, seen, lambda row: 100 * row.clip_fraction, "clipped tokens (%)")


def draw_kl(axes: Any, seen: Inspection) -> None:
    _by_age(axes, seen, lambda row: row.approx_kl, "KL (nats per token)")


def _by_age(axes: Any, seen: Inspection, value: Callable[[Any], float], label: str) -> None:
    ages = sorted(seen.by_age)
    old = [age for age in ages if age > 0]
    axes.plot(old, [value(seen.by_age[age]) for age in old], "o-", color=REPLAYED, label="replayed")
    if 0 in seen.by_age:
        fresh = value(seen.by_age[0])
        axes.plot([0], [fresh], "D", color=FRESH, markersize=3.5, label="fresh")
        axes.axhline(fresh, color=FRESH, linewidth=0.7, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("age at use (training steps)")
    axes.set_ylabel(label)
    _whole_numbers(axes.xaxis)
    _legend_above(axes)


def draw_occupancy(axes: Any, seen: Inspection) -> None:
    steps, stored = zip(*seen.trends["buffer/rollouts"], strict=True)
    axes.plot(steps, stored, color=STORED, label="stored")
    capacity = seen.occupancy.capacity_rollouts
    expected = seen.occupancy.expected_rollouts
    if capacity is not None and capacity <= 2 * max(stored):
        axes.axhline(capacity, color=GREY, linestyle=":", linewidth=0.9, label="capacity")
    if expected is not None and seen.settings["max_age_steps"] is not None:
        axes.axhline(expected, color=REPLAYED, linestyle="--", linewidth=0.9, label="expected")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("training step")
    axes.set_ylabel("rollouts")
    _whole_numbers(axes.xaxis)
    _legend_above(axes)


def draw_clip_trend(axes: Any, seen: Inspection) -> None:
    for name, label, colour in (
        ("fresh/clip_fraction", "fresh", FRESH),
        ("replay/clip_fraction", "replayed", REPLAYED),
    ):
        if name in seen.trends:
            steps, values = zip(*seen.trends[name], strict=True)
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
