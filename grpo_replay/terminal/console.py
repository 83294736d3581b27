"""Consoles that show text of a run as text: no escape sequence in the data reaches the terminal."""

import re
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls, marks that reverse the direction of text, and lone surrogates."""


def printable(text: str) -> str:
    """The text with control characters as Unicode pictures (ESC is ␛); others that cannot be
    printed are �. Line breaks and tabs stay."""
    return _CONTROL.sub(lambda match: _picture(ord(match[0])), text)


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "�"


class PlainConsole(Console):
    """A Console that prints control characters in texts as pictures; its own styles still work."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not _CONTROL.search(segment.text):
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def open_console(
    *,
    stderr: bool = False,
    file: TextIO | None = None,
    markup: bool = False,
    soft_wrap: bool = False,
) -> Console:
    """A console for results (stdout) or progress (stderr), or on another stream.

    With `markup`, the caller escapes every text that comes from the user or the run.
    """
    return PlainConsole(
        stderr=stderr, file=file, markup=markup, emoji=False, highlight=False, soft_wrap=soft_wrap
    )
