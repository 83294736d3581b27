"""The learning curve of a run: held-out accuracy over training steps."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.evaluation.comparison import are_comparable
from grpo_replay.evaluation.evaluation_report import EvaluationReport, read_report
from grpo_replay.storage.atomic import written_whole
from grpo_replay.terminal.plot_style import COLUMN_INCHES, FRESH, GREY, STORED, figure_style

LABEL_DISTANCE = 4.5
"""Minimum distance between benchmark labels, in percentage points."""

_STEP_FILE = re.compile(r"step_(\d+)\.json")


def read_curve(folder: Path) -> dict[int, EvaluationReport]:
    """The evaluations in a run's `eval/` by training step, in order, without per-sample rows.

    Raises EvaluationFileError for a damaged file.
    """
    found = {
        int(match.group(1)): path
        for path in folder.glob("step_*.json")
        if (match := _STEP_FILE.fullmatch(path.name))
    }
    return {step: read_report(found[step], with_samples=False) for step in sorted(found)}


def plot_curve(folder: Path) -> Path | None:
    """Write `curve.png` to a run's `eval/`; returns its path, or None for fewer than two points.

    The band is the 95 % interval of the mean. If the run was resumed with other
    benchmarks or settings, only evaluations comparable with the last are drawn, and the title gives
    the number of the others.
    """
    reports = read_curve(folder)
    if not reports:
        return None
    last = list(reports.values())[-1]
    shown = {step: report for step, report in reports.items() if are_comparable(report, last)}
    path = folder / "curve.png"
    if len(shown) < 2:
        path.unlink(missing_ok=True)  # it shows other settings
        return None
    with figure_style() as figure_class:
        figure = figure_class(figsize=(COLUMN_INCHES, 2.4), layout="constrained")
        _draw(figure.add_subplot(), shown, len(reports) - len(shown))
        with written_whole(path) as temporary:
            figure.savefig(temporary, format="png")
    return path


def _draw(axes: Any, reports: dict[int, EvaluationReport], left_out: int) -> None:
    steps = list(reports)
    means = [report.sampled.mean for report in reports.values()]
    _draw_benchmarks(axes, reports)
    bounds = [mean.avg_at_k_interval for mean in means]
    if None not in bounds:  # a benchmark of a single problem
        low, high = 100 * np.array(bounds).T
        axes.fill_between(steps, low, high, color=STORED, alpha=0.2, linewidth=0)
    axes.plot(steps, [100 * mean.avg_at_k for mean in means], "o-", color=STORED, label="mean")
    greedy = {s: 100 * r.greedy.mean.avg_at_k for s, r in reports.items() if r.greedy}
    if greedy:
        axes.plot(list(greedy), list(greedy.values()), "s--", color=FRESH, label="mean, greedy")
    title = "evaluation" + (f" ({left_out} under other settings left out)" if left_out else "")
    axes.set(xlabel="training step", ylabel="held-out accuracy, %", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)


def _draw_benchmarks(axes: Any, reports: dict[int, EvaluationReport]) -> None:
    """One thin line per benchmark, labelled at its end; labels do not overlap."""
    last_step, last = list(reports.items())[-1]
    height = None
    for name, result in sorted(last.sampled.benchmarks.items(), key=lambda item: item[1].avg_at_k):
        values = [100 * r.sampled.benchmarks[name].avg_at_k for r in reports.values()]
        axes.plot(list(reports), values, color=GREY, linewidth=0.6)
        end = 100 * result.avg_at_k
        height = end if height is None else max(end, height + LABEL_DISTANCE)
        title = last.settings["benchmarks"].get(name, {}).get("title", name)
        axes.text(last_step, height, f"  {title}", color=GREY, fontsize=5.5, va="center")
