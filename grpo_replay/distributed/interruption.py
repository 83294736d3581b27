"""What asks a run to stop: Ctrl-C, SIGTERM, a hang-up, a closed output. It checkpoints first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Remembers the first request to stop until the run can. `reason` says what asked, or None. A
    further SIGINT raises at once."""

    def __init__(self) -> None:
        self.reason: str | None = None

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask to stop. Later reasons are not kept."""
        self.reason = self.reason or reason

    @contextmanager
    def caught(self) -> Iterator[None]:
        """A context in which SIGINT, SIGTERM and SIGHUP are requests. A SIGHUP that is ignored, as
        under nohup, stays so."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A context in which SIGTERM raises KeyboardInterrupt as Ctrl-C does. Main thread only."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
