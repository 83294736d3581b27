"""Requests to stop a run: by a signal, or by code that notices that it must end."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from grpo_replay.errors import EXIT_AFTER_PEER, GrpoReplayError, first_line

STOPPING_MESSAGE = (
    b"\nstopping after this step, with a checkpoint; Ctrl-C again stops now, and loses the steps "
    b"since the last one\n"
)
"""Printed at once after Ctrl-C: a step may take minutes."""


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
        """Request a stop, from any thread. The first reason is kept."""
        self.reason = self.reason or reason
        self._event.set()

    def end(self, error: GrpoReplayError) -> None:
        """Request a stop because of this error, which is raised once the run is saved."""
        self.error = self.error or error
        self.request(first_line(error))

    def raise_error(self) -> None:
        """Raise the error that the stop was requested for, if any."""
        if self.error is not None:
            raise self.error

    def wait(self, seconds: float) -> bool:
        """Wait for a request at most these seconds. Returns whether there is one."""
        return self._event.wait(seconds)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """A context in which SIGINT, SIGTERM, SIGUSR1 and SIGHUP are requests to stop; a SIGHUP
        ignored before, as under nohup, stays so. Off the main thread, which gets all signals, it
        does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Handles a signal: a request to stop. A second Ctrl-C, and any signal before the run can
        be saved, interrupts at once; a rank that has no run yet ends as after a peer's failure."""
        is_rank = "WORLD_SIZE" in os.environ
        if not self.can_save and number == signal.SIGTERM and is_rank:
            raise SystemExit(EXIT_AFTER_PEER)  # another rank failed, and reports it
        # torch's launcher turns a second Ctrl-C into a SIGTERM.
        repeats = (signal.SIGINT, signal.SIGTERM) if self.reason == "SIGINT" else (signal.SIGINT,)
        is_repeated = self.requested and number in repeats
        if not self.can_save or is_repeated:
            raise KeyboardInterrupt
        if number == signal.SIGINT and sys.__stderr__ and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError, ValueError):  # it is closed, or no file
                # Not print: the signal may have interrupted one.
                os.write(sys.__stderr__.fileno(), STOPPING_MESSAGE)
        self.request(signal.Signals(number).name)
