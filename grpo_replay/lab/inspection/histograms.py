"""Histograms for the terminal: tables of counts with bars."""

import math
from collections.abc import Sequence

from rich.table import Table

from grpo_replay.lab.inspection.buffer_summary import CountRow
from grpo_replay.terminal.bars import bar

STORED, REPLAYED = "blue", "dark_orange"


def plain_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")


def paired_bars(
    heading: str, rows: Sequence[tuple[str, int, int]], names: tuple[str, str]
) -> Table:
    """Two histograms side by side. Each is scaled to its own largest count."""
    table = plain_table()
    table.add_column(heading, justify="right", style="dim")
    width = 11
    for name, colour in zip(names, (STORED, REPLAYED), strict=True):
        table.add_column(name, justify="right", style=colour)
        table.add_column("", style=colour, width=width)
    largest_first = max((first for _, first, _ in rows), default=0)
    largest_second = max((second for _, _, second in rows), default=0)
    for label, first, second in rows:
        bars = (bar(first, largest_first, width), bar(second, largest_second, width))
        table.add_row(label, f"{first:,}", bars[0], f"{second:,}", bars[1])
    return table


def merge_rows(rows: Sequence[tuple[int, int, int]], limit: int) -> list[tuple[str, int, int]]:
    """(label, first, second), with adjacent values merged into at most `limit` equal spans."""
    if not rows:
        return []
    low, high = rows[0][0], rows[-1][0]
    span = math.ceil((high - low + 1) / limit)
    merged = []
    for start in range(low, high + 1, span):
        inside = [row for row in rows if start <= row[0] < start + span]
        end = min(start + span - 1, high)
        label = f"{start}" if end == start else f"{start}–{end}"
        merged.append((label, sum(r[1] for r in inside), sum(r[2] for r in inside)))
    return merged


def cap_counts(rows: Sequence[CountRow], limit: int) -> list[tuple[str, int]]:
    """At most `limit` pairs (label, count). The last one sums all larger values."""
    shown = [(str(row.value), row.rollouts) for row in rows[: limit - 1]]
    rest = rows[limit - 1 :]
    if len(rest) == 1:
        shown.append((str(rest[0].value), rest[0].rollouts))
    elif rest:
        shown.append((f"{rest[0].value}+", sum(row.rollouts for row in rest)))
    return shown


def count_table(heading: str, rows: Sequence[tuple[str, int]], colour: str) -> Table:
    table = plain_table()
    table.add_column(heading, justify="right", style="dim")
    table.add_column("", justify="right", style=colour)
    table.add_column("", style=colour, width=5)
    largest = max((count for _, count in rows), default=0)
    for label, count in rows:
        table.add_row(label, f"{count:,}", bar(count, largest, 5))
    return table


def thin_ages(ages: Sequence[int], limit: int) -> list[int]:
    """At most `limit` evenly spaced ages, including the first and the last."""
    if len(ages) <= limit:
        return list(ages)
    return sorted({ages[round(i * (len(ages) - 1) / (limit - 1))] for i in range(limit)})
