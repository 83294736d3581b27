"""Figures of a report: one colour per arm; medians over seeds, with quartile bands, or with every
seed as points if there are fewer than five."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from grpo_replay.lab.report.collect import Arm, Experiment
from grpo_replay.lab.report.costs import Axis
from grpo_replay.lab.report.finished_run import AGE_STEPS, Outcome
from grpo_replay.lab.report.report_findings import Findings
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
"""Metrics of single steps are averaged over at most this many windows of consecutive steps."""


FEWEST_FOR_BANDS = 5
"""With fewer seeds, each is shown as points instead of quartiles."""

LEGEND_LETTERS = 60
"""Letters that fit into one line of a legend."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its file name, title, caption and how it is drawn on axes."""

    name: str
    title: str
    caption: str
    draw: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Overlay:
    """A figure of a metric of single steps over training."""

    name: str
    title: str
    caption: str
    label: str
    metric: str
    unit: float = 1.0
    from_zero: bool = True


OVERLAYS = (
    Overlay("reward", "Reward", "Mean reward of the generated completions.", "reward",
            "reward", from_zero=False),
    Overlay("entropy", "Entropy", "Mean entropy of the policy's tokens.", "nats a token",
            "entropy"),
    Overlay("clip_fraction_replayed", "Clip fraction of replayed tokens",
            "Share of replayed tokens whose gradient was clipped.", "clipped tokens, %",
            "replay/clip_fraction", unit=100),
    Overlay("clip_fraction_fresh", "Clip fraction of fresh tokens",
            "Share of fresh tokens whose gradient was clipped.", "clipped tokens, %",
            "fresh/clip_fraction", unit=100),
    Overlay("staleness", "Staleness", "Mean age of the replayed rollouts.",
            "age at use, steps", AGE_STEPS),
    Overlay("length", "Length", "Mean length of the completions generated in training.", "tokens",
            "completions/mean_length", from_zero=False),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Look:
    colour: str
    line: str


def report_figures(
    experiment: Experiment, findings: Findings, axes: Sequence[Axis]
) -> list[Figure]:
    """The figures that have data, in reading order."""
    looks = _looks(experiment)
    trained = [arm for arm in experiment.arms if arm.recipe is not None]
    figures: list[Figure] = []
    if any(len(run.evaluations) > 1 for arm in trained for run in arm.runs.values()):
        outcome = Outcome(findings.shown, findings.metric)
        shown = findings.outcome_title
        figures += [_accuracy_figure(trained, looks, axis, outcome, shown) for axis in axes]
    return figures + [each for one in OVERLAYS if (each := _overlay(one, trained, looks))]


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
    arms: Sequence[Arm], looks: dict[str, _Look], axis: Axis, outcome: Outcome, shown: str
) -> Figure:
    return Figure(
        f"accuracy_by_{axis.key}",
        f"Accuracy over {axis.label.split(',')[0]}",
        f"{shown}, at every evaluation, at the median cost. {_over_seeds(arms)}",
        lambda axes: _draw_accuracy(axes, arms, looks, axis, outcome),
    )


def _over_seeds(arms: Sequence[Arm]) -> str:
    """What lines, bands and points are."""
    seeds = [len(arm.runs) for arm in arms]
    words = ["quartiles"] if max(seeds) >= FEWEST_FOR_BANDS else []
    words += ["every seed as points"] if 1 < min(seeds) < FEWEST_FOR_BANDS else []
    return f"Median over seeds{''.join(f', {word}' for word in words)}."


