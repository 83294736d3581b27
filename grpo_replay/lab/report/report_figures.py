"""Figures of a report: medians over seeds with quartile bands, one colour per arm."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from grpo_replay.lab.report.arms import Arm
from grpo_replay.lab.report.collect import Experiment
from grpo_replay.lab.report.costs import Axis
from grpo_replay.lab.report.finished_run import FinishedRun
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


LEGEND_LETTERS = 60
"""Letters that fit into one line of a legend."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its file name, title, caption, height and how it is drawn on axes."""

    name: str
    title: str
    caption: str
    draw: Callable[[Any], None]
    inches: float = 2.1


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
    figures = list(_difference_figures(findings, looks))
    if any(len(run.evaluations) > 1 for arm in trained for run in arm.runs.values()):
        figures += [_accuracy_figure(trained, looks, axis) for axis in axes]
    overlays = (_clip_figure, _staleness_figure, _length_figure)
    return figures + [figure for make in overlays if (figure := make(trained, looks))]


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
        canvas = figure_class(figsize=(COLUMN_INCHES, figure.inches), layout="constrained")
        figure.draw(canvas.add_subplot())
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # laid out once for all formats
        yield canvas


def _difference_figures(findings: Findings, looks: dict[str, _Look]) -> Iterator[Figure]:
    for score, title in (("final", "final avg@k"), ("final_pass_at_k", "final pass@k")):
        rows = [
            (arm.name, difference["mean"])
            for arm in findings.arms
            if score in arm.scores and (difference := arm.scores[score].difference)
        ]
        if rows:
            yield Figure(
                f"difference_{score}",
                f"Difference to {findings.baseline}, {title}",
                "Mean over seeds, paired, with its 95 % interval (bars: one or two seeds); "
                "small dots: quartiles.",
                partial(_draw_differences, rows=rows, looks=looks, base=findings.baseline),
                0.75 + 0.24 * len(rows),
            )


def _draw_differences(axes: Any, rows: Sequence[Any], looks: dict[str, _Look], base: str) -> None:
    for place, (name, each) in enumerate(reversed(rows)):
        colour = looks[name].colour
        if each.interval is None:
            axes.plot(100 * np.array(each.values), [place] * len(each.values), "|", color=colour)
        else:
            axes.plot(100 * np.array(each.interval), [place] * 2, color=colour, linewidth=1.4)
        axes.plot([100 * each.low, 100 * each.high], [place] * 2, ".", color=colour, markersize=2.5)
        axes.plot(100 * each.mean, place, "o", color=colour, markersize=4)
    axes.axvline(0, color=GREY, linewidth=0.8)
    names = [name for name, _ in reversed(rows)]
    axes.set_yticks(range(len(rows)), names, parse_math=False)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(True, axis="x")
    axes.set_xlabel(f"points above {base}", parse_math=False)


def _accuracy_figure(arms: Sequence[Arm], looks: dict[str, _Look], axis: Axis) -> Figure:
    return Figure(
        f"accuracy_by_{axis.key}",
        f"Accuracy over {axis.label.split(',')[0]}",
        "Mean avg@k over benchmarks: median and quartiles over seeds at every evaluation, at the "
        "median cost.",
        lambda axes: _draw_accuracy(axes, arms, looks, axis),
    )


def _draw_accuracy(axes: Any, arms: Sequence[Arm], looks: dict[str, _Look], axis: Axis) -> None:
    for arm in arms:
        runs = list(arm.runs.values())
        steps = _common_steps(runs)
        costs = np.median([axis.total(run)[steps] for run in runs], axis=0)
        values_ST = 100 * np.array(
            [[run.evaluations[step].sampled.mean.avg_at_k for step in steps] for run in runs]
        )
        _draw_band(axes, costs, values_ST, arm.name, looks[arm.name], marker="o")
    axes.set(xlabel=axis.label, ylabel="held-out accuracy, %")
    _compact_numbers(axes.xaxis)
    _legend(axes, arms)


def _common_steps(runs: Sequence[FinishedRun]) -> list[int]:
    """The steps that every run of an arm evaluated."""
    return [step for step in runs[0].evaluations if all(step in r.evaluations for r in runs)]


