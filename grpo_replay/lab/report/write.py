"""Writes a report to a folder: page, Markdown, JSON, tables, numbers and figures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.evaluation.evaluation_tables import percent
from grpo_replay.lab.report.collect import Experiment
from grpo_replay.lab.report.costs import Axis
from grpo_replay.lab.report.document import document, finite, long_rows
from grpo_replay.lab.report.formats import LONG_SCHEMA, latex, markdown, write_rows
from grpo_replay.lab.report.measure import usable_axes
from grpo_replay.lab.report.report_figures import Figure, drawn, report_figures
from grpo_replay.lab.report.report_findings import Findings
from grpo_replay.lab.report.report_tables import report_tables
from grpo_replay.lab.report.text_table import TextTable
from grpo_replay.lab.report.texts import facts_of, warnings_of
from grpo_replay.storage.atomic import named_if_unwritable, write_text_whole
from grpo_replay.terminal.pages import page_environment
from grpo_replay.terminal.plot_style import save_figure, svg_element, svg_text

JSON_FILE = "report.json"

FILES = "files.txt"
"""The tables and figures of the report in the folder, which the next one there removes."""


def check_folder(folder: Path) -> None:
    """Raises OutputDirectoryError if the folder holds anything but an earlier report."""
    if folder.exists() and not folder.is_dir():
        raise OutputDirectoryError(f"--output {folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / JSON_FILE).exists():
        raise OutputDirectoryError(
            f"--output {folder} already holds other files: choose another folder"
        )


def write_report(experiment: Experiment, findings: Findings, folder: Path) -> None:
    """Write all forms of the report. Raises OutputDirectoryError."""
    check_folder(folder)
    tables = report_tables(findings)
    axes = usable_axes(experiment, findings.given_mu)
    figures = report_figures(experiment, findings, axes)
    facts, warnings = facts_of(findings), warnings_of(findings)
    with named_if_unwritable(folder):
        for part in ("tables", "figures"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        _replace_earlier(folder, tables, figures)
        text = json.dumps(document(findings), indent=2, ensure_ascii=False, allow_nan=False)
        write_text_whole(folder / JSON_FILE, text + "\n")
        for table in tables:
            write_text_whole(folder / "tables" / f"{table.name}.tex", latex(table))
        write_rows(long_rows(findings), LONG_SCHEMA, folder / "numbers")
        write_rows(_curve_rows(experiment, axes), CURVE_SCHEMA, folder / "curves")
        svgs = _write_figures(figures, folder / "figures")
        write_text_whole(folder / "report.md", markdown(findings, tables, [*facts, *warnings]))
        page = render_page(findings, tables, figures, svgs, facts, warnings)
        write_text_whole(folder / "report.html", page)


def _replace_earlier(folder: Path, tables: Sequence[TextTable], figures: Sequence[Figure]) -> None:
    """Remove the tables and figures of an earlier report, and nothing else."""
    if (folder / FILES).exists():
        for line in (folder / FILES).read_text(encoding="utf-8").splitlines():
            path = Path(line)
            if str(path.parent) in ("tables", "figures"):
                (folder / path).unlink(missing_ok=True)
    names = [f"tables/{table.name}.tex" for table in tables]
    names += [f"figures/{each.name}.{kind}" for each in figures for kind in ("png", "svg")]
    write_text_whole(folder / FILES, "".join(f"{name}\n" for name in names))


def _write_figures(figures: Sequence[Figure], folder: Path) -> dict[str, str]:
    """Write every figure as PNG and SVG; returns the SVG elements by name."""
    svgs = {}
    for figure in figures:
        with drawn(figure) as canvas:
            save_figure(canvas, folder / f"{figure.name}.png")
            svg = svg_text(canvas, figure.title)
        write_text_whole(folder / f"{figure.name}.svg", svg)
        svgs[figure.name] = svg_element(svg, figure.name)
    return svgs


CURVE_SCHEMA = pa.schema(
    [
        ("arm", pa.string()),
        ("seed", pa.int64()),
        ("step", pa.int64()),
        ("accuracy", pa.float64()),
        ("pass_at_k", pa.float64()),
        ("axis", pa.string()),
        ("cost", pa.float64()),
    ]
)
"""One row per run, evaluation and axis: what the accuracy figures are drawn from."""


def _curve_rows(experiment: Experiment, axes: Sequence[Axis]) -> list[dict[str, Any]]:
    rows = []
    for arm in experiment.arms:
        for run in arm.runs.values():
            for axis in axes if run.recipe else ():
                total = axis.total(run)
                rows += [
                    {
                        "arm": arm.name,
                        "seed": run.seed,
                        "step": step,
                        "accuracy": report.sampled.mean.avg_at_k,
                        "pass_at_k": report.sampled.mean.pass_at_k,
                        "axis": axis.key,
                        "cost": finite(float(total[step])),
                    }
                    for step, report in run.evaluations.items()
                ]
    return rows


def render_page(
    findings: Findings,
    tables: Sequence[TextTable],
    figures: Sequence[Figure],
    svgs: Mapping[str, str],
    facts: Sequence[str],
    warnings: Sequence[str],
) -> str:
    """The report as one self-contained HTML page: inline figures, no script, no network.
    `svgs` has the SVG element of each figure by its name."""
    environment = page_environment("lab/report")
    environment.filters["percent"] = percent
    return environment.get_template("report_page.html").render(
        findings=findings,
        tables=tables,
        figures=[
            {"title": figure.title, "svg": svgs[figure.name], "caption": figure.caption}
            for figure in figures
        ],
        facts=facts,
        warnings=warnings,
    )
