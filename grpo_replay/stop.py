"""The one way in which a run is asked to stop: by a signal, or by what notices that it should."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from grpo_replay.errors import FOLLOWED, GrpoReplayError, first_line

HEARD = (
    b"\nstopping after this step, with a checkpoint; Ctrl-C again stops now, and loses the steps "
    b"since the last one\n"
)
"""What Ctrl-C shows at once: a step may take minutes."""


class StopToken:
    """Keeps the first request to stop and its reason, until the work can end in an orderly way.

    `can_save` is set once there is a run to save. Before that a signal ends the process at once.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason: str | None = None
        self.error: GrpoReplayError | None = None
        self.can_save = False

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str) -> None:
        """Ask to stop, from any thread. Later reasons are not kept."""
        self.reason = self.reason or reason
        self._event.set()

    def end(self, error: GrpoReplayError) -> None:
        """Ask to stop because of this error: the work ends with it, once it is saved."""
        self.error = self.error or error
        self.request(first_line(error))

    def raise_error(self) -> None:
        """Raise what the work ends with, if it is an error."""
        if self.error is not None:
            raise self.error

    def wait(self, seconds: float) -> bool:
        """Returns whether a stop is requested, as soon as it is or after these seconds."""
        return self._event.wait(seconds)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """A context in which SIGINT, SIGTERM, SIGUSR1 and SIGHUP are requests to stop. A SIGHUP
        that is ignored, as under nohup, stays so. Does nothing outside the main thread, which alone
        gets signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _: FrameType | None) -> None:
        is_rank = "WORLD_SIZE" in os.environ
        if not self.can_save and number == signal.SIGTERM and is_rank:
            raise SystemExit(FOLLOWED)  # another rank failed, and reports it
        # Of a second Ctrl-C torch's launcher makes a SIGTERM.
        again = (signal.SIGINT, signal.SIGTERM) if self.reason == "SIGINT" else (signal.SIGINT,)
        if not self.can_save or (self.requested and number in again):
            raise KeyboardInterrupt
        if number == signal.SIGINT and sys.__stderr__ and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError, ValueError):  # it is closed, or no file
                os.write(sys.__stderr__.fileno(), HEARD)  # not print, amid which we may be
        self.request(signal.Signals(number).name)
