"""Output whose reader may go away: `… | head`, a terminal that was closed."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_READER_GONE = (errno.EPIPE, errno.EIO)  # a closed pipe; a terminal that hung up


class GuardedStream:
    """A text stream that drops what is written once its reader is gone: then `lost_reader` is True,
    and its descriptor leads to /dev/null, so that nothing fails when Python ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost_reader = False

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
            if error.errno not in _READER_GONE:
                raise
            self.lost_reader = True
            self._lead_nowhere()

    def _lead_nowhere(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def guarded_stderr() -> Iterator[GuardedStream]:
    """A context in which sys.stderr is guarded; yields it."""
    before = sys.stderr
    stream = GuardedStream(before)
    sys.stderr = cast(TextIO, stream)
    try:
        yield stream
    finally:
        sys.stderr = before
