"""Output of commands: consoles that show a run's text without interpreting it, bars and progress;
and streams whose reader may close them, or that are not UTF-8."""

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
    """Returns the text with control characters as Unicode pictures (ESC is ␛), and other
    unprintable ones as �. Line breaks and tabs stay."""
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
    """Open a console for results (stdout) or progress (stderr), or on another stream.

    With `markup`, the caller escapes every text that comes from the user or the run.
    """
    return PlainConsole(
        stderr=stderr, file=file, markup=markup, emoji=False, highlight=False, soft_wrap=soft_wrap
    )


def print_json(document: Any) -> None:
    """Print the one JSON document of `--json` to stdout. Raises ValueError for NaN. If stdout is
    not UTF-8, characters outside ASCII are escaped."""
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
    """Draw a sparkline of at most `width` cells, each a mean of consecutive values, from the lowest
    to the highest mean; if all are equal, at the lowest level."""
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
    """Iterate over the items, with a progress bar if stderr is a terminal."""
    from rich.progress import track

    console, disable = Console(stderr=True), not sys.stderr.isatty()
    return track(items, escape(description), console=console, transient=True, disable=disable)


_READER_CLOSED = (errno.EPIPE, errno.EIO)  # a closed pipe; a terminal that hung up


class GuardedStream:
    """A text stream that survives its reader: once the reader has closed it, it calls `on_lost` and
    redirects its descriptor to /dev/null, so that nothing fails when Python exits. With `may_fail`
    it does so after any failed write, for example on a full disk."""

    def __init__(self, stream: TextIO, may_fail: bool = False) -> None:
        self._stream = stream
        self._may_fail = may_fail
        self.on_lost: Callable[[], None] = lambda: None

    def write(self, text: str) -> int:
        with self._tolerate_closed_reader():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._tolerate_closed_reader():
            self._stream.flush()

    @contextmanager
    def _tolerate_closed_reader(self) -> Iterator[None]:
        """Within the block, a write error redirects the stream instead of being raised."""
        try:
            yield
        except OSError as error:
            is_closed = error.errno in _READER_CLOSED
            if not (is_closed or self._may_fail):
                raise
            redirect_to_devnull(self._stream)
            if is_closed:
                self.on_lost()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redirect_to_devnull(stream: Any) -> None:
    """Redirect the descriptor of a stream to /dev/null, so that its buffered text is dropped
    instead of causing an error when Python exits."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


def _open_devnull(number: int, name: str) -> None:
    """Open /dev/null as a standard stream. Otherwise the next file to be opened would get the
    descriptor of the stream, and with it the text written to the stream."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    mode = "r" if name == "stdin" else "w"
    setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


@contextmanager
def guarded_stderr() -> Iterator[GuardedStream]:
    """Guard sys.stderr, inside this context, against a reader that closes it. Yields the
    `GuardedStream`, the present one if there is one, for its `on_lost`."""
    before = sys.stderr
    stream = before if isinstance(before, GuardedStream) else GuardedStream(before)
    sys.stderr = cast(TextIO, stream)
    try:
        yield stream
    finally:
        sys.stderr = before


def prepare_streams() -> None:
    """Prepare the standard streams of a command, before anything else. Closed ones, as under some
    service managers, become /dev/null; characters that stdout cannot encode become `?`; a failed
    write to stderr loses only that message."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_devnull(number, name)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    sys.stderr = cast(TextIO, GuardedStream(sys.stderr, may_fail=True))
