"""The figures of a dry run as typed rows, which the terminal and JSON show alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a dry run: `key` names it in JSON, `label` on the terminal.

    A row with an empty label is in JSON only. `value` is None if unknown. `most` is the upper bound
    of an expected value: the value's key ends in `_expected`, the bound's in `_most`.
    """

    key: str
    label: str
    value: Any
    most: float | None = None

    def cells(self) -> tuple[str, str, str]:
        """Returns the texts of a table row: label, value, upper bound ("" if unknown)."""
        return f"  {self.label}", _text(self.value), _text(self.most)


@dataclass(frozen=True, slots=True)
class Section:
    """Rows under `name` in JSON (null without any) and under `title` on the terminal."""

    name: str
    title: str
    rows: Sequence[Row] = ()

    def to_json(self) -> dict[str, Any] | None:
        values = {row.key: row.value for row in self.rows}
        bounds = {row.key.replace("_expected", "_most"): row.most for row in self.rows
                  if row.most is not None}  # fmt: skip
        return values | bounds or None

    def shown(self) -> list[Row]:
        """Returns the rows for the terminal: those with a label, unless unknown, zero or false."""
        return [row for row in self.rows if row.label and (row.value or row.most)]


def _text(value: Any) -> str:
    """Formats a value: a range as "a to b", numbers with separators, None as ""."""
    if isinstance(value, tuple):
        return " to ".join(map(_text, value))
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool):
        return "yes"  # rows that are False are not shown
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