def _draw_band(
    axes: Any, places: np.ndarray, values_ST: np.ndarray, label: str | None, look: _Look,
    marker: str = "", line: str | None = None,
) -> None:  # fmt: skip
    """The median over seeds, and the quartiles as a band if there are several seeds."""
    low, middle, high = np.nanquantile(values_ST, [0.25, 0.5, 0.75], axis=0)
    if len(values_ST) > 1:
        axes.fill_between(places, low, high, color=look.colour, alpha=0.18, linewidth=0)
    style = line or look.line
    axes.plot(places, middle, style, marker=marker, color=look.colour, label=label)


def _clip_figure(arms: Sequence[Arm], looks: dict[str, _Look]) -> Figure | None:
    metrics = (("replay/clip_fraction", "-"), ("fresh/clip_fraction", ":"))
    caption = "Share of tokens whose gradient was clipped: replayed (solid) and fresh (dotted)."
    return _overlay(
        "clip_fraction", "Clip fraction", caption, "clipped tokens, %", 100, metrics, arms, looks
    )


def _staleness_figure(arms: Sequence[Arm], looks: dict[str, _Look]) -> Figure | None:
    caption = "Mean age of the replayed rollouts, in training steps."
    metrics = (("replay/age_mean", "-"),)
    return _overlay("staleness", "Staleness", caption, "age at use, steps", 1, metrics, arms, looks)


def _length_figure(arms: Sequence[Arm], looks: dict[str, _Look]) -> Figure | None:
    caption = "Mean length of the completions generated in training."
    metrics = (("completions/mean_length", "-"),)
    return _overlay("length", "Length", caption, "tokens", 1, metrics, arms, looks)


def _overlay(
    name: str, title: str, caption: str, label: str, unit: float,
    metrics: Sequence[tuple[str, str]], arms: Sequence[Arm], looks: dict[str, _Look],
) -> Figure | None:  # fmt: skip
    """Metrics of single steps over training; None if no run has them."""
    if not any(_has(arm, metric) for arm in arms for metric, _ in metrics):
        return None
    shown = [arm for arm in arms if any(_has(arm, metric) for metric, _ in metrics)]

    def draw(axes: Any) -> None:
        for arm in shown:
            known = [(metric, line) for metric, line in metrics if _has(arm, metric)]
            for place, (metric, line) in enumerate(known):
                label_once = arm.name if place == 0 else None
                _draw_metric(axes, arm, metric, unit, label_once, looks[arm.name], line)
        axes.set(xlabel="training step", ylabel=label)
        if name != "length":
            axes.set_ylim(bottom=0)
        _legend(axes, shown)

    return Figure(name, title, f"{caption} Median and quartiles over seeds.", draw)


def _has(arm: Arm, metric: str) -> bool:
    return any(np.isfinite(run.log.column(metric)).any() for run in arm.runs.values())


def _draw_metric(
    axes: Any, arm: Arm, metric: str, unit: float, label: str | None, look: _Look, line: str
) -> None:
    runs = list(arm.runs.values())
    steps = min(len(run.log) for run in runs)
    edges = np.unique(np.linspace(0, steps, min(WINDOWS, steps) + 1).astype(int))
    values_SW = np.array([_window_means(run.log.column(metric)[:steps], edges) for run in runs])
    known = np.isfinite(values_SW).any(axis=0)
    centres = (edges[:-1] + edges[1:] + 1) / 2
    _draw_band(axes, centres[known], unit * values_SW[:, known], label, look, line=line)


def _window_means(values_T: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The mean of the defined values between consecutive edges; NaN where there are none."""
    known = np.isfinite(values_T)
    sums = np.add.reduceat(np.where(known, values_T, 0.0), edges[:-1])
    counts = np.add.reduceat(known.astype(float), edges[:-1])
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)


def _compact_numbers(axis: Any) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(EngFormatter(sep=""))


def _legend(axes: Any, arms: Sequence[Arm]) -> None:
    """A legend above the data, as many arms to a line as fit, at most three."""
    longest = max(len(arm.name) for arm in arms)
    columns = max(1, min(3, LEGEND_LETTERS // (longest + 5)))
    legend = axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2,
        columnspacing=1.0,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a name is no formula
