"""Ctrl-C and SIGTERM: finish the step, checkpoint, stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Remembers SIGINT and SIGTERM until the step is over. A further SIGINT raises at once."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A context in which SIGTERM raises KeyboardInterrupt as Ctrl-C does. Main thread only."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
