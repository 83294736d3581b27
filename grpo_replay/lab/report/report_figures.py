"""Figures of a report: one colour per arm; medians over seeds, with quartile bands, or with every
seed as a thin line if there are fewer than five."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from grpo_replay.lab.report.collect import Arm, Experiment
from grpo_replay.lab.report.costs import Axis, rollouts_to_reach
from grpo_replay.lab.report.finished_run import FinishedRun, Outcome
from grpo_replay.lab.report.measure import Document
from grpo_replay.lab.report.report_tables import shown_title
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

WINDOWS = 40
"""The entropy of single steps is averaged over at most this many windows of consecutive steps."""

FEWEST_FOR_BANDS = 5
"""With fewer seeds, each is shown as a line instead of quartiles."""

LEGEND_LETTERS = 60
"""Letters that fit into one line of a legend."""

COST_RATIOS = np.geomspace(0.1, 100, 200)
"""The μ of the figure of costs."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its file name, title, caption and how it is drawn on axes."""

    name: str
    title: str
    caption: str
    draw: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class _Look:
    colour: str
    line: str


def report_figures(experiment: Experiment, found: Document, axes: Sequence[Axis]) -> list[Figure]:
    """The figures that have data: accuracy over steps, compute and seconds, the cost ratio over μ,
    and entropy over training."""
    looks = _looks(experiment)
    trained = [arm for arm in experiment.arms if arm.recipe is not None]
    figures: list[Figure] = []
    if any(len(run.evaluations) > 1 for arm in trained for run in arm.runs.values()):
        figures += [
            _accuracy_figure(trained, looks, axis, found)
            for axis in axes
            if axis.key != "generated_tokens"
        ]
    figures += _cost_figure(experiment, found, looks)
    shown = [arm for arm in trained if all(_has_entropy(run) for run in arm.runs.values())]
    return [*figures, *([_entropy_figure(shown, looks)] if shown else [])]


def _looks(experiment: Experiment) -> dict[str, _Look]:
    """A colour for each arm; after the last colour, the next line style."""
    styles = cycle([(colour, line) for line in LINES for colour in COLOURS])
    return {
        arm.name: _Look(GREY, "-") if arm is experiment.baseline else _Look(*next(styles))
        for arm in experiment.arms
    }


@contextmanager
def drawn(figure: Figure) -> Iterator[Any]:
    """Yields the drawn matplotlib figure, inside our style."""
    with figure_style() as figure_class:
        canvas = figure_class(figsize=(COLUMN_INCHES, 2.1), layout="constrained")
        figure.draw(canvas.add_subplot())
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # laid out once for all formats
        yield canvas


def _accuracy_figure(
    arms: Sequence[Arm], looks: dict[str, _Look], axis: Axis, found: Document
) -> Figure:
    outcome = Outcome(**found["shown"])

    def draw(axes: Any) -> None:
        for arm in arms:
            runs = list(arm.runs.values())
            # the steps that every run of the arm evaluated
            steps = [s for s in runs[0].evaluations if all(s in run.evaluations for run in runs)]
            costs = np.median([axis.total(run)[steps] for run in runs], axis=0)
            values_ST = np.array([[outcome.of(run.evaluations[s]) for s in steps] for run in runs])
            _draw_seeds(axes, costs, 100 * values_ST, arm.name, looks[arm.name], marker="o")
        axes.set(xlabel=axis.label, ylabel="held-out accuracy, %")
        _compact_numbers(axes.xaxis)
        _legend(axes)

    caption = f"{shown_title(found)}, at every evaluation, at the median cost. {_over_seeds(arms)}"
    title = f"Accuracy over {axis.label.split(',')[0]}"
    return Figure(f"accuracy_by_{axis.key}", title, caption, draw)


def _over_seeds(arms: Sequence[Arm]) -> str:
    """What thick lines, bands and thin lines are."""
    seeds = [len(arm.runs) for arm in arms]
    words = ["quartiles"] if max(seeds) >= FEWEST_FOR_BANDS else []
    words += ["every seed as a thin line"] if 1 < min(seeds) < FEWEST_FOR_BANDS else []
    return f"Median over seeds{''.join(f', {word}' for word in words)}."


