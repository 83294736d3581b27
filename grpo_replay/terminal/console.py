"""What commands print: consoles that show text of a run as text, bars and progress; and their
streams: a reader may go away, and they may be not UTF-8."""

import codecs
import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.segment import Segment

Item = TypeVar("Item")

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

    def on_broken_pipe(self) -> None:
        raise  # the error of the write, for the command's error boundary

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


def print_json(document: Any) -> None:
    """Print the one JSON document of `--json`, without NaN, to stdout. What a stdout that is not
    UTF-8 may lack is escaped."""
    is_utf8 = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
    print(json.dumps(document, indent=2, ensure_ascii=not is_utf8, allow_nan=False))


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
    """A sparkline of at most `width` cells. Each cell is a mean of consecutive values;
    without any change all are the lowest."""
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
        return _LEVELS[0] * cells
    return "".join(_LEVELS[round(7 * (mean - low) / span)] for mean in means)


def tracked(items: Sequence[Item], description: str) -> Iterable[Item]:
    """The items in order, with a bar while that lasts if stderr is a terminal."""
    from rich.progress import track

    console, disable = Console(stderr=True), not sys.stderr.isatty()
    return track(items, escape(description), console=console, transient=True, disable=disable)


_READER_GONE = (errno.EPIPE, errno.EIO)  # a closed pipe; a terminal that hung up


class GuardedStream:
    """A text stream that drops what is written once its reader is gone: then it calls `on_lost`,
    and its descriptor leads to /dev/null, so that nothing fails when Python ends. With `may_fail`
    any failed write, on a full disk for example, leads it there."""

    def __init__(self, stream: TextIO, may_fail: bool = False) -> None:
        self._stream = stream
        self._may_fail = may_fail
        self.on_lost: Callable[[], None] = lambda: None

    def write(self, text: str) -> int:
        with self._reader_may_go():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._reader_may_go():
            self._stream.flush()

    @contextmanager
    def _reader_may_go(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            is_gone = error.errno in _READER_GONE
            if not (is_gone or self._may_fail):
                raise
            lead_nowhere(self._stream)
            if is_gone:
                self.on_lost()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lead_nowhere(stream: Any) -> None:
    """Lead the descriptor of a stream to the null device, so that what it still holds is dropped
    instead of failing when Python ends."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _open_nowhere(number: int, name: str) -> None:
    """Open the null device as a standard stream. A file that is opened later would else get its
    number, and with it what is written to the stream."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    mode = "r" if name == "stdin" else "w"
    setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


@contextmanager
def guarded_stderr() -> Iterator[GuardedStream]:
    """A context in which sys.stderr is guarded; yields it."""
    before = sys.stderr
    stream = before if isinstance(before, GuardedStream) else GuardedStream(before)
    sys.stderr = cast(TextIO, stream)
    try:
        yield stream
    finally:
        sys.stderr = before


def prepare_streams() -> None:
    """Prepare stdout and stderr for a whole command, its first act: those that are closed, as some
    services start programs, become the null device; characters that stdout lacks become `?`, and no
    failed write to stderr fails more than that message."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_nowhere(number, name)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    sys.stderr = cast(TextIO, GuardedStream(sys.stderr, may_fail=True))
