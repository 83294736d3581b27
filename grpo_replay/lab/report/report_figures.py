"""Figures of a report. Each arm has a colour; curves are medians over seeds, with quartile bands,
or with every seed as a thin line if there are fewer than five."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from grpo_replay.lab.report.collect import Arm, Experiment
from grpo_replay.lab.report.costs import Axis, break_even, cost_ratio, rollouts_to_reach
from grpo_replay.lab.report.finished_run import Outcome
from grpo_replay.lab.report.measure import Document, shown_target, shown_title
from grpo_replay.lab.report.two_level import FEWEST_SEEDS
from grpo_replay.terminal.plot_style import (
    COLUMN_INCHES,
    FRESH,
    GREY,
    REPLAYED,
    STORED,
    WARN,
    figure_style,
)

# The palette of Okabe and Ito; the baseline is grey.
COLOURS = (STORED, REPLAYED, FRESH, "#CC79A7", WARN, "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")

FEWEST_FOR_BANDS = 5
"""Minimum number of seeds for quartile bands; with fewer, every seed is a line."""

OVER_SEEDS = f"Median and quartiles over seeds; of fewer than {FEWEST_FOR_BANDS}, every seed."

BEYOND = 1e9
"""The relative cost drawn for an interval without an upper bound."""

LEGEND_LETTERS = 60
"""Number of letters that fit into one line of a legend."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: file name, title, caption, and a function that draws it on axes."""

    name: str
    title: str
    caption: str
    draw: Callable[[Any], None]


Look = tuple[str, str]
"""Colour and line style."""


def report_figures(
    experiment: Experiment, document: Document, axes: Sequence[Axis]
) -> list[Figure]:
    """Return figures with data: accuracy over steps, compute, seconds; cost over μ."""
    looks = _looks(experiment)
    trained = [arm for arm in experiment.arms if arm.runs]
    figures: list[Figure] = []
    if any(len(run.evaluations) > 1 for arm in trained for run in arm.runs.values()):
        figures += [
            _accuracy_figure(trained, looks, axis, document)
            for axis in axes
            if axis.key != "generated_tokens"
        ]
    return figures + _cost_ratio_figure(experiment, looks, document)


def _looks(experiment: Experiment) -> dict[str, Look]:
    """Choose a colour per arm; after the last colour, the next line style."""
    styles = cycle([(colour, line) for line in LINES for colour in COLOURS])
    return {
        arm.name: (GREY, "-") if arm is experiment.baseline else next(styles)
        for arm in experiment.arms
    }


@contextmanager
def drawn(figure: Figure) -> Iterator[Any]:
    """Draw a figure in `figure_style`; yields the matplotlib figure."""
    with figure_style() as figure_class:
        canvas = figure_class(figsize=(COLUMN_INCHES, 2.1), layout="constrained")
        figure.draw(canvas.add_subplot())
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # laid out once for all formats
        yield canvas


def _accuracy_figure(
    arms: Sequence[Arm], looks: dict[str, Look], axis: Axis, document: Document
) -> Figure:
    """Makes the figure of every arm's accuracy over the median cost on an axis."""
    outcome = Outcome(**document["shown"])

    def draw(axes: Any) -> None:
        """Draws each arm at the steps that all its runs evaluated."""
        from matplotlib.ticker import EngFormatter

        for arm in arms:
            runs = list(arm.runs.values())
            steps = [s for s in runs[0].evaluations if all(s in run.evaluations for run in runs)]
            costs = np.median([axis.total(run)[steps] for run in runs], axis=0)
            values_ST = np.array([[outcome.of(run.evaluations[s]) for s in steps] for run in runs])
            _draw_seeds(axes, costs, 100 * values_ST, arm.name, looks[arm.name], marker="o")
        axes.set(xlabel=axis.label, ylabel="held-out accuracy, %")
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        _legend(axes)

    caption = f"{shown_title(document)}, at every evaluation, at the median cost. {OVER_SEEDS}"
    title = f"Accuracy over {axis.label.split(',')[0]}"
    return Figure(f"accuracy_by_{axis.key}", title, caption, draw)


