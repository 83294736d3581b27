"""The forms of a report: terminal, Markdown, figures and the page."""

import math
import re
import socket
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from commands import run_report as run
from matplotlib.figure import Figure
from rich.console import Console
from small_runs.experiments import BENCHMARKS, Size, write_run, write_sweep

from grpo_replay.cli.report_command import print_report
from grpo_replay.errors import OutputDirectoryError, UsageError
from grpo_replay.lab.report.collect import collect
from grpo_replay.lab.report.costs import cost_ratio, usable_axes
from grpo_replay.lab.report.finished_run import Outcome
from grpo_replay.lab.report.measure import measure
from grpo_replay.lab.report.report_figures import draw_cost_ratios, drawn, report_figures
from grpo_replay.lab.report.report_files import report_table, verdict

ARMS = {
    "grpo": (["replay.preset=grpo"], 0.1),
    "ours": (["replay.preset=ours"], 0.3),
    "ratio-1": (["replay.preset=ours", "replay.ratio=1"], 0.2),
    "alpha-1": (["replay.preset=ours", "replay.priority_exponent=1"], 0.2),
    "both": (["replay.preset=ours", "replay.ratio=1", "replay.priority_exponent=1"], 0.2),
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "s<x>_1", ARMS, (1, 2))


@pytest.fixture(scope="module")
def findings(sweep) -> dict:
    return measure(collect([str(sweep)], "ours"), [0.4], [5.28])


