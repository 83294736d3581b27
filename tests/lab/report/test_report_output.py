"""The forms of a report: terminal, Markdown, LaTeX, CSV, Parquet, figures and the page."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from io import StringIO
from pathlib import Path

import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from small_runs.experiments import write_sweep

from grpo_replay.cli.report_command import print_report, run
from grpo_replay.errors import OutputDirectoryError
from grpo_replay.lab.report.ablations import ablation_rows
from grpo_replay.lab.report.collect import collect
from grpo_replay.lab.report.formats import latex, latex_text
from grpo_replay.lab.report.measure import measure
from grpo_replay.lab.report.report_findings import Findings
from grpo_replay.lab.report.report_tables import _ablation_name, report_tables
from grpo_replay.lab.report.text_table import TextTable, amount

ARMS = {
    "grpo": (["replay.preset=grpo"], 0.1),
    "ours": (["replay.preset=ours"], 0.3),
    "ratio-1": (["replay.preset=ours", "replay.ratio=1"], 0.2),
    "alpha-1": (["replay.preset=ours", "replay.priority_exponent=1"], 0.2),
    "both $^$": (["replay.preset=ours", "replay.ratio=1", "replay.priority_exponent=1"], 0.2),
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
    run([str(sweep)], "ours", output=str(folder), given_mu=[5.28])
    return folder


def test_arms_that_change_the_same_keys_are_one_ablation(findings):
    tables = ablation_rows(findings)
    found = {keys: [arm.name for arm in arms] for keys, arms in tables}
    assert found == {
        ("replay.preset",): ["grpo", "ours"],
        ("replay.priority_exponent", "replay.ratio"): ["ours", "ratio-1", "alpha-1", "both $^$"],
    }


def test_every_number_of_the_json_is_in_the_long_table(written):
    document = json.loads((written / "report.json").read_text())
    rows = pq.read_table(written / "numbers.parquet").to_pylist()
    known = {
        (r["arm"], r["group"], r["item"], r["benchmark"], r["statistic"]): r["value"] for r in rows
    }
    checked = 0
    for arm in document["arms"]:
        for benchmark, each in arm["final"].items():
            for statistic in ("mean", "median", "low", "high"):
                key = (arm["name"], "score", "final", benchmark, statistic)
                assert known[key] == each[statistic]
                checked += 1
        for name, each in arm["quantities"].items():
            assert known[(arm["name"], "quantity", name, None, "median")] == each["median"]
            checked += 1
    assert checked > 100
    assert pa_csv.read_csv(written / "numbers.csv").num_rows == len(rows)


def test_every_figure_is_written_as_png_and_svg(written):
    names = {file.stem for file in (written / "figures").iterdir()}
    assert names >= {
        *("difference_final", "accuracy_by_steps", "accuracy_by_generated_tokens"),
        *("accuracy_by_compute_measured", "accuracy_by_compute_5.28", "accuracy_by_seconds"),
        *("clip_fraction", "staleness", "length"),
    }
    for name in names:
        png = (written / "figures" / f"{name}.png").read_bytes()
        assert int.from_bytes(png[16:20], "big") == 990  # 3.3 inches at 300 dpi
        ElementTree.parse(written / "figures" / f"{name}.svg")


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
    for name in ("final", "final_difference", "reach", "details", "lengths", "costs"):
        text = (written / "tables" / f"{name}.tex").read_text()
        assert text.count("\\\\\n") >= len(ARMS)
        assert text.count("{") == text.count("}")
    assert "## final avg@k: difference to ours" in page


def test_latex_escapes_what_is_special():
    assert latex_text("50 % & a_b") == r"50 \% \& a\_b"
    table = TextTable("t", "title", ("arm", "95 %"), [["μ", "[1, 2]"]], "legend")
    assert latex(table).splitlines()[6] == r"$\mu$ & {[}1, 2] \\"


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
        if table.brief and not table.name.startswith("ablation"):
            lines = [line for line in printed.splitlines() if line.startswith(" ours ")]
            assert lines and table.title.split(":")[0][:60] in printed
    for line in printed.splitlines():
        assert len(line) <= max(width, 84)


def test_a_folder_with_other_files_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OutputDirectoryError, match="already holds other files"):
        run([str(tmp_path / "nothing")], output=str(tmp_path))


def test_an_earlier_report_is_replaced_and_what_is_not_of_it_stays(sweep, written, tmp_path):
    folder = Path(shutil.copytree(written, tmp_path / "report"))
    table, figure = folder / "tables/ablation_preset.tex", folder / "figures/staleness.png"
    assert table.exists() and figure.exists()
    (folder / "tables/mine.tex").write_text("mine")
    run([str(sweep / "grpo/seed-1")], output=str(folder))
    assert not table.exists() and not figure.exists()
    listed = set((folder / "files.txt").read_text().splitlines())
    found = {f"{path.parent.name}/{path.name}" for path in folder.glob("*/*")}
    assert found - listed == {"tables/mine.tex"} and listed < found


def test_a_table_of_many_keys_has_a_short_name_and_no_two_tables_have_one():
    keys = [f"section.a_key_with_a_long_name_{number}" for number in range(15)]
    name = _ablation_name(keys, ())
    assert re.fullmatch(r"ablation_15_keys_[0-9a-f]{8}", name)
    assert _ablation_name(["loss.epsilon"], ()) == "ablation_epsilon"
    assert _ablation_name(["optimizer.epsilon"], {"ablation_epsilon"}).startswith("ablation_1_keys")
