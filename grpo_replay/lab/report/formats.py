"""Tables of a report as Markdown and LaTeX, and its numbers as CSV and Parquet."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from grpo_replay.evaluation.evaluation_tables import markdown_table
from grpo_replay.lab.report.report_findings import Findings
from grpo_replay.lab.report.text_table import TextTable
from grpo_replay.storage.atomic import written_whole

LONG_SCHEMA = pa.schema(
    [
        ("arm", pa.string()),
        ("group", pa.string()),  # score, difference, quantity, or reach ACCURACY
        ("item", pa.string()),
        ("benchmark", pa.string()),
        ("statistic", pa.string()),
        ("value", pa.float64()),
    ]
)

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--",
    "μ": r"$\mu$", "Δ": r"$\Delta$", "β": r"$\beta$", "Σ": r"$\Sigma$", "·": r"$\cdot$",
    "≥": r"$\ge$", "≤": r"$\le$", "∞": r"$\infty$", "|": r"\textbar{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "σ": r"$\sigma$", "τ": r"$\tau$", "α": r"$\alpha$", "δ": r"$\delta$",
}  # fmt: skip


def markdown(findings: Findings, tables: Sequence[TextTable], facts: Sequence[str]) -> str:
    """The report as a Markdown page, with links to the figures beside it."""
    lines = [f"# {findings.name}", "", *(f"- {fact}" for fact in facts), ""]
    for table in tables:
        lines += [f"## {table.title}", "", *markdown_table(table.header, table.rows), ""]
        lines += [table.legend, ""] if table.legend else []
    return "\n".join(lines)


def latex(table: TextTable) -> str:
    """A `tabular` with booktabs rules, and its legend as a comment."""
    columns = "l" + "r" * (len(table.header) - 1)
    lines = [
        f"% {table.title}",
        *(f"% {part}" for part in table.legend.splitlines()),
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _latex_row(table.header),
        r"\midrule",
        *map(_latex_row, table.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(latex_text, cells)) + r" \\"


def latex_text(text: str) -> str:
    """Text with LaTeX's special characters, and the symbols of our tables, escaped."""
    escaped = "".join(_LATEX.get(letter, letter) for letter in text)
    return re.sub(r"^\[", "{[}", escaped)  # after \\ a bracket would be an argument


def write_rows(rows: Sequence[Mapping[str, Any]], schema: pa.Schema, stem: Path) -> None:
    """Write rows as `stem`.csv and `stem`.parquet."""
    table = pa.Table.from_pylist(list(rows), schema=schema)
    with written_whole(stem.with_suffix(".parquet")) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    with written_whole(stem.with_suffix(".csv")) as temporary:
        pa_csv.write_csv(table, temporary)
