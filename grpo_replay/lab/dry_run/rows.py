"""The figures of a dry run as typed rows, which the terminal and JSON show alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """A figure: `key` names it in JSON, `label` on the terminal, which leaves out rows without one.

    `value` is None if it is not known. `most` is the upper bound of an expected value, whose key
    ends in `_expected`, and the bound's in `_most`.
    """

    key: str
    label: str
    value: Any
    most: float | None = None

    def cells(self) -> tuple[str, str, str]:
        """The row of a table: label, value and upper bound."""
        return f"  {self.label}", _text(self.value), _text(self.most)


@dataclass(frozen=True, slots=True)
class Section:
    """Rows under `name` in JSON and under `title` on the terminal; none if nothing is known."""

    name: str
    title: str
    rows: Sequence[Row] = ()

    def to_json(self) -> dict[str, Any] | None:
        values = {row.key: row.value for row in self.rows}
        bounds = {row.key.replace("_expected", "_most"): row.most for row in self.rows
                  if row.most is not None}  # fmt: skip
        return values | bounds or None

    def shown(self) -> list[Row]:
        """The rows with a label, except what is unknown or zero."""
        return [row for row in self.rows if row.label and (row.value or row.most)]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " to ".join(map(_text, value))
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool):
        return "yes"  # rows that are False are not shown
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
