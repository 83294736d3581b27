"""The forms of a report: terminal, Markdown, figures and the page."""

import re
import socket
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from commands import run_report as run
from rich.console import Console
from small_runs.experiments import BENCHMARKS, write_sweep

from grpo_replay.cli.report_command import print_report
from grpo_replay.errors import OutputDirectoryError, UsageError
from grpo_replay.lab.report.collect import collect
from grpo_replay.lab.report.finished_run import Outcome
from grpo_replay.lab.report.measure import measure, usable_axes
from grpo_replay.lab.report.report_figures import (
    drawn,
    report_figures,
)
from grpo_replay.lab.report.report_findings import Findings
from grpo_replay.lab.report.report_tables import (
    report_tables,
)

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


def test_every_figure_is_written_as_pdf_and_svg(written):
    names = {file.stem for file in (written / "figures").iterdir()}
    assert names >= {
        "accuracy_by_steps", "accuracy_by_generated_tokens", "accuracy_by_compute_5.28",
        "accuracy_by_seconds",
    }  # fmt: skip
    for name in names:
        pdf = (written / "figures" / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF") and b"/MediaBox [ 0 0 237.6" in pdf  # 3.3 inches
        ElementTree.parse(written / "figures" / f"{name}.svg")
    assert "## final avg@k: difference to ours" in (written / "report.md").read_text()


def test_every_arm_has_a_line_of_its_own_look_and_a_legend_entry(sweep, findings):
    experiment = collect([str(sweep)], "ours")
    many = tuple(replace(experiment.arms[1], name=f"arm-{number} $^$") for number in range(15))
    experiment = replace(experiment, arms=many, baseline=many[0])
    names = [arm.name for arm in many]
    figure = report_figures(experiment, findings, usable_axes(experiment, ()))[0]
    with drawn(figure) as canvas:
        axes = canvas.axes[0]
        lines = [line for line in axes.lines if line.get_label() in names]
        looks = {(line.get_color(), line.get_linestyle()) for line in lines}
        assert len(looks) == len(lines) == len(many)
        assert [text.get_text() for text in axes.get_legend().get_texts()] == names


def test_the_page_is_complete_and_loads_nothing(written, findings):
    page = (written / "report.html").read_text()
    assert "<script" not in page and 'http-equiv="Content-Security-Policy"' in page
    assert "s&lt;x&gt;_1" in page and "s<x>" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 50
    for table in report_tables(findings):
        assert f"<h2>{table.title}</h2>" in page
    assert page.count("<svg") == len(list((written / "figures").glob("*.svg")))


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


def test_the_terminal_shows_every_brief_table_without_cutting_a_number(findings):
    stream = StringIO()
    print_report(findings, Console(file=stream, width=80, highlight=False, markup=False))
    assert "…" not in stream.getvalue()
    for table in report_tables(findings):
        assert table.title.split(":")[0][:60] in stream.getvalue()


def test_a_folder_with_other_files_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OutputDirectoryError, match="already holds other files"):
        run([str(tmp_path / "nothing")], output=str(tmp_path))


def test_a_report_names_no_host_and_no_local_folder(written, sweep):
    """Pages, tables and figures; the sweep's folder is named, not where it is."""
    files = [path for path in written.rglob("*") if path.is_file()]
    assert len(files) >= 8
    for path in files:
        content = path.read_bytes()
        for private in (str(sweep.parent), str(Path.home()) + "/", socket.gethostname()):
            assert private.encode() not in content, (path, private)
