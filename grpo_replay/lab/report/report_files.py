"""Writes a report to a folder: page, Markdown, JSON and figures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.evaluation.evaluation_tables import markdown_table
from grpo_replay.lab.report.collect import Experiment
from grpo_replay.lab.report.costs import usable_axes
from grpo_replay.lab.report.measure import Document
from grpo_replay.lab.report.report_figures import Figure, drawn, report_figures
from grpo_replay.lab.report.report_tables import facts_of, report_table, verdict, warnings_of
from grpo_replay.storage.atomic import json_values, named_if_unwritable, write_text_whole
from grpo_replay.terminal.plot_style import save_figure, svg_element, svg_text

JSON_FILE = "report.json"


def as_json(found: Document) -> Document:
    """The document of `--json`: the verdict and the numbers, null for what is not finite."""
    return {"verdict": verdict(found), **json_values(found)}


def markdown(found: Document, figures: Sequence[Figure]) -> str:
    """The report as a Markdown page."""
    table = report_table(found)
    header, *rows = ([x.replace("\n", " ") for x in row] for row in (table.header, *table.rows))
    lines = [f"# {found['name']}", "", f"**{verdict(found)}**", ""]
    lines += [f"- {fact}" for fact in (*facts_of(found), *warnings_of(found))]
    lines += ["", *markdown_table(header, rows), "", table.legend, ""]
    for figure in figures:
        lines += [f"![{figure.title}](figures/{figure.name}.svg)", "", figure.caption, ""]
    return "\n".join(lines)


def refuse_other_files(folder: Path) -> None:
    """Raises OutputDirectoryError if the folder holds anything but an earlier report."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / JSON_FILE).exists():
        raise OutputDirectoryError(
            f"--output {folder} already holds other files: choose another folder"
        )


def write_report(experiment: Experiment, found: Document, folder: Path) -> None:
    """Write all forms of the report. Raises OutputDirectoryError."""
    refuse_other_files(folder)
    figures = report_figures(experiment, found, usable_axes(experiment.runs, found["mu"]["given"]))
    with named_if_unwritable(folder):
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        text = json.dumps(as_json(found), indent=2, ensure_ascii=False, allow_nan=False)
        write_text_whole(folder / JSON_FILE, text + "\n")
        svgs = _write_figures(figures, folder / "figures")
        write_text_whole(folder / "report.md", markdown(found, figures))
        write_text_whole(folder / "report.html", render_page(found, figures, svgs))


def _write_figures(figures: Sequence[Figure], folder: Path) -> dict[str, str]:
    """Write every figure as PDF and SVG, and remove those of an earlier report; returns the SVG
    elements by name."""
    for earlier in (*folder.glob("*.pdf"), *folder.glob("*.svg")):
        earlier.unlink()
    svgs = {}
    for figure in figures:
        with drawn(figure) as canvas:
            save_figure(canvas, folder / f"{figure.name}.pdf")
            svg = svg_text(canvas, figure.title)
        write_text_whole(folder / f"{figure.name}.svg", svg)
        svgs[figure.name] = svg_element(svg, figure.name)
    return svgs


def render_page(found: Document, figures: Sequence[Figure], svgs: Mapping[str, str]) -> str:
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
    return environment.get_template("report_page.html").render(
        found=found,
        verdict=verdict(found),
        table=report_table(found),
        figures=[
            {"title": figure.title, "svg": svgs[figure.name], "caption": figure.caption}
            for figure in figures
        ],
        facts=facts_of(found),
        warnings=warnings_of(found),
    )
