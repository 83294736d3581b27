"""One verifier process, as its pool sees it: start, ask, wait no longer than the limit, kill."""

import contextlib
import os
import select
import subprocess
import sys
import time
from typing import Any

from grpo_replay.rewards import wire

START_TIMEOUT_SECONDS = 120.0


class WorkerGone(Exception):
    """The process ended without an answer."""


class WorkerLate(Exception):
    """The process did not answer within its limit."""


class VerifierProcess:
    """A child that runs `grpo_replay.rewards.worker`. Must be started by a thread that outlives
    it: Linux kills the child when that thread ends."""

    def __init__(self, function: str, memory_limit_mib: int) -> None:
        self.answered = 0
        self._frames = wire.FrameBuffer()
        command = [sys.executable, "-P", "-m", "grpo_replay.rewards.worker", function]
        self._process = subprocess.Popen(
            [*command, str(memory_limit_mib), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
        )
        self._stdout = self._process.stdout.fileno()

    def wait_ready(self) -> None:
        """Returns when the grader is loaded. Raises WorkerGone, WorkerLate, or ImportError with
        the worker's own message."""
        message = self.receive(START_TIMEOUT_SECONDS)
        if "failed" in message:
            raise ImportError(message["failed"])

    def send(self, bodies: list[bytes]) -> None:
        """Hand over tasks. Raises WorkerGone."""
        try:
            self._process.stdin.write(wire.frame_of_list(bodies))
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise WorkerGone from error

    def receive(self, limit_seconds: float) -> dict[str, Any]:
        """The next message. Raises WorkerGone or WorkerLate."""
        deadline = time.monotonic() + limit_seconds
        while (message := self._frames.pop()) is None:
            # Look at the pipe before the clock: this thread itself may have been kept waiting.
            waiting = select.poll()
            waiting.register(self._stdout, select.POLLIN | select.POLLHUP)
            if not waiting.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise WorkerLate
            piece = os.read(self._stdout, 1 << 16)
            if not piece:
                raise WorkerGone
            self._frames.feed(piece)
        return message

    def kill(self) -> None:
        """End the process at once; may be called twice, and from another thread."""
        self._process.kill()

    def reap(self) -> None:
        """Kill, wait and close the pipes."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def _environment() -> dict[str, str]:
    # The worker finds the same packages, and no GPU: a reward must not take the trainer's memory.
    paths = [path for path in sys.path if path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
