"""Bars and sparklines made of Unicode characters."""

from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"


def bar(value: float, largest: float, width: int) -> str:
    """A bar of at most `width` cells, in eighths of a cell; at least one eighth if value > 0."""
    if largest <= 0 or value <= 0:
        return ""
    eighths = max(1, round(8 * width * min(1.0, value / largest)))
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def sparkline(values: Sequence[float], width: int) -> str:
    """A sparkline of at most `width` cells. Each cell is a mean of consecutive values."""
    if not values:
        return ""
    cells = min(width, len(values))
    means = []
    for cell in range(cells):
        part = values[cell * len(values) // cells : (cell + 1) * len(values) // cells]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    span = high - low
    if span <= 1e-12 * max(abs(low), abs(high)):
        return _LEVELS[3] * cells
    return "".join(_LEVELS[round(7 * (mean - low) / span)] for mean in means)
