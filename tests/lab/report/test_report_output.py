"""The forms of a report: terminal, Markdown, LaTeX, CSV, Parquet, figures and the page."""

import re
import shutil
import socket
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pyarrow.csv as pa_csv
import pytest
from commands import run_report as run
from rich.console import Console
from small_runs.experiments import BENCHMARKS, write_sweep

from grpo_replay.cli.report_command import print_report
from grpo_replay.errors import OutputDirectoryError, UsageError
from grpo_replay.lab.report.collect import collect, evaluation_arms
from grpo_replay.lab.report.finished_run import FinishedRun, Outcome
from grpo_replay.lab.report.measure import measure, usable_axes
from grpo_replay.lab.report.report_figures import (
    _compact_numbers,
    _legend,
    drawn,
    report_figures,
)
from grpo_replay.lab.report.report_files import csv_text, latex, latex_text
from grpo_replay.lab.report.report_findings import Findings
from grpo_replay.lab.report.report_tables import (
    TextTable,
    amount,
    report_tables,
)
from grpo_replay.terminal.plot_style import figure_style

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
def findings(sweep) -> Findings:
    return measure(collect([str(sweep)], "ours"), given_mu=[5.28])


@pytest.fixture(scope="module")
def written(sweep, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "report"
    run([str(sweep)], "ours", output=str(folder), mu=[5.28])
    return folder


def test_the_settings_are_what_each_arm_changes_and_what_tuning_chose(findings):
    (table,) = (each for each in report_tables(findings) if each.name == "settings")
    assert table.title == "settings: difference to ours"
    assert table.rows == [
        ["grpo", "replay.preset", "grpo"],
        ["ratio-1", "replay.ratio", "1.0"],
        ["alpha-1", "replay.priority_exponent", "1.0"],
        ["both", "replay.priority_exponent", "1.0"],
        ["both", "replay.ratio", "1.0"],
    ]
    tuned = replace(findings, tuned={"ours": "optimizer.learning_rate=0.1"})
    (table,) = (each for each in report_tables(tuned) if each.name == "settings")
    assert table.rows[-1] == ["ours", "chosen by tuning", "optimizer.learning_rate=0.1"]


def test_the_curves_have_every_benchmark(written):
    curves = pa_csv.read_csv(written / "curves.csv").to_pylist()
    assert {row["benchmark"] for row in curves} == {"mean", *BENCHMARKS}


def test_every_figure_is_written_as_pdf_and_svg(written):
    names = {file.stem for file in (written / "figures").iterdir()}
    assert names >= {
        *("accuracy_by_steps", "accuracy_by_generated_tokens"),
        *("accuracy_by_compute_measured", "accuracy_by_compute_5.28", "accuracy_by_seconds"),
        *("clip_fraction_replayed", "clip_fraction_fresh", "staleness", "length", "reward"),
    }
    for name in names:
        pdf = (written / "figures" / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF") and b"/MediaBox [ 0 0 237.6" in pdf  # 3.3 inches
        ElementTree.parse(written / "figures" / f"{name}.svg")


def test_a_figure_has_a_line_and_a_legend_entry_for_every_arm(sweep, findings):
    experiment = collect([str(sweep)], "ours")
    *arms, last = experiment.arms
    experiment = replace(experiment, arms=(*arms, replace(last, name="both $^$")))
    figures = report_figures(experiment, findings, usable_axes(experiment, ()))
    (clips,) = (each for each in figures if each.name == "clip_fraction_fresh")
    assert "every seed as points" in clips.caption and "quartiles" not in clips.caption
    with drawn(clips) as canvas:
        (axes,) = canvas.axes
        legend = axes.get_legend()
        assert [text.get_text() for text in legend.get_texts()] == [*list(ARMS)[:-1], "both $^$"]
        assert legend.get_clip_path() is None


def test_long_names_leave_room_for_the_data_and_small_costs_are_plain_numbers():
    with figure_style() as figure_class:
        axes = figure_class(figsize=(3.3, 2.1), layout="constrained").add_subplot()
        axes.plot([0, 0.6], [1, 2], label="x" * 59 + "y" * 90 + "z" * 60)
        axes.plot([0, 0.6], [2, 3], label="short")
        _legend(axes)
        _compact_numbers(axes.xaxis)
        axes.figure.draw_without_rendering()
        assert [text.get_text() for text in axes.get_legend().get_texts()] == [
            "x" * 59 + "y" + "\n…" + "z" * 59, "short",
        ]  # fmt: skip
        assert axes.get_position().height > 0.3
        format = axes.xaxis.get_major_formatter()
        assert [format(x) for x in (0, 0.15, 2, 1500)] == ["0", "0.15", "2", "1.5k"]


@pytest.mark.slow
def test_no_two_of_many_arms_look_alike_in_any_figure(sweep, findings):
    experiment = collect([str(sweep)], "ours")
    many = tuple(replace(experiment.arms[1], name=f"arm-{number}") for number in range(15))
    experiment = replace(experiment, arms=many, baseline=many[0])
    names = [arm.name for arm in many]
    for figure in report_figures(experiment, findings, usable_axes(experiment, ())):
        with drawn(figure) as canvas:
            lines = [line for line in canvas.axes[0].lines if line.get_label() in names]
            looks = {(line.get_color(), line.get_linestyle()) for line in lines}
        assert len(looks) == len(lines) == len(many), figure.name


def test_the_page_is_complete_and_loads_nothing(written, findings):
    page = (written / "report.html").read_text()
    assert "<script" not in page and 'http-equiv="Content-Security-Policy"' in page
    assert "s&lt;x&gt;_1" in page and "s<x>" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 50
    for table in report_tables(findings):
        assert f"<h2>{table.title}</h2>" in page
    assert page.count("<svg") == len(list((written / "figures").glob("*.svg")))


def test_markdown_has_every_table_and_latex_every_row(written):
    page = (written / "report.md").read_text()
    assert page.startswith("# s<x>_1\n")
    for name in ("final", "final_difference", "reach", "lengths", "costs"):
        text = (written / "tables" / f"{name}.tex").read_text()
        assert text.count("\\\\\n") >= len(ARMS)
        assert text.count("{") == text.count("}")
    assert "## final avg@k: difference to ours" in page


def test_latex_escapes_what_is_special():
    assert latex_text("50 % & a_b") == r"50 \% \& a\_b"
    table = TextTable("t", "title", ("arm", "95 %"), [["μ", "[1, 2]"]], "legend")
    lines = latex(table).splitlines()
    assert r"$\mu$ & {[}1, 2] \\" in lines
    assert r"\caption{Title: legend}" in lines and r"\label{tab:t}" in lines


def test_one_benchmark_and_metric_can_be_what_is_shown(sweep, findings):
    one = Outcome(BENCHMARKS[0], "pass_at_k")
    chosen = measure(collect([str(sweep)], "ours"), [0.5], outcome=one)
    assert chosen.measured_mu == findings.measured_mu and chosen.given_mu == ()
    score = next(table for table in report_tables(chosen) if table.name == "final")
    expected = chosen.arm("grpo").scores["final"].estimates[BENCHMARKS[0]].mean
    assert score.rows[0][2] == f"{100 * expected:.1f}"
    run = collect([str(sweep)], "ours").baseline.runs[1]
    steps, curve = run.curve(one)
    own = [run.evaluations[s].sampled.benchmarks[BENCHMARKS[0]].pass_at_k for s in steps]
    assert curve == own
    with pytest.raises(UsageError, match="--benchmark nowhere: not evaluated"):
        measure(collect([str(sweep)]), outcome=Outcome("nowhere"))


def test_amounts_have_three_digits():
    cases = {None: "–", float("inf"): "∞", 0.5: "0.500", 27: "27.0", 9999: "9,999",
             27_000: "27.0k", 127_400: "127k", 2.5e6: "2.50M", 999_400: "999k", 999_700: "1.00M",
             999.6e6: "1.00G", 2e12: "2.00T", 99.97: "100"}  # fmt: skip
    assert {value: amount(value) for value in cases} == cases


@pytest.mark.parametrize("width", [80, 200])
def test_the_terminal_shows_every_brief_table_without_cutting_a_number(findings, width):
    stream = StringIO()
    print_report(findings, Console(file=stream, width=width, highlight=False, markup=False))
    printed = stream.getvalue()
    assert "…" not in printed
    for table in report_tables(findings):
        lines = [line for line in printed.splitlines() if line.startswith(" ours ")]
        assert lines and table.title.split(":")[0][:60] in printed
    for line in printed.splitlines():
        assert len(line) <= max(width, 84)


def test_a_folder_with_other_files_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OutputDirectoryError, match="already holds other files"):
        run([str(tmp_path / "nothing")], output=str(tmp_path))


@pytest.mark.slow
def test_an_earlier_report_is_replaced_and_what_is_not_of_it_stays(sweep, written, tmp_path):
    folder = Path(shutil.copytree(written, tmp_path / "report"))
    table, figure = folder / "tables/settings.tex", folder / "figures/staleness.pdf"
    assert table.exists() and figure.exists()
    (folder / "tables/mine.tex").write_text("mine")
    run([str(sweep / "grpo/seed-1")], output=str(folder))
    assert not table.exists() and not figure.exists()
    listed = set((folder / "files.txt").read_text().splitlines())
    found = {f"{path.parent.name}/{path.name}" for path in folder.glob("*/*")}
    assert found - listed == {"tables/mine.tex"} and listed < found


def test_a_report_names_no_host_and_no_local_folder(written, sweep):
    """Pages, tables and figures; the sweep's folder is named, not where it is."""
    files = [path for path in written.rglob("*") if path.is_file()]
    assert len(files) >= 8
    for path in files:
        content = path.read_bytes()
        for private in (str(sweep.parent), str(Path.home()) + "/", socket.gethostname()):
            assert private.encode() not in content, (path, private)


def test_text_in_csv_is_no_formula():
    text = csv_text(("arm", "value"), [("=1+1", -0.5), ("@x", None), ("plain", 2)])
    assert text == "arm,value\n'=1+1,-0.5\n'@x,\nplain,2\n"


def test_evaluations_of_equal_names_are_named_from_their_common_folder(tmp_path):
    files = [FinishedRun(tmp_path / x / "a.json", *[None] * 3, {}, None, None) for x in "bc"]
    assert [arm.name for arm in evaluation_arms(files)] == ["b/a.json", "c/a.json"]
