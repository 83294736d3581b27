"""Figures of one column width: J over (x, y), and x*, y* and J over μ for several growths and
couplings (paper B).
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.lab.planning.design import Design, Plan
from grpo_replay.lab.planning.theory import (
    PowerGrowth,
    Values,
    best_replay_ratio,
    no_replay_objective,
    objective,
    power_law_optimum,
)
from grpo_replay.storage.atomic import named_if_unwritable
from grpo_replay.terminal.plot_style import COLUMN_INCHES, STORED, WARN, figure_style, save_figure

BANDS = (1.05, 1.10, 1.25, 1.5, 2.0, 4.0)
"""Upper limits of the shades: J relative to the best FIFO buffer."""

GROWTHS = (0.1, 0.2, 0.3, 0.4)
COUPLINGS = (0.0, 0.1, 0.5)
MU_LOW, MU_HIGH, MU_COUNT = 0.5, 50.0, 60

_COLOURS = ("#0072B2", "#009E73", "#E69F00", "#D55E00")
_DASHES = ("-", "--", ":")


def map_range(plan: Plan) -> tuple[float, float, float, float]:
    """(x_low, x_high, y_low, y_high) of a map from x = y = 1 on that shows the plan's buffers."""
    designs = [plan.recommended, *([here] if (here := shown_design(plan)) else [])]
    xs, ys = [1.0, *(design.x for design in designs)], [1.0, *(design.y for design in designs)]
    return max(1.0, min(xs) / 2), 2.5 * max(xs), min(0.5, *ys) / 1.5, 2.5 * max(ys)


def shown_design(plan: Plan) -> Design | None:
    """The recipe's design if the map applies to it: a buffer drawn with replacement alone."""
    return plan.current if plan.is_fifo else None


def relative_objective(plan: Plan, x: Values, y: Values) -> Values:
    """J(x, y) of FIFO buffers, relative to the best of them."""
    inputs = plan.inputs
    terms = inputs.effective_mu, inputs.rho, inputs.growth
    best = plan.recommended
    return objective(x, y, *terms) / objective(best.x, best.y, *terms)


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


def optimum_curve(exponent: float, rho: float) -> list[tuple[float, float, float, float]]:
    """(μ, x*, y*, J* relative to J without replay) over the range of μ."""
    growth, points = PowerGrowth(exponent), []
    for mu in np.geomspace(MU_LOW, MU_HIGH, MU_COUNT).tolist():
        best = power_law_optimum(mu, rho, exponent)
        at_best = objective(best.x, best.y, mu, rho, growth)
        points.append((mu, best.x, best.y, at_best / no_replay_objective(mu, growth)))
    return points


def plot_curves(path: Path) -> None:
    """Three panels over μ, as a PNG or SVG of one column width."""
    labels = ("best horizon x* (steps)", "best replay ratio y*", "J relative to no replay")
    with figure_style() as figure_class:
        figure = figure_class(figsize=(COLUMN_INCHES, 5.2), layout="constrained")
        panels = figure.subplots(3, 1, sharex=True)
        for exponent, colour in zip(GROWTHS, _COLOURS, strict=True):
            for rho, dash in zip(COUPLINGS, _DASHES, strict=True):
                mu, *values = zip(*optimum_curve(exponent, rho), strict=True)
                for axes, column in zip(panels, values, strict=True):
                    axes.plot(mu, column, dash, color=colour, linewidth=0.9)
        for axes, label in zip(panels, labels, strict=True):
            axes.set(xscale="log", ylabel=label)
        panels[0].set_yscale("log")
        panels[1].set_yscale("log")
        panels[2].axhline(1.0, color="black", linewidth=0.5)
        panels[2].set_xlabel("μ: cost of generating a rollout / of training on it")
        _add_legend(figure, panels[0])
        with named_if_unwritable(path):
            save_figure(figure, path)


def _add_legend(figure: Any, axes: Any) -> None:
    nothing = ([math.nan], [math.nan])
    for exponent, colour in zip(GROWTHS, _COLOURS, strict=True):
        axes.plot(*nothing, color=colour, label=f"a = {exponent:g}")
    for rho, dash in zip(COUPLINGS, _DASHES, strict=True):
        axes.plot(*nothing, dash, color="black", label=f"ρ = {rho:g}")
    figure.legend(loc="outside upper center", ncols=4, columnspacing=1.0)