def _draw_seeds(
    axes: Any, costs: np.ndarray, values_ST: np.ndarray, label: str, look: Look, marker: str = ""
) -> None:
    """Draw the median over seeds, with quartiles as a band, or every seed as a thin line if few."""
    colour, line = look
    low, middle, high = np.quantile(values_ST, [0.25, 0.5, 0.75], axis=0)
    if 1 < len(values_ST) < FEWEST_FOR_BANDS:
        for values_T in values_ST:
            axes.plot(costs, values_T, line, color=colour, linewidth=0.4, alpha=0.6)
    elif len(values_ST) > 1:
        axes.fill_between(costs, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(costs, middle, line, marker=marker, color=colour, label=label)


def _cost_ratio_figure(
    experiment: Experiment, looks: dict[str, Look], document: Document
) -> list[Figure]:
    """Makes the figure of each arm's cost to the table's accuracy, relative to the baseline's, over
    μ; empty if no arm reaches that accuracy."""
    base, target, outcome = (
        experiment.baseline,
        shown_target(document),
        Outcome(**document["shown"]),
    )
    spent = {
        arm.name: rollouts_to_reach(arm.paired_with(base), target, outcome)
        for arm in experiment.arms
        if arm is not base and target is not None
    }
    spent = {name: spent_S22 for name, spent_S22 in spent.items() if spent_S22[:, 1].any()}
    if target is None or not spent:
        return []
    marked_mu = [mu for mu in (document["mu"]["measured"], *document["mu"]["given"]) if mu]

    def draw(axes: Any) -> None:
        draw_cost_ratios(axes, spent, looks, marked_mu)
        axes.axhline(1.0, color=looks[base.name][0], linewidth=0.8)
        axes.set_ylabel(f"compute, relative to {base.name}")
        _legend(axes)

    caption = (
        f"Compute to {100 * target:.1f} % relative to {base.name}, if generating a rollout costs μ "
        "times what training on it does: the ratio of the means over the seeds in which both "
        f"reached it, with its 95 % interval from {FEWEST_SEEDS} seeds on. A dot is where an arm "
        "begins or ceases to pay. Dotted: μ measured or given."
    )
    return [Figure("cost_by_mu", "Cost of an accuracy over μ", caption, draw)]


def draw_cost_ratios(
    axes: Any,
    spent: Mapping[str, np.ndarray],
    looks: Mapping[str, Look],
    marked_mu: Sequence[float],
) -> None:
    """Draw each arm's cost over the baseline's by μ, with its interval and a dot at break-even.
    `spent` has each arm's [S, 2, 2] of `rollouts_to_reach`; lines mark `marked_mu`."""
    mu_M = np.geomspace(min([0.1, *marked_mu]), max([100.0, *marked_mu]), 121)
    highest = 1.0
    for name, spent_S22 in spent.items():
        colour, line = looks[name]
        ratio_M, bounds = zip(*(cost_ratio(spent_S22, mu) for mu in mu_M))
        axes.plot(mu_M, ratio_M, line, color=colour, label=name)
        if bounds[0] is not None:
            low_M, high_M = np.nan_to_num(np.array(bounds).T, posinf=BEYOND)
            axes.fill_between(mu_M, low_M, high_M, color=colour, alpha=0.18, linewidth=0)
        even = break_even(spent_S22)
        if even is not None and even["mu"] is not None and mu_M[0] <= even["mu"] <= mu_M[-1]:
            axes.plot(even["mu"], 1.0, "o", color=colour, markersize=4)
        highest = max(highest, *ratio_M)
    for mu in marked_mu:
        axes.axvline(mu, color=GREY, linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="μ, generating a rollout over training on it")
    axes.set(xlim=(mu_M[0], mu_M[-1]), ylim=(0.0, 1.15 * highest))
    axes.xaxis.set_major_formatter("{x:g}")


def _legend(axes: Any) -> None:
    """Draw a legend above the data, with up to three arms per line."""
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, min(3, LEGEND_LETTERS // (max(map(len, names)) + 5)))
    axes.legend(
        handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2,
        columnspacing=1.0,
    )  # fmt: skip