@pytest.fixture(scope="module")
def written(sweep, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "report"
    run([str(sweep)], "ours", output=str(folder), mu=[5.28], reach=[40.0])
    return folder


def test_every_figure_is_written_as_pdf_and_svg(written):
    names = {file.stem for file in (written / "figures").iterdir()}
    assert names >= {
        "accuracy_by_steps", "accuracy_by_compute_5.28", "accuracy_by_seconds", "cost_by_mu",
    }  # fmt: skip
    for name in names:
        pdf = (written / "figures" / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF") and b"/MediaBox [ 0 0 237.6" in pdf  # 3.3 inches
        ElementTree.parse(written / "figures" / f"{name}.svg")
    text = (written / "report.md").read_text()
    assert (
        text.splitlines()[2].startswith("**against ours, ")
        and "| − ours at equal rollouts |" in text
    )


def test_every_arm_has_a_line_of_its_own_look_and_a_legend_entry(sweep, findings):
    experiment = collect([str(sweep)], "ours")
    many = tuple(replace(experiment.arms[1], name=f"arm-{number}") for number in range(15))
    experiment = replace(experiment, arms=many, baseline=many[0])
    names = [arm.name for arm in many]
    figure = report_figures(experiment, findings, usable_axes(experiment.runs, ()))[0]
    with drawn(figure) as canvas:
        axes = canvas.axes[0]
        lines = [line for line in axes.lines if line.get_label() in names]
        looks = {(line.get_color(), line.get_linestyle()) for line in lines}
        assert len(looks) == len(lines) == len(many)
        assert [text.get_text() for text in axes.get_legend().get_texts()] == names


def test_the_base_and_one_evaluation_are_a_curve(tmp_path):
    folder = write_run(tmp_path / "run", [], seed=1, gain=0.1, size=Size(steps=4, every=4))
    experiment = collect([str(folder)])
    figures = report_figures(experiment, measure(experiment), usable_axes(experiment.runs, ()))
    assert "accuracy_by_steps" in [figure.name for figure in figures]


def test_a_line_over_mu_for_every_arm_that_reached_the_accuracy(sweep, findings):
    experiment = collect([str(sweep)], "ours")
    figures = report_figures(experiment, findings, usable_axes(experiment.runs, ()))
    with drawn(next(each for each in figures if each.name == "cost_by_mu")) as canvas:
        axes = canvas.axes[0]
        lines = {line.get_label(): line for line in axes.lines}
        marks = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
        assert [1, 1] in [list(line.get_ydata()) for line in axes.lines]  # the baseline
    assert marks == [findings["mu"]["measured"], 5.28]
    for arm in findings["arms"]:
        even = arm["reach"][-1]["break_even"]
        assert (even is not None) == (arm["name"] in lines)
        if even and even["mu"] is not None:
            ratio = np.interp(even["mu"], *lines[arm["name"]].get_data())
            assert ratio == pytest.approx(1, abs=0.01)
    assert measure(experiment, [0.99])["arms"][0]["reach"][0]["break_even"] is None
    none = report_figures(experiment, measure(experiment, [0.99]), usable_axes(experiment.runs, ()))
    assert "cost_by_mu" not in [figure.name for figure in none]


def test_a_dot_is_where_an_arm_begins_to_pay():
    """50 fewer rollouts generated, 100 more trained on: from μ = 2 on."""
    axes = Figure().add_subplot()
    draw_cost_ratios(
        axes, {"ours": np.array([[[200, 100], [100, 150]]])}, {"ours": ("C0", "-")}, []
    )
    dots = [line.get_data() for line in axes.lines if line.get_marker() == "o"]
    assert [(x[0], y[0]) for x, y in dots] == [(pytest.approx(2), 1)]


def test_the_band_of_an_interval_without_an_upper_end_reaches_the_end_of_the_axes():
    """The baseline's cost is 0 in one seed of three: from some μ on nobody knows the ratio."""
    axes = Figure().add_subplot()
    rows = [[[30, 10], [20, 30]], [[31, 15], [20, 2]], [[32, 10], [20, 2]]]
    draw_cost_ratios(axes, {"ours": np.array(rows, float)}, {"ours": ("C0", "-")}, [])
    assert cost_ratio(np.array(rows, float), 100.0)[1][1] == np.inf
    (band,) = axes.collections
    (path,) = band.get_paths()
    assert path.vertices[:, 0].max() == pytest.approx(100.0)
    assert axes.get_ylim()[1] < 10 < path.vertices[:, 1].max()


def test_the_page_is_complete_and_loads_nothing(written, findings):
    page = (written / "report.html").read_text()
    assert "<script" not in page and 'http-equiv="Content-Security-Policy"' in page
    assert "s&lt;x&gt;_1" in page and "s<x>" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 50
    assert verdict(findings) in page
    for header in report_table(findings).header:
        assert f"<th>{header}</th>" in page
    assert page.count("<svg") == len(list((written / "figures").glob("*.svg")))


def test_one_benchmark_and_metric_can_be_what_is_shown(sweep, findings):
    one = Outcome(BENCHMARKS[0], "pass_at_k")
    chosen = measure(collect([str(sweep)], "ours"), [0.5], outcome=one)
    assert chosen["mu"] == {"measured": findings["mu"]["measured"], "given": []}
    row = next(row for row in report_table(chosen).rows if row[0] == "grpo")
    runs = [run.final.sampled.benchmarks[BENCHMARKS[0]] for run in
            collect([str(sweep)], "ours").arms[0].runs.values()]  # fmt: skip
    expected = sum(each.pass_at_k for each in runs) / len(runs)
    assert row[2] == f"{100 * expected:.1f}"
    with pytest.raises(UsageError, match="--benchmark nowhere: not evaluated"):
        measure(collect([str(sweep)]), outcome=Outcome("nowhere"))


def test_the_terminal_has_the_verdict_first_and_cuts_no_number(findings):
    stream = StringIO()
    print_report(findings, Console(file=stream, width=80, highlight=False, markup=False))
    printed = stream.getvalue()
    assert printed.startswith(verdict(findings)) and "…" not in printed
    for row in report_table(findings).rows:
        assert all(part in printed for cell in row for part in cell.split("\n"))


def test_the_legend_explains_only_the_columns_that_are_there(findings):
    whole = report_table(findings).legend
    for word in ("Final: ", "Differences ", "Cost: ", "Pays at μ: "):
        assert whole.count(word) == 1
    assert "In brackets" in whole or not any(
        "[" in x for r in report_table(findings).rows for x in r
    )
    alone = {**findings["arms"][0], "difference": None, "equal_cost": {}, "reach": []}
    table = report_table({**findings, "arms": [alone]})
    assert "Final: " in table.legend and list(table.header) == ["arm", "seeds", "final, %"]
    for word in ("Differences ", "Cost: ", "Pays at μ: ", "∞"):
        assert word not in table.legend
    assert ("In brackets" in table.legend) == ("[" in table.rows[0][2])


def difference(mean, interval, seeds, needed=None):
    one = {"mean": mean, "interval": interval, "seeds": seeds, "seeds_to_tell": needed}
    return {"mean": one}


def compared(**arms):
    """A document with what a verdict reads: (final, at equal compute) of every arm."""
    return {
        "baseline": "grpo", "axes": {"compute": ""}, "main_axis": "compute",
        "equal_rollouts": True, "shown": {"benchmark": "mean", "metric": "avg_at_k"},
        "arms": [
            {"name": name, "seeds": final["mean"]["seeds"], "difference": final,
             "equal_cost": {"compute": {"difference": spent}}}
            for name, (final, spent) in arms.items()
        ],
    }  # fmt: skip


def test_the_verdict_says_what_seeds_and_intervals_say():
    few = difference(0.01, None, [1, 2], 9), difference(-0.005, None, [1, 2], 40)
    assert verdict(compared(ours=few)) == (
        "undecided: ours against grpo, 2 seeds, +1.0 points at equal rollouts, -0.5 at equal "
        "compute; about 9 seeds would tell"
    )
    sure = difference(0.02, (0.01, 0.03), [1, 2, 3]), difference(-0.02, (-0.03, -0.01), [1, 2, 3])
    assert verdict(compared(ours=sure)) == (
        "ahead at equal rollouts, behind at equal compute: ours against grpo, 3 seeds, +2.0 [+1.0, "
        "+3.0] points at equal rollouts, -2.0 [-3.0, -1.0] at equal compute"
    )
    open_ = difference(0.01, (-0.01, 0.03), [1, 2, 3], math.inf)
    assert verdict(compared(ours=(open_, open_))) == (
        "undecided: ours against grpo, 3 seeds, +1.0 [-1.0, +3.0] points at equal rollouts, +1.0 "
        "[-1.0, +3.0] at equal compute; more seeds alone would not tell"
    )
    assert verdict(compared(ours=sure, fifo=few)) == (
        "against grpo, at equal rollouts: ours ahead, fifo undecided; at equal compute: ours "
        "behind, fifo undecided; fewer than 3 seeds cannot tell"
    )


def test_a_folder_with_other_files_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OutputDirectoryError, match="already holds other files"):
        run([str(tmp_path / "nothing")], output=str(tmp_path))


def test_a_report_names_no_host_and_no_local_folder(written, sweep):
    """Pages and figures; the sweep's folder is named, not where it is."""
    files = [path for path in written.rglob("*") if path.is_file() and path.suffix != ".pdf"]
    assert len(files) >= 7
    for path in files:
        content = path.read_bytes()
        for private in (str(sweep.parent), str(Path.home()) + "/", socket.gethostname()):
            assert private.encode() not in content, (path, private)
