"""Style shared by all figures: column width, font sizes, a colour-blind-safe palette."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_replay.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

COLUMN_INCHES = 3.3
"""Width of one column of a two-column paper."""

# From the palette of Okabe and Ito, which stays distinguishable under colour blindness.
STORED = "#0072B2"
REPLAYED = "#E69F00"
FRESH = "#009E73"
WARN = "#D55E00"
GREY = "#6F6F6F"

FIGURE_FORMATS = (".png", ".svg", ".pdf")
_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # equal runs, equal files

_SETTINGS: "dict[RcKeyType, Any]" = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "lines.linewidth": 1.2,
    "lines.markersize": 2.5,
    "figure.dpi": 100,
    "savefig.dpi": 300,
    # Keep text as text in SVG: smaller, searchable files that use the browser's fonts.
    "svg.fonttype": "none",
    "svg.hashsalt": "grpo-replay",
}


@contextmanager
def figure_style() -> "Iterator[type[Figure]]":
    """Apply our matplotlib settings; yields the `Figure` class, which needs no display."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        yield Figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG (300 dpi), SVG or PDF, depending on the file extension.

    Raises UsageError for another extension, or if the folder does not exist, OSError if the file
    cannot be written; an existing file then stays.
    """
    check_plot_path(path, FIGURE_FORMATS)
    kind = path.suffix.lower()
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        figure.savefig(temporary, format=kind.removeprefix("."), metadata=_UNDATED.get(kind))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def svg_text(figure: Any, title: str) -> str:
    """Returns a figure as the text of an SVG file."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    return buffer.getvalue()


def svg_element(svg: str, name: str) -> str:
    """Cut the element out of an SVG file, for an HTML page.

    Its ids begin with `name` (letters and digits): figures of a page must not share ids.
    """
    element = svg[svg.index("<svg") :]
    prefix = "".join(filter(str.isalnum, name))
    for mark in ('id="', 'href="#', "url(#"):
        element = element.replace(mark, f"{mark}{prefix}-")
    return element


def check_plot_path(path: Path, extensions: tuple[str, ...]) -> None:
    """Raises UsageError for another extension, or if the folder does not exist."""
    if path.suffix.lower() not in extensions:
        raise UsageError(f"--plot {path}: the file must end in {', '.join(extensions)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: folder {path.parent} does not exist; create it first")


def legend_above(axes: Any) -> None:
    """Put a legend next to the title, where it does not cover data."""
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.98),
        ncols=3,
        borderaxespad=0,
        handlelength=1.0,
        columnspacing=1.0,
        handletextpad=0.4,
    )


def whole_numbers(axis: Any) -> None:
    """Ticks at whole numbers, at most eight."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=8))
