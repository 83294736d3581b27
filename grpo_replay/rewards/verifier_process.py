"""A handle on one verifier process: start, send tasks, receive with a timeout, kill."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from grpo_replay.rewards import wire

START_TIMEOUT_SECONDS = 120.0


class WorkerGone(Exception):
    """The process ended before it answered."""


class WorkerLate(Exception):
    """The process did not answer within the time limit."""


class VerifierProcess:
    """A child process that runs `grpo_replay.rewards.verifier_worker`.

    The thread that starts it must outlive it: Linux kills the child when that thread ends.
    """

    def __init__(self, functions: Sequence[str], memory_limit_mib: int) -> None:
        self.answered = 0
        self._frames = wire.FrameBuffer()
        command = [sys.executable, "-P", "-m", "grpo_replay.rewards.verifier_worker"]
        self._process = subprocess.Popen(
            [*command, json.dumps(list(functions)), str(memory_limit_mib), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # a process group, so that what it starts is killed with it
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # pipes
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)

    def wait_ready(self) -> dict[str, str]:
        """The SHA-256 of the source file of each function of the user, once all are loaded.

        Raises WorkerGone, WorkerLate, or ImportError with the worker's message.
        """
        message = self.receive(START_TIMEOUT_SECONDS)
        if "failed" in message:
            raise ImportError(message["failed"])
        return message["sources"]

    def send(self, bodies: list[bytes], limit_seconds: float) -> None:
        """Send tasks. Raises WorkerGone, or WorkerLate if the process takes nothing from the pipe
        for so long: it is stopped, or the machine is out of memory."""
        left = memoryview(wire.frame_of_list(bodies))
        waiting = select.poll()
        waiting.register(self._stdin.fileno(), select.POLLOUT)
        while left:
            if not waiting.poll(1000 * limit_seconds):
                raise WorkerLate
            try:
                left = left[os.write(self._stdin.fileno(), left[: 1 << 16]) :]
            except BlockingIOError:
                continue
            except (BrokenPipeError, ValueError) as error:
                raise WorkerGone from error

    def receive(self, limit_seconds: float) -> dict[str, Any]:
        """The next message. Raises WorkerGone or WorkerLate."""
        deadline = time.monotonic() + limit_seconds
        while (message := self._frames.pop()) is None:
            # Poll even after the deadline: this thread itself may have been descheduled.
            waiting = select.poll()
            waiting.register(self._stdout.fileno(), select.POLLIN | select.POLLHUP)
            if not waiting.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise WorkerLate
            piece = os.read(self._stdout.fileno(), 1 << 16)
            if not piece:
                raise WorkerGone
            self._frames.feed(piece)
        return message

    def exit_reason(self) -> str:
        """How a process that is gone ended, for messages."""
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        self._kill_group()
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kill the process and those that it started. May be called twice, and from another
        thread."""
        if self._process.returncode is None:  # else its number may be that of another group
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Kill the process and those that it started, wait for it and close the pipes."""
        self.kill()
        self._process.wait()
        self._stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()


def _environment() -> dict[str, str]:
    # Same packages, but no GPU: a reward function must not use the trainer's GPU memory.
    paths = [path for path in sys.path if path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
