"""Writes a report to a folder: page, Markdown, JSON, LaTeX tables, numbers and figures."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.evaluation.evaluation_tables import markdown_table, percent
from grpo_replay.lab.report.collect import Experiment
from grpo_replay.lab.report.costs import Axis
from grpo_replay.lab.report.finished_run import Outcome
from grpo_replay.lab.report.measure import usable_axes
from grpo_replay.lab.report.report_figures import Figure, drawn, report_figures
from grpo_replay.lab.report.report_findings import ArmFindings, Findings
from grpo_replay.lab.report.report_tables import TextTable, facts_of, report_tables, warnings_of
from grpo_replay.storage.atomic import json_values, named_if_unwritable, write_text_whole
from grpo_replay.terminal.plot_style import save_figure, svg_element, svg_text

FORMAT = 1
JSON_FILE = "report.json"
FILES = "files.txt"
"""The tables and figures of the report in the folder, which the next one there removes."""

CURVE_COLUMNS = ("arm", "seed", "step", "benchmark", "avg_at_k", "pass_at_k", "axis", "cost")
"""One row per run, evaluation, benchmark and axis: what the accuracy figures are drawn from."""

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--",
    "μ": r"$\mu$", "Δ": r"$\Delta$", "β": r"$\beta$", "Σ": r"$\Sigma$", "·": r"$\cdot$",
    "≥": r"$\ge$", "≤": r"$\le$", "∞": r"$\infty$", "|": r"\textbar{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "σ": r"$\sigma$", "τ": r"$\tau$", "α": r"$\alpha$", "δ": r"$\delta$",
}  # fmt: skip


def document(findings: Findings) -> dict[str, Any]:
    """The report as JSON values. Accuracies are fractions. `low` and `high` are quartiles over
    seeds; `interval` is a 95 % interval. A cost that was not reached is null."""
    return {
        "format": FORMAT,
        "name": findings.name,
        "baseline": findings.baseline,
        "benchmarks": list(findings.benchmarks),
        "shown": {"benchmark": findings.shown, "metric": findings.metric},
        "graded_by": findings.graded_by,
        "mu": {"measured": findings.measured_mu, "given": list(findings.given_mu)},
        "arms": [_arm(arm) for arm in findings.arms],
        "notes": list(findings.notes),
        "tuned": findings.tuned,
        "frontier": [
            {"cost": cost, "accuracy": value, "arm": arm, "step": step}
            for cost, value, arm, step in findings.frontier
        ],
    }


def _arm(arm: ArmFindings) -> dict[str, Any]:
    """`difference` is that of the final avg@k; the other scores have their own."""
    found: dict[str, Any] = {
        "name": arm.name,
        "seeds": list(arm.seeds),
        "missing": [{"seed": seed, "reason": why} for seed, why in arm.missing.items()],
        "settings": arm.settings,
        "final": None,
        "difference": None,
    }
    for name, score in arm.scores.items():
        suffix = "" if name == "final" else f"_{name.removeprefix('final_')}"
        found[name] = _plain(score.estimates)
        found[f"difference{suffix}"] = score.difference and _plain(score.difference)
    found["quantities"] = _plain(arm.quantities)
    found["equal_cost"] = _plain(arm.equal_cost)
    found["reach"] = [json_values(asdict(target)) for target in arm.targets]
    return found


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: asdict(value) for name, value in values.items()}


def curve_rows(experiment: Experiment, axes: Sequence[Axis]) -> Iterator[tuple[Any, ...]]:
    """Rows of `CURVE_COLUMNS`."""
    runs = [(arm.name, run) for arm in experiment.arms for run in arm.runs.values() if run.recipe]
    for arm, run in runs:
        for axis in axes:
            total = axis.total(run)
            for step, report in run.evaluations.items():
                cost = json_values(float(total[step]))
                for name in ("mean", *report.sampled.benchmarks):
                    outcomes = (Outcome(name, key) for key in ("avg_at_k", "pass_at_k"))
                    scores = [outcome.of(report) for outcome in outcomes]
                    yield (arm, run.seed, step, name, *scores, axis.key, cost)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV; None is an empty cell. A spreadsheet takes no text for a formula."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_no_formula(cell) for cell in row] for row in rows)
    return stream.getvalue()


def _no_formula(cell: Any) -> Any:
    is_formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{cell}" if is_formula else cell


def markdown(findings: Findings, tables: Sequence[TextTable], facts: Sequence[str]) -> str:
    """The report as a Markdown page."""
    lines = [f"# {findings.name}", "", *(f"- {fact}" for fact in facts), ""]
    for table in tables:
        lines += [f"## {table.title}", "", *markdown_table(table.header, table.rows), ""]
        lines += [table.legend, ""] if table.legend else []
    return "\n".join(lines)


def latex(table: TextTable) -> str:
    """A `table` with booktabs rules, its caption and a label."""
    columns = "l" + "r" * (len(table.header) - 1)
    title = table.title[0].upper() + table.title[1:]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(f'{title}: {table.legend}' if table.legend else title)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _latex_row(table.header),
        r"\midrule",
        *map(_latex_row, table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(latex_text, cells)) + r" \\"


def latex_text(text: str) -> str:
    """Text with LaTeX's special characters, and the symbols of our tables, escaped."""
    escaped = "".join(_LATEX.get(letter, letter) for letter in text)
    return re.sub(r"^\[", "{[}", escaped)  # after \\ a bracket would be an argument


