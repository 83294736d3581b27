"""Figures of an inspection, one panel per question, as wide as one column of a paper."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.lab.inspection.buffer_panels import cap_counts
from grpo_replay.lab.inspection.buffer_summary import Inspection
from grpo_replay.terminal.plot_style import (
    COLUMN_INCHES,
    FRESH,
    GREY,
    REPLAYED,
    STORED,
    figure_style,
    legend_above,
    save_figure,
    whole_numbers,
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
    if inspection.times_used or inspection.uses_over_run:
        found["Uses of a rollout"] = draw_uses
    if inspection.last_use:
        found["Steps since last use"] = draw_last_use
    if any(age > 0 for age in inspection.by_age):
        found["Clip fraction by age"] = partial(
            _by_age, value=lambda row: 100 * row.clip_fraction, label="clipped tokens (%)"
        )
        found["Policy shift by age"] = partial(
            _by_age, value=lambda row: row.approx_kl, label="KL (nats per token)"
        )
    if "buffer/rollouts" in inspection.trends and inspection.replays:
        found["Occupancy"] = draw_occupancy
    return found


def plot_inspection(inspection: Inspection, path: Path) -> None:
    """All panels stacked in one PNG, SVG or PDF figure. Raises UsageError for another extension."""
    drawings = panels_of(inspection)
    with figure_style() as figure_class:
        rows = max(1, len(drawings))
        figure = figure_class(figsize=(COLUMN_INCHES, _PANEL_INCHES * rows), layout="constrained")
        axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
        if not drawings:
            axes[0].text(0.5, 0.5, "nothing stored or replayed", ha="center", color=GREY)
            axes[0].set_axis_off()
        for axis, (title, draw) in zip(axes, drawings.items(), strict=False):
            draw(axis, inspection)
            axis.set_title(title)
        place = Path(inspection.path).resolve()
        run = f"{inspection.recipe_name or place.name} · {place.name} · step {inspection.step}"
        figure.suptitle(run, fontsize=7.5, color=GREY, parse_math=False)
        save_figure(figure, path)


def draw_staleness(axes: Any, inspection: Inspection) -> None:
    ages = np.array([row.age for row in inspection.staleness])
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
    axes.set_xlabel(f"age (training {inspection.age_unit})")
    whole_numbers(axes.xaxis)


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
    legend_above(axes)


def _short_count(count: int) -> str:
    """At most five characters, to keep the legend clear of the title."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return str(count)


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


def draw_uses(axes: Any, inspection: Inspection) -> None:
    """Shares of rollouts by number of uses over the run. A snapshot without its run shows how often
    the stored rollouts were drawn."""
    run = inspection.uses_over_run
    counts = dict(cap_counts(inspection.times_used if run is None else run.counts, 10))
    _shares(axes, counts, STORED)
    axes.set_xlabel("draws of a stored rollout" if run is None else "uses over the run")
    axes.set_ylabel("rollouts (%)")
    if run is not None:
        axes.set_title(f"mean {run.mean:.2f}", loc="right", fontsize=6.5, fontweight="normal")


def draw_last_use(axes: Any, inspection: Inspection) -> None:
    """Shares of draws by steps or updates since the previous use (paper B); `new`: first uses."""
    last_use = inspection.last_use
    assert last_use is not None
    counts = dict(cap_counts(last_use.gaps, 10))
    if last_use.new:
        counts["new"] = last_use.new
    _shares(axes, counts, REPLAYED)
    axes.set_xlabel(f"training {inspection.age_unit} since the previous use")
    axes.set_ylabel("draws (%)")


def _shares(axes: Any, counts: dict[str, int], colour: str) -> None:
    total = max(1, sum(counts.values()))
    axes.bar(list(counts), [100 * count / total for count in counts.values()], 0.7, color=colour)


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
    axes.set_xlabel(f"age at use (training {inspection.age_unit})")
    axes.set_ylabel(label)
    whole_numbers(axes.xaxis)
    legend_above(axes)


def draw_occupancy(axes: Any, inspection: Inspection) -> None:
    """Rollouts stored, and the most that capacity and age limit allowed at each step."""
    steps, stored = zip(*inspection.trends["buffer/rollouts"], strict=True)
    axes.plot(steps, stored, color=STORED, label="stored")
    capacity, limits = inspection.occupancy.capacity_rollouts, inspection.occupancy.limits
    if limits:
        axes.plot(*zip(*limits, strict=True), "--", color=REPLAYED, linewidth=0.9, label="limit")
    if capacity is not None and capacity <= 2 * max(stored):
        axes.axhline(capacity, color=GREY, linestyle=":", linewidth=0.9, label="capacity")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("rollouts")
    axes.set_xlabel("training step")
    whole_numbers(axes.xaxis)
    legend_above(axes)
