"""Text tables of all commands, for the terminal, Markdown and pages (`text_table.html`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

WIDEST = 10_000  # columns; more than any table needs

SHORT_NAME = 12
"""Minimum width to which the names of a table's rows are folded on a narrow terminal."""

Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table with left-aligned names in the first column and right-aligned numbers in the others.

    A cell may have several lines, separated by `\\n`. `header` may be empty. `totals` are rows at
    the end, after an empty line, that sum up the others. `legend` explains the columns.
    """

    header: Row
    rows: Sequence[Row]
    title: str = ""
    legend: str = ""
    totals: Sequence[Row] = ()

    def drawn(self, *, in_panel: bool = False) -> Table:
        """Return the table for a rich console, without its legend; in a panel, which shows the
        title, also without title and edges. Numbers are never folded, names down to SHORT_NAME."""
        table = Table(
            title=Text(self.title) if self.title and not in_panel else None,
            title_justify="left",
            show_header=bool(self.header),
            show_edge=not in_panel,
            header_style="bold",
            box=SIMPLE,
            padding=0,
            pad_edge=False,
        )
        header = self.header or [""] * len(self.rows[0])
        columns = zip(header, *self.rows, *self.totals, strict=True)
        names, *numbers = (max(cell_len(line) for cell in cells for line in cell.split("\n"))
                           for cells in columns)  # fmt: skip
        table.add_column(Text(header[0]), overflow="fold", min_width=min(names, SHORT_NAME))
        for name, width in zip(header[1:], numbers, strict=True):
            table.add_column(Text(name), justify="right", min_width=width)
        for row in self.rows:
            table.add_row(*map(Text, row))
        table.add_section()
        for row in self.totals:
            table.add_row(*map(Text, row), style="bold")
        return table

    def print(self, console: Console) -> None:
        """Print table and legend. Numbers are never cut: lines may be too long."""
        drawn = self.drawn()
        width, wide = console.width, console.options.update_width(WIDEST)
        console.width = max(width, Measurement.get(console, wide, drawn).minimum)
        console.print(drawn)
        console.width = width
        if self.legend:
            console.print(Text(self.legend, style="dim"))

    def markdown(self) -> list[str]:
        """Return the lines of the table, which has a header, in Markdown; without title, legend."""

        def line(cells: Row) -> str:
            texts = (cell.replace("\n", " ").replace("|", "\\|") for cell in cells)
            return f"| {' | '.join(texts)} |"

        alignment = ["---", *["---:"] * (len(self.header) - 1)]
        return [line(row) for row in (self.header, alignment, *self.rows, *self.totals)]