def refuse_other_files(folder: Path) -> None:
    """Raises OutputDirectoryError if the folder holds anything but an earlier report."""
    if folder.exists() and not folder.is_dir():
        raise OutputDirectoryError(f"--output {folder} is a file; name a folder")
    ours = any((folder / name).exists() for name in (JSON_FILE, FILES))
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        raise OutputDirectoryError(
            f"--output {folder} already holds other files: choose another folder"
        )


def write_report(experiment: Experiment, findings: Findings, folder: Path) -> None:
    """Write all forms of the report. Raises OutputDirectoryError."""
    refuse_other_files(folder)
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
        curves = csv_text(CURVE_COLUMNS, curve_rows(experiment, axes))
        write_text_whole(folder / "curves.csv", curves)
        svgs = _write_figures(figures, folder / "figures")
        write_text_whole(folder / "report.md", markdown(findings, tables, [*facts, *warnings]))
        page = render_page(findings, tables, figures, svgs)
        write_text_whole(folder / "report.html", page)


def _replace_earlier(folder: Path, tables: Sequence[TextTable], figures: Sequence[Figure]) -> None:
    """Remove the tables and figures of an earlier report, and nothing else."""
    if (folder / FILES).exists():
        for line in (folder / FILES).read_text(encoding="utf-8").splitlines():
            path = Path(line)
            if str(path.parent) in ("tables", "figures"):
                (folder / path).unlink(missing_ok=True)
    names = [f"tables/{table.name}.tex" for table in tables]
    names += [f"figures/{each.name}.{kind}" for each in figures for kind in ("pdf", "svg")]
    write_text_whole(folder / FILES, "".join(f"{name}\n" for name in names))


def _write_figures(figures: Sequence[Figure], folder: Path) -> dict[str, str]:
    """Write every figure as PDF and SVG; returns the SVG elements by name."""
    svgs = {}
    for figure in figures:
        with drawn(figure) as canvas:
            save_figure(canvas, folder / f"{figure.name}.pdf")
            svg = svg_text(canvas, figure.title)
        write_text_whole(folder / f"{figure.name}.svg", svg)
        svgs[figure.name] = svg_element(svg, figure.name)
    return svgs


def render_page(
    findings: Findings,
    tables: Sequence[TextTable],
    figures: Sequence[Figure],
    svgs: Mapping[str, str],
) -> str:
    """The report as one self-contained HTML page: inline figures, no script, no network.
    `svgs` has the SVG element of each figure by its name. Every text is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("grpo_replay", "lab/report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    return environment.get_template("report_page.html").render(
        findings=findings,
        tables=tables,
        figures=[
            {"title": figure.title, "svg": svgs[figure.name], "caption": figure.caption}
            for figure in figures
        ],
        facts=facts_of(findings),
        warnings=warnings_of(findings),
    )