def _draw_accuracy(
    axes: Any, arms: Sequence[Arm], looks: dict[str, _Look], axis: Axis, outcome: Outcome
) -> None:
    for arm in arms:
        runs = list(arm.runs.values())
        # the steps that every run of the arm evaluated
        steps = [step for step in runs[0].evaluations if all(step in r.evaluations for r in runs)]
        costs = np.median([axis.total(run)[steps] for run in runs], axis=0)
        values_ST = 100 * np.array(
            [[outcome.of(run.evaluations[step]) for step in steps] for run in runs]
        )
        _draw_band(axes, costs, values_ST, arm.name, looks[arm.name], marker="o")
    axes.set(xlabel=axis.label, ylabel="held-out accuracy, %")
    _compact_numbers(axes.xaxis)
    _legend(axes)


def _draw_band(
    axes: Any, places: np.ndarray, values_ST: np.ndarray, label: str, look: _Look, marker: str = ""
) -> None:
    """The median over seeds, with the quartiles as a band, or with every seed as points."""
    low, middle, high = np.nanquantile(values_ST, [0.25, 0.5, 0.75], axis=0)
    if 1 < len(values_ST) < FEWEST_FOR_BANDS:
        for each_T in values_ST:
            axes.plot(places, each_T, ".", color=look.colour, markersize=1.8, alpha=0.6)
    elif len(values_ST) > 1:
        axes.fill_between(places, low, high, color=look.colour, alpha=0.18, linewidth=0)
    axes.plot(places, middle, look.line, marker=marker, color=look.colour, label=label)


def _overlay(what: Overlay, arms: Sequence[Arm], looks: dict[str, _Look]) -> Figure | None:
    """A metric of single steps over training; None if no run has it."""
    shown = [arm for arm in arms if _has(arm, what.metric)]
    if not shown:
        return None

    def draw(axes: Any) -> None:
        for arm in shown:
            _draw_metric(axes, arm, what, looks[arm.name])
        axes.set(xlabel="training step", ylabel=what.label)
        if what.from_zero:
            axes.set_ylim(bottom=0)
        _legend(axes)

    return Figure(what.name, what.title, f"{what.caption} {_over_seeds(shown)}", draw)


def _has(arm: Arm, metric: str) -> bool:
    return any(np.isfinite(run.log.column(metric)).any() for run in arm.runs.values())


def _draw_metric(axes: Any, arm: Arm, what: Overlay, look: _Look) -> None:
    runs = list(arm.runs.values())
    steps = min(len(run.log) for run in runs)
    edges = np.unique(np.linspace(0, steps, min(WINDOWS, steps) + 1).astype(int))
    columns = [run.log.column(what.metric)[:steps] for run in runs]
    values_SW = np.array([_window_means(column, edges) for column in columns])
    known = np.isfinite(values_SW).any(axis=0)
    centres = (edges[:-1] + edges[1:] + 1) / 2
    _draw_band(axes, centres[known], what.unit * values_SW[:, known], arm.name, look)


def _window_means(values_T: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The mean of the defined values between consecutive edges; NaN where there are none."""
    known = np.isfinite(values_T)
    sums = np.add.reduceat(np.where(known, values_T, 0.0), edges[:-1])
    counts = np.add.reduceat(known.astype(float), edges[:-1])
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)


def _compact_numbers(axis: Any) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5))
    large = EngFormatter(sep="")
    axis.set_major_formatter(FuncFormatter(lambda x, _: large(x) if abs(x) >= 1 else f"{x:g}"))


def _legend(axes: Any) -> None:
    """A legend above the data, as many arms to a line as fit, at most three. A long name is folded;
    of one that is longer than two lines the middle is left out."""
    handles, names = axes.get_legend_handles_labels()
    labels = [_folded(name) for name in names]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(3, LEGEND_LETTERS // (longest + 5)))
    legend = axes.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2,
        columnspacing=1.0,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a name is no formula


def _folded(name: str) -> str:
    """The name in at most two lines of a legend."""
    if len(name) > 2 * LEGEND_LETTERS:
        name = f"{name[:LEGEND_LETTERS]}…{name[1 - LEGEND_LETTERS :]}"
    return "\n".join(name[at : at + LEGEND_LETTERS] for at in range(0, len(name), LEGEND_LETTERS))
