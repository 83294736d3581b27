"""The page of inspect-buffer: one HTML file with figures, tables and rollouts, which loads
nothing."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo_replay.lab.inspection.buffer_figures import caption_of, panel_figures
from grpo_replay.lab.inspection.buffer_summary import Inspection
from grpo_replay.lab.inspection.buffer_tables import (
    Trend,
    describe_settings,
    occupancy_facts,
    outcomes_table,
    populations_table,
    title_of,
    trends_header,
    trends_of,
    trends_title,
)
from grpo_replay.lab.inspection.compute import Records
from grpo_replay.lab.inspection.shown_rollouts import ShownRollouts, shown_rollouts
from grpo_replay.lab.inspection.source import Source
from grpo_replay.storage.atomic import write_text_whole
from grpo_replay.terminal.console import printable
from grpo_replay.terminal.html_page import render_page
from grpo_replay.terminal.plot_style import svg_element, svg_text
from grpo_replay.terminal.text_table import TextTable

_FOLDER = "lab/inspection"
_CURVE_WIDTH, _CURVE_HEIGHT, _CURVE_POINTS = 220, 22, 110

_COLUMNS = (
    ("id", 4.8, "", "of the rollout"),
    ("step", 4.2, "", "training step of its birth"),
    ("prompt", 9, "left", "id of the prompt"),
    ("state", 5.6, "left", "after the inspected step"),
    ("verdict", 6.4, "left", "of the reward"),
    ("reward", 4.8, "", ""),
    ("advantage", 6, "", "in its group"),
    ("tokens", 4.8, "", "of the completion"),
    ("draws", 4.4, "", "times drawn from the buffer"),
    ("clipped", 5, "", "tokens without a gradient, %: the most of any use"),
    ("KL", 4.8, "", "nats per token from the policy at birth: the most of any use"),
    ("completion", None, "left", "as the reward saw it"),
)
"""Heading, width in rem, alignment and meaning of the columns that the script fills."""


@dataclass(frozen=True, slots=True)
class PageFigure:
    """An SVG element and its caption, one sentence."""

    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Page:
    """The content of a page, without its layout."""

    title: str
    settings: str
    warnings: tuple[str, ...]
    figures: tuple[PageFigure, ...]
    tables: tuple[TextTable, ...]
    trends_title: str
    trends_header: tuple[str, str, str, str]
    trends: tuple[Trend, ...]
    age_unit: str
    in_shadow: bool  # draws were not trained on
    path: str
    can_show: bool  # `inspect-buffer PATH --show ID` prints what the page cuts
    rollouts: ShownRollouts


def make_page(source: Source, records: Records, inspection: Inspection) -> Page:
    """Make a source's page. Raises SnapshotError for an unreadable file."""
    return Page(
        title=printable(title_of(inspection)),
        settings=describe_settings(inspection),
        warnings=inspection.warnings,
        figures=tuple(_figures(inspection)),
        tables=tuple(_tables(inspection)),
        trends_title=trends_title(inspection),
        trends_header=trends_header(inspection),
        trends=trends_of(inspection),
        age_unit=inspection.age_unit,
        in_shadow=records.settings.shadow,
        path=printable(inspection.path),
        can_show=bool(source.rollout_files),
        rollouts=shown_rollouts(source, records),
    )


def _figures(inspection: Inspection) -> list[PageFigure]:
    return [
        PageFigure(svg_element(svg_text(figure, name), name), caption_of(name, inspection))
        for name, figure in panel_figures(inspection)
    ]


def _tables(inspection: Inspection) -> list[TextTable]:
    """Makes the tables that have data: occupancy, populations, outcomes by age."""
    tables = []
    if inspection.replays:
        tables.append(TextTable((), [*occupancy_facts(inspection)], "occupancy"))
    if inspection.populations:
        tables.append(populations_table(inspection))
    if any(age > 0 for age in inspection.by_age):
        tables.append(outcomes_table(inspection))
    return tables


def write_page(page: Page, path: Path) -> None:
    """Write a page as one file. Text of the run is escaped, or inserted as text by the script."""
    script = (files("grpo_replay") / _FOLDER / "buffer_page.js").read_text(encoding="utf-8")
    text = render_page(
        f"{_FOLDER}/buffer_page.html",
        page=page,
        columns=_COLUMNS,
        curves=[_curve(trend.values) for trend in page.trends],
        curve_size=(_CURVE_WIDTH, _CURVE_HEIGHT),
        data=script_data(_data(page)),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    write_text_whole(path, text)


def _data(page: Page) -> dict[str, Any]:
    """Returns the data of the script: the rollouts, the unit of ages, and the path for `--show`."""
    rollouts = _fields(page.rollouts)
    return rollouts | {"age_unit": page.age_unit, "path": page.path if page.can_show else None}


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def script_data(document: Any) -> str:
    """JSON for a script element, which no text in it can close: without `<`, and in ASCII."""
    text = json.dumps(document, default=_fields, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _curve(values: Sequence[float]) -> str:
    """Returns the points of an SVG polyline through at most `_CURVE_POINTS` means of consecutive
    values, scaled to their range; larger values are higher."""
    cells = min(_CURVE_POINTS, len(values))
    bounds = [len(values) * cell // cells for cell in range(cells + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(bounds)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    across, down = _CURVE_WIDTH / max(1, cells - 1), _CURVE_HEIGHT - 4
    return " ".join(
        f"{cell * across:.1f},{2 + down * (1 - (mean - low) / span):.1f}"
        for cell, mean in enumerate(means)
    )
