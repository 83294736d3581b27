"""Figures of an inspection: panels in two columns, or one panel as wide as a paper's column."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.errors import UsageError
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

_ROW_INCHES, _ONE_PANEL_INCHES, _GAP_INCHES = 1.5, 1.8, 0.2


def panels_of(inspection: Inspection) -> dict[str, Drawing]:
    """The panels that have data, by the name that `--panel` takes, in reading order."""
    has_old = any(age > 0 for age in inspection.by_age)
    known: dict[str, tuple[object, Drawing]] = {
        "staleness": (inspection.staleness, _staleness),
        "advantage": (inspection.abs_advantage, _magnitude),
        "uses": (inspection.uses_over_run, _uses),
        "last-use": (inspection.last_use, _last_use),
        "clip": (has_old, _clip_fraction),
        "kl": (has_old, _policy_shift),
        "stored": (inspection.replays and "buffer/rollouts" in inspection.trends, _stored),
    }
    return {name: draw for name, (data, draw) in known.items() if data}


def plot_inspection(inspection: Inspection, path: Path, panel: str | None = None) -> None:
    """One PNG, SVG or PDF figure of what was stored and replayed, at which age and to what effect;
    or of one panel. Raises UsageError for another extension, and for a panel without data."""
    drawings = panels_of(inspection)
    if panel is not None:
        if panel not in drawings:
            raise UsageError(f"--panel {panel}: choose of {', '.join(drawings) or 'none'}")
        drawings = {panel: drawings[panel]}
    elif len(drawings) > 1:
        drawings.pop("stored", None)  # buffer/rollouts over training, which `report` draws too
    columns = 2 if len(drawings) > 1 else 1
    rows = max(1, -(-len(drawings) // columns))
    width = columns * COLUMN_INCHES + (columns - 1) * _GAP_INCHES
    height = rows * _ROW_INCHES if columns > 1 else _ONE_PANEL_INCHES
    with figure_style() as figure_class:
        figure = figure_class(figsize=(width, height), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, draw in zip(axes, drawings.values(), strict=False):
            draw(axis, inspection)
        for axis in axes[len(drawings) :]:
            axis.set_axis_off()
        if not drawings:
            axes[0].text(0.5, 0.5, "nothing stored or replayed", ha="center", color=GREY)
        save_figure(figure, path)


def _staleness(axes: Any, inspection: Inspection) -> None:
    ages = np.array([row.age for row in inspection.staleness])
    stored = np.array([row.stored for row in inspection.staleness])
    replayed = np.array([row.replayed for row in inspection.staleness])
    _paired(axes, ages, ("stored now", stored), replayed)
    axes.set_title("Staleness")
    axes.set_xlabel(f"age (training {inspection.age_unit})")
    whole_numbers(axes.xaxis)


def _paired(
    axes: Any, places: np.ndarray, left: tuple[str, np.ndarray], replayed: np.ndarray
) -> None:
    """Shares of one population next to shares of the replayed rollouts."""
    width = 0.42
    for name, counts, colour, side in (
        (*left, STORED, -1),
        ("all replays", replayed, REPLAYED, 1),
    ):
        if counts.sum():
            share = 100 * counts / counts.sum()
            axes.bar(places + side * width / 2, share, width, color=colour, label=name)
    axes.set_ylabel("rollouts (%)")
    legend_above(axes)


def _magnitude(axes: Any, inspection: Inspection) -> None:
    bins = inspection.abs_advantage
    kept, replayed = (np.array([getattr(b, name) for b in bins]) for name in ("kept", "replayed"))
    _paired(axes, np.arange(len(bins)), ("survivors", kept), replayed)
    every = max(1, round(len(bins) / 6))
    labels = [f"{b.low:.2f}" if b.low == b.high else f"{b.low:.2f}–{b.high:.2f}" for b in bins]
    axes.set_xticks(range(0, len(bins), every), labels[::every])
    axes.set_title("|Advantage|")
    axes.set_xlabel("|advantage|")


def _uses(axes: Any, inspection: Inspection) -> None:
    run = inspection.uses_over_run
    assert run is not None
    _shares(axes, run.counts, STORED)
    axes.set_title(f"Reuse: mean {run.mean:.2f}")
    axes.set_xlabel("uses of a survivor so far")
    axes.set_ylabel("rollouts (%)")


def _last_use(axes: Any, inspection: Inspection) -> None:
    last_use = inspection.last_use
    assert last_use is not None
    _shares(axes, last_use.gaps, REPLAYED, {"first": last_use.new} if last_use.new else {})
    axes.set_title("Since the previous use")
    axes.set_xlabel(f"training {inspection.age_unit}")
    axes.set_ylabel("draws (%)")


def _shares(
    axes: Any, found: Mapping[int, int], colour: str, others: Mapping[str, int] | None = None
) -> None:
    counts = dict(cap_counts(found, 10)) | dict(others or {})
    total = max(1, sum(counts.values()))
    axes.bar(list(counts), [100 * count / total for count in counts.values()], 0.7, color=colour)


def cap_counts(counts: Mapping[int, int], limit: int) -> list[tuple[str, int]]:
    """At most `limit` pairs (label, count). The last one sums all larger values."""
    values = sorted(counts)
    if len(values) <= limit:
        return [(str(value), counts[value]) for value in values]
    shown = [(str(value), counts[value]) for value in values[: limit - 1]]
    rest = values[limit - 1 :]
    return [*shown, (f"{rest[0]}+", sum(counts[value] for value in rest))]


def _by_age(
    axes: Any, inspection: Inspection, title: str, label: str, value: Callable[[Any], float]
) -> None:
    old = [age for age in sorted(inspection.by_age) if age > 0]
    values = [value(inspection.by_age[age]) for age in old]
    axes.plot(old, values, "o-", color=REPLAYED, label="replayed")
    if 0 in inspection.by_age:
        fresh = value(inspection.by_age[0])
        axes.plot([0], [fresh], "D", color=FRESH, markersize=3.5, label="fresh", clip_on=False)
        axes.axhline(fresh, color=FRESH, linewidth=0.7, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel(f"age at use (training {inspection.age_unit})")
    axes.set_ylabel(label)
    whole_numbers(axes.xaxis)
    legend_above(axes)


_clip_fraction = partial(
    _by_age, title="Clipping", label="clipped tokens (%)", value=lambda row: 100 * row.clip_fraction
)
_policy_shift = partial(
    _by_age, title="Policy shift", label="KL (nats per token)", value=lambda row: row.approx_kl
)


def _stored(axes: Any, inspection: Inspection) -> None:
    """Rollouts stored after each step, and the capacity where it is near."""
    steps, stored = zip(*inspection.trends["buffer/rollouts"], strict=True)
    axes.plot(steps, stored, color=STORED)
    capacity = inspection.occupancy.capacity_rollouts
    if capacity is not None and capacity <= 2 * max(stored):
        axes.axhline(capacity, color=GREY, linestyle=":", linewidth=0.9, label="capacity")
        legend_above(axes)
    axes.set_ylim(bottom=0)
    axes.set_title("Occupancy")
    axes.set_ylabel("rollouts stored")
    axes.set_xlabel("training step")
    whole_numbers(axes.xaxis)
