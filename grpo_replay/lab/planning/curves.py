"""Draws x*, y* and the relative J over μ, for several growths a and couplings ρ (paper B)."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.lab.planning.theory import (
    PowerGrowth,
    no_replay_objective,
    objective,
    power_law_optimum,
)
from grpo_replay.storage.atomic import named_if_unwritable
from grpo_replay.terminal.plot_style import COLUMN_INCHES, figure_style, save_figure

GROWTHS = (0.1, 0.2, 0.3, 0.4)
COUPLINGS = (0.0, 0.1, 0.5)
MU_LOW, MU_HIGH, MU_COUNT = 0.5, 50.0, 60

_COLOURS = ("#0072B2", "#009E73", "#E69F00", "#D55E00")
_DASHES = ("-", "--", ":")


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