def _draw_seeds(
    axes: Any, places: np.ndarray, values_ST: np.ndarray, label: str, look: _Look, marker: str = ""
) -> None:
    """The median over seeds, with the quartiles as a band, or with every seed as a thin line."""
    low, middle, high = np.nanquantile(values_ST, [0.25, 0.5, 0.75], axis=0)
    if 1 < len(values_ST) < FEWEST_FOR_BANDS:
        for each_T in values_ST:
            axes.plot(places, each_T, look.line, color=look.colour, linewidth=0.4, alpha=0.6)
    elif len(values_ST) > 1:
        axes.fill_between(places, low, high, color=look.colour, alpha=0.18, linewidth=0)
    axes.plot(places, middle, look.line, marker=marker, color=look.colour, label=label)


def _cost_figure(experiment: Experiment, found: Document, looks: dict[str, _Look]) -> list[Figure]:
    """The cost to the highest target over that of the baseline, by μ, of arms that reached it."""
    targets = [arm["reach"][-1]["accuracy"] for arm in found["arms"] if arm["reach"]]
    if not targets:
        return []
    target, mu = targets[0], found["mu"]["measured"]
    outcome, baseline = Outcome(**found["shown"]), experiment.baseline
    lines = {}
    for arm in experiment.arms:
        pairs = [(run, baseline.runs[s]) for s, run in arm.runs.items() if s in baseline.runs]
        spent_S22 = rollouts_to_reach(pairs, target, outcome)
        if arm is not baseline and len(spent_S22):
            (trained, generated), (of_base, of_base_generated) = spent_S22.mean(axis=0)
            lines[arm.name] = (trained + COST_RATIOS * generated) / (
                of_base + COST_RATIOS * of_base_generated
            )

    def draw(axes: Any) -> None:
        axes.axhline(1, color=GREY, linewidth=0.8)
        for name, ratio in lines.items():
            axes.plot(COST_RATIOS, ratio, looks[name].line, color=looks[name].colour, label=name)
        if mu is not None:
            axes.axvline(mu, color=GREY, linewidth=0.8, linestyle=":")
        axes.set(xscale="log", xlabel="μ: cost of generating a rollout / training on it")
        axes.xaxis.set_major_formatter(lambda mu, _: f"{mu:g}")
        axes.set_ylabel(f"cost relative to {found['baseline']}")
        _legend(axes)

    caption = (
        f"Cost to {100 * target:.1f} %, means over the seeds in which both reached it. Below 1 "
        "an arm is cheaper than the baseline."
    )
    if mu is not None:
        caption += f" Dotted: the measured μ, {mu:.3g}."
    return [Figure("cost_by_mu", "Cost to an accuracy by μ", caption, draw)] if lines else []


def _entropy_figure(arms: Sequence[Arm], looks: dict[str, _Look]) -> Figure:
    def draw(axes: Any) -> None:
        for arm in arms:
            runs = list(arm.runs.values())
            steps = min(len(run.log) for run in runs)
            windows = np.array_split(np.arange(steps), min(WINDOWS, steps))
            columns = [run.log.column("entropy") for run in runs]
            values_SW = np.array([[np.nanmean(each[w]) for w in windows] for each in columns])
            centres = np.array([window.mean() + 1 for window in windows])
            _draw_seeds(axes, centres, values_SW, arm.name, looks[arm.name])
        axes.set(xlabel="training step", ylabel="nats a token")
        axes.set_ylim(bottom=0)
        _legend(axes)

    caption = f"Mean entropy of the policy's tokens. {_over_seeds(arms)}"
    return Figure("entropy", "Entropy", caption, draw)


def _has_entropy(run: FinishedRun) -> bool:
    return bool(np.isfinite(run.log.column("entropy")).any())


def _compact_numbers(axis: Any) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5))
    large = EngFormatter(sep="")
    axis.set_major_formatter(FuncFormatter(lambda x, _: large(x) if abs(x) >= 1 else f"{x:g}"))


def _legend(axes: Any) -> None:
    """A legend above the data, as many arms to a line as fit, at most three."""
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, min(3, LEGEND_LETTERS // (max(map(len, names)) + 5)))
    legend = axes.legend(
        handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2,
        columnspacing=1.0,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a name is no formula
