"""Curves over training: reward, entropy, occupancy, clip fraction."""

from collections.abc import Callable
from typing import Any

import numpy as np

from grpo_replay.lab.inspection.buffer_summary import Inspection
from grpo_replay.terminal.plot_style import (
    FRESH,
    GREY,
    REPLAYED,
    STORED,
    legend_above,
    whole_numbers,
)


def trend_panels(inspection: Inspection) -> dict[str, Callable[[Any, Inspection], None]]:
    """The panels that have data, by title, in reading order."""
    found: dict[str, Callable[[Any, Inspection], None]] = {}
    if "buffer/rollouts" in inspection.trends and inspection.replays:
        found["Occupancy over training"] = draw_occupancy
    if inspection.trends.keys() & {"fresh/clip_fraction", "replay/clip_fraction"}:
        found["Clip fraction over training"] = draw_clip_trend
    if "reward" in inspection.trends:
        found["Reward over training"] = draw_reward
    if "entropy" in inspection.trends:
        found["Entropy over training"] = draw_entropy
    return found


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
    _finish(axes)


def draw_clip_trend(axes: Any, inspection: Inspection) -> None:
    for name, label, colour in (
        ("fresh/clip_fraction", "fresh", FRESH),
        ("replay/clip_fraction", "replayed", REPLAYED),
    ):
        if name in inspection.trends:
            _smoothed(axes, inspection, name, colour, label, scale=100)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("clipped tokens (%)")
    _finish(axes)


def draw_reward(axes: Any, inspection: Inspection) -> None:
    _smoothed(axes, inspection, "reward", FRESH, "fresh rollouts")
    axes.set_ylabel("mean reward")
    _finish(axes)


def draw_entropy(axes: Any, inspection: Inspection) -> None:
    _smoothed(axes, inspection, "entropy", STORED, "trained tokens")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("entropy (nats)")
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.set_xlabel("training step")
    whole_numbers(axes.xaxis)
    legend_above(axes)


def _smoothed(
    axes: Any, inspection: Inspection, name: str, colour: str, label: str, scale: float = 1
) -> None:
    """A metric's values, pale, and their moving mean over a sixth of the run."""
    steps, values = zip(*inspection.trends[name], strict=True)
    scaled = scale * np.array(values)
    axes.plot(steps, scaled, color=colour, alpha=0.3, linewidth=0.7)
    axes.plot(steps, smooth(scaled, max(1, len(values) // 12)), color=colour, label=label)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Moving mean over `window` values on either side, fewer at the ends."""
    sums = np.append(0.0, np.cumsum(values))
    low = np.maximum(np.arange(len(values)) - window, 0)
    high = np.minimum(np.arange(len(values)) + window + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)
