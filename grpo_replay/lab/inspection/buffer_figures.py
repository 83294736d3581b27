"""Figures of an inspection: all panels in two columns, or one panel as wide as a paper's column."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_replay.errors import UsageError
from grpo_replay.lab.inspection.buffer_summary import Inspection
from grpo_replay.terminal.plot_style import (
    COLUMN_INCHES,
    FRESH,
    REPLAYED,
    STORED,
    figure_style,
    legend_above,
    save_figure,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawing = Callable[[Any, Inspection], None]

_ROW_INCHES, _ONE_PANEL_INCHES, _PAGE_INCHES, _GAP_INCHES = 1.5, 1.8, 1.9, 0.2


def panels_of(inspection: Inspection) -> dict[str, Drawing]:
    """Return the panels that have data, by their names for `--panel`, in reading order."""
    has_old = any(age > 0 for age in inspection.by_age)
    panels: dict[str, tuple[object, Drawing]] = {
        "staleness": (inspection.staleness, _staleness),
        "uses": (inspection.uses_over_run, _uses),
        "last-use": (inspection.last_use, _last_use),
        "clip": (has_old, _clip_fraction),
        "kl": (has_old, _policy_shift),
        "stored": (inspection.replays and "buffer/rollouts" in inspection.trends, _stored),
    }
    return {name: draw for name, (data, draw) in panels.items() if data}


CAPTIONS = {
    "staleness": "Ages of the rollouts stored now, and ages at use of all replays of the run.",
    "uses": "How often the run has trained on each kept rollout, evicted ones included.",
    "last-use": "Time between a draw and the use before it; 0 is a second draw in one batch.",
    "clip": "Tokens whose gradient a clip or mask removed.",
    "kl": "How far the policy has moved from the policy at birth.",
    "stored": "Rollouts in the buffer after each step.",
}
"""One sentence on each panel."""

SHADOW_CAPTIONS = {
    "staleness": "Ages of the rollouts stored now, and ages at all shadow draws of the run.",
    "uses": "How often each kept rollout was trained on as fresh or drawn in shadow, evicted ones "
    "included. Nothing drawn was trained on.",
    "last-use": "Time between a draw in shadow and the use or draw before it; 0 is a second draw "
    "in one batch.",
}
"""Captions with `replay.shadow`, where they differ."""


def caption_of(name: str, inspection: Inspection) -> str:
    """Returns the caption of a panel."""
    in_shadow = inspection.settings["shadow"]
    return SHADOW_CAPTIONS.get(name, CAPTIONS[name]) if in_shadow else CAPTIONS[name]


def panel_figures(inspection: Inspection) -> "Iterator[tuple[str, Figure]]":
    """Yield each panel with data as a figure, by name, inside `figure_style`."""
    with figure_style() as figure_class:
        for name, draw in panels_of(inspection).items():
            figure = figure_class(figsize=(COLUMN_INCHES, _PAGE_INCHES), layout="constrained")
            draw(figure.subplots(), inspection)
            yield name, figure


def plot_inspection(inspection: Inspection, path: Path, panel: str | None = None) -> None:
    """Write all panels, or one, as a PNG, SVG or PDF figure. Raises UsageError for another
    extension, and for a panel without data."""
    drawings = panels_of(inspection)
    if panel not in (None, *drawings) or not drawings:
        raise UsageError(f"--panel {panel}: choose one of {', '.join(drawings) or 'none'}")
    if panel is not None:
        drawings = {panel: drawings[panel]}
    columns = 2 if len(drawings) > 1 else 1
    rows = -(-len(drawings) // columns)
    width = columns * COLUMN_INCHES + (columns - 1) * _GAP_INCHES
    height = rows * _ROW_INCHES if columns > 1 else _ONE_PANEL_INCHES
    with figure_style() as figure_class:
        figure = figure_class(figsize=(width, height), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, draw in zip(axes, drawings.values(), strict=False):
            draw(axis, inspection)
        for axis in axes[len(drawings) :]:
            axis.set_axis_off()
        save_figure(figure, path)


def _staleness(axes: Any, inspection: Inspection) -> None:
    """Draw the age shares of stored rollouts next to those of replayed ones."""
    ages = np.array([row.age for row in inspection.staleness])
    for name, label, colour, offset in (
        ("stored", "stored now", STORED, -0.21),
        ("replayed", "all replays", REPLAYED, 0.21),
    ):
        counts = np.array([getattr(row, name) for row in inspection.staleness])
        if counts.sum():
            share = 100 * counts / counts.sum()
            axes.bar(ages + offset, share, 0.42, color=colour, label=label)
    unit = inspection.age_unit
    axes.set(title="Staleness", xlabel=f"age (training {unit})", ylabel="rollouts (%)")
    whole_numbers(axes.xaxis)
    legend_above(axes)


def _shares(axes: Any, counts: Mapping[str, int], colour: str) -> None:
    """Draw each count as a share of their sum."""
    total = max(1, sum(counts.values()))
    axes.bar(list(counts), [100 * count / total for count in counts.values()], 0.7, color=colour)


def _uses(axes: Any, inspection: Inspection) -> None:
    """Draw how many kept rollouts were used how often, in % of them."""
    counts = inspection.uses_over_run
    mean = sum(uses * count for uses, count in counts.items()) / sum(counts.values())
    _shares(axes, capped(counts), STORED)
    label = "uses of a kept rollout so far, fresh included"
    if inspection.settings["shadow"]:
        label = "fresh uses and shadow draws of a kept rollout"
    axes.set(title=f"Reuse: mean {mean:.2f}", xlabel=label, ylabel="rollouts (%)")


def _last_use(axes: Any, inspection: Inspection) -> None:
    last_use = inspection.last_use
    assert last_use is not None
    new = {"first": last_use.new} if last_use.new else {}
    _shares(axes, capped(last_use.gaps) | new, REPLAYED)
    title, unit = "Since the previous use", inspection.age_unit
    axes.set(title=title, xlabel=f"training {unit}", ylabel="draws (%)")


def capped(counts: Mapping[int, int], limit: int = 10) -> dict[str, int]:
    """Return counts by label, at most `limit` of them; the last label covers all larger values."""
    values = sorted(counts)
    if len(values) <= limit:
        return {str(value): counts[value] for value in values}
    shown, rest = values[: limit - 1], values[limit - 1 :]
    return {str(value): counts[value] for value in shown} | {
        f"{rest[0]}+": sum(counts[value] for value in rest)
    }


def _by_age(
    axes: Any, inspection: Inspection, title: str, label: str, value: Callable[[Any], float]
) -> None:
    """Draw `value` of the outcomes at each age of replayed rollouts, and of fresh ones at age 0."""
    ages = [age for age in sorted(inspection.by_age) if age > 0]
    values = [value(inspection.by_age[age]) for age in ages]
    axes.plot(ages, values, "o-", color=REPLAYED, label="replayed")
    if 0 in inspection.by_age:
        fresh = value(inspection.by_age[0])
        axes.plot([0], [fresh], "D", color=FRESH, markersize=3.5, label="fresh", clip_on=False)
        axes.axhline(fresh, color=FRESH, linewidth=0.7, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=f"age at use (training {inspection.age_unit})", ylabel=label)
    whole_numbers(axes.xaxis)
    legend_above(axes)


_clip_fraction = partial(
    _by_age, title="Clipping", label="clipped tokens (%)", value=lambda row: 100 * row.clip_fraction
)
_policy_shift = partial(
    _by_age, title="Policy shift", label="KL (nats per token)", value=lambda row: row.approx_kl
)


def _stored(axes: Any, inspection: Inspection) -> None:
    """Draw the number of rollouts stored after each step."""
    axes.plot(*zip(*inspection.trends["buffer/rollouts"], strict=True), color=STORED)
    axes.set_ylim(bottom=0)
    axes.set(title="Occupancy", xlabel="training step", ylabel="rollouts stored")
    whole_numbers(axes.xaxis)
