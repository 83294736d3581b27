"""Draws J over (x, y): as a figure of one column width, and as characters on the terminal."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from grpo_replay.lab.planning.design import Design, Plan
from grpo_replay.lab.planning.theory import Values, best_replay_ratio, objective
from grpo_replay.storage.atomic import named_if_unwritable
from grpo_replay.terminal.plot_style import COLUMN_INCHES, STORED, WARN, figure_style, save_figure

BANDS = (1.05, 1.10, 1.25, 1.5, 2.0, 4.0)
"""Upper limits of the shades of both maps: J relative to the best FIFO buffer."""

_SHADES = ("█", "▓", "▒", "░", "·", " ")
_COLUMNS, _ROWS = 48, 11


def map_range(plan: Plan) -> tuple[float, float, float, float]:
    """(x_low, x_high, y_low, y_high) of a map from x = y = 1 on that shows the plan's buffers."""
    designs = [plan.recommended, *([here] if (here := shown_design(plan)) else [])]
    xs, ys = [1.0, *(design.x for design in designs)], [1.0, *(design.y for design in designs)]
    return max(1.0, min(xs) / 2), 2.5 * max(xs), min(0.5, *ys) / 1.5, 2.5 * max(ys)


def shown_design(plan: Plan) -> Design | None:
    """The recipe's design if the map applies to it: a buffer drawn with replacement alone."""
    return plan.current if plan.inputs.composition == "buffer_only" else None


def relative_objective(plan: Plan, x: Values, y: Values) -> Values:
    """J(x, y) of FIFO buffers, relative to the best of them."""
    inputs = plan.inputs
    terms = inputs.effective_mu, inputs.rho, inputs.growth
    best = plan.recommended
    return objective(x, y, *terms) / objective(best.x, best.y, *terms)


def terminal_map(plan: Plan) -> Text:
    """The map as text: x to the right, y upwards, both logarithmic."""
    x_low, x_high, y_low, y_high = map_range(plan)
    xs = np.geomspace(x_low, x_high, _COLUMNS)
    ys = np.geomspace(y_low, y_high, _ROWS)
    values = relative_objective(plan, xs[None, :], ys[:, None])
    marks = _marks(plan, xs, ys)
    text = Text()
    for row in reversed(range(_ROWS)):
        label = f"{ys[row]:6.2g} " if row % 2 == 0 else " " * 7
        text.append(("y" if row == _ROWS - 1 else " ") + label + "│")
        for column in range(_COLUMNS):
            symbol, style = marks.get((column, row), (None, ""))
            text.append(symbol or _shade(values[row, column]), style)
        text.append("\n")
    text.append(" " * 8 + "└" + "─" * _COLUMNS + " x, steps\n")
    text.append(" " * 9 + _tick_line(xs))
    text.append("".join(f"\n  {line}" for line in _legend(plan)), style="dim")
    return text


def _marks(plan: Plan, xs: np.ndarray, ys: np.ndarray) -> dict[tuple[int, int], tuple[str, str]]:
    def cell(x: float, y: float) -> tuple[int, int]:
        return (
            int(np.abs(np.log(xs / x)).argmin()),
            int(np.abs(np.log(ys / y)).argmin()),
        )

    marks = {}
    if here := shown_design(plan):
        marks[cell(here.x, here.y)] = ("@", "bold yellow")
    marks[cell(plan.recommended.x, plan.recommended.y)] = ("+", "bold green")
    return marks


def _shade(value: float) -> str:
    return next((s for s, band in zip(_SHADES, BANDS, strict=True) if value <= band), " ")


def _tick_line(xs: np.ndarray) -> str:
    line = ""
    for column in range(0, _COLUMNS, 9):
        line = line.ljust(column) + f"{xs[column]:.3g}"
    return line


def _legend(plan: Plan) -> list[str]:
    shades = [f"{s} ≤ {band:.2f}" for s, band in zip(_SHADES[:5], BANDS[:5], strict=True)]
    recipe = "  @ recipe" if shown_design(plan) else ""
    return [" ".join(shades), f"+ best{recipe}; no replay: {1 / plan.recommended.objective:.2f}"]


def plot_plan(plan: Plan, path: Path) -> None:
    """Contours of J over (x, y), with the designs; PNG or SVG at column width."""
    x_low, x_high, y_low, y_high = map_range(plan)
    xs, ys = np.geomspace(x_low, x_high, 120), np.geomspace(y_low, y_high, 120)
    values = relative_objective(plan, xs[None, :], ys[:, None])
    with figure_style() as figure_class:
        figure = figure_class(figsize=(COLUMN_INCHES, 2.5), layout="constrained")
        axes = figure.subplots()
        levels = [1.0, *BANDS, max(4.01, float(values[np.isfinite(values)].max()))]
        shades = axes.contourf(xs, ys, values, levels=levels, cmap="Blues_r", norm=_log_norm())
        lines = axes.contour(xs, ys, values, levels=BANDS, colors="white", linewidths=0.5)
        labels = axes.clabel(lines, fmt=lambda level: f"{level:.2f}", fontsize=5.5)
        shades.set_rasterized(True)
        curve = [best_replay_ratio(x, plan.inputs.effective_mu, plan.inputs.rho) for x in xs]
        axes.plot(xs, curve, color="black", linewidth=0.7, linestyle="--", label="best y for x")
        _mark_designs(axes, plan)
        axes.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, y_high))
        axes.set_xlabel("staleness horizon x = N/R (training steps)")
        axes.set_ylabel("replay ratio y = B/R (uses)")
        break_even = 1 / plan.recommended.objective
        if break_even > 1:
            axes.contour(xs, ys, values, levels=[break_even], colors="black", linewidths=0.9)
        axes.set_title(f"J of FIFO relative to the best (no replay: {break_even:.2f})")
        axes.grid(False)
        _plain_log_ticks(axes)
        _hide_at_the_edge(axes, labels)
        figure.legend(loc="outside upper center", ncols=2, columnspacing=1.0)
        with named_if_unwritable(path):
            save_figure(figure, path)


def _hide_at_the_edge(axes: Any, labels: Iterable[Any]) -> None:
    """Hide labels that the frame would cut."""
    for label in labels:
        across, up = axes.transAxes.inverted().transform(
            axes.transData.transform(label.get_position())
        )
        label.set_visible(0.06 < across < 0.94 and 0.06 < up < 0.94)


def _log_norm() -> Any:
    from matplotlib.colors import LogNorm

    return LogNorm(vmin=1.0, vmax=6.0)


def _mark_designs(axes: Any, plan: Plan) -> None:
    if here := shown_design(plan):
        axes.plot(
            here.x, here.y, "s", color=WARN, mec="white", markersize=5, label="recipe", zorder=6
        )
    best = plan.recommended
    axes.plot(
        best.x,
        best.y,
        "*",
        color="#F0E442",
        mec=STORED,
        markersize=9,
        label="best FIFO buffer",
        zorder=7,
    )


def _plain_log_ticks(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
