"""The report as one self-contained HTML page: inline figures, no script, no network."""

from collections.abc import Mapping, Sequence

from grpo_replay.evaluation.evaluation_tables import percent
from grpo_replay.lab.report.report_figures import Figure
from grpo_replay.lab.report.report_findings import Findings
from grpo_replay.lab.report.text_table import TextTable
from grpo_replay.terminal.pages import page_environment


def render_page(
    findings: Findings,
    tables: Sequence[TextTable],
    figures: Sequence[Figure],
    svgs: Mapping[str, str],
    facts: Sequence[str],
    warnings: Sequence[str],
) -> str:
    """The page as HTML. `svgs` has the SVG element of each figure by its name."""
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
