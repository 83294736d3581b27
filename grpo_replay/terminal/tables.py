"""Tables whose numbers are never cut off."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDEST = 10_000  # columns; more than any table needs


def print_table(console: Console, table: Table) -> None:
    """Print a table; on a narrow terminal lines may be too long, but no number is truncated.

    The columns have a `min_width` for what may not be truncated.
    """
    width, wide = console.width, console.options.update_width(WIDEST)
    console.width = max(width, Measurement.get(console, wide, table).minimum)
    console.print(table)
    console.width = width
