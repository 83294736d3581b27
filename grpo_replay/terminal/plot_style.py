"""How figures look: column width, fonts that stay legible there, colours that everyone can tell."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_replay.errors import UsageError

COLUMN_INCHES = 3.3
"""Width of one column of a paper."""

# Okabe and Ito's palette: distinguishable with every common colour blindness and in grey.
STORED = "#0072B2"
REPLAYED = "#E69F00"
FRESH = "#009E73"
WARN = "#D55E00"
GREY = "#6F6F6F"

_SETTINGS = {
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
    # Text stays text in SVG: small files, searchable, and the browser's own fonts.
    "svg.fonttype": "none",
    "svg.hashsalt": "grpo-replay",
}


@contextmanager
def figure_style():
    """matplotlib with our settings and no display; yields `matplotlib.figure.Figure`."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        yield Figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG (300 dpi) or SVG, by the file's ending.

    Raises UsageError for another ending, or a folder that does not exist.
    """
    check_plot_path(path, (".png", ".svg"))
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    figure.savefig(path, metadata=metadata)


def check_plot_path(path: Path, endings: tuple[str, ...]) -> None:
    if path.suffix.lower() not in endings:
        raise UsageError(f"--plot {path}: the file must end in {', '.join(endings)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}; create it first")
