"""Rank 0's side of the collector: its process, its messages, and whether it is alive."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from grpo_replay import errors
from grpo_replay.collection.messages import (
    CollectorSettings,
    Command,
    Delivery,
    Failure,
    Report,
    Stop,
    decode_delivery,
    encode,
)
from grpo_replay.distributed.environment import PYTHON_MODULE, import_path
from grpo_replay.distributed.held_folder import HeldFolder
from grpo_replay.sampling.server.server_process import TRAINER_VARIABLES, log_tail

SOCKET_PARENT = Path("/tmp")
STOP_SECONDS = 5.0
SILENCE_SECONDS = 120.0
"""Time without a message after which a running collector counts as stuck. It reports every second,
from when prompts and tokenizer are loaded."""
START_SECONDS = 600.0


class CollectorGone(Exception):
    """The collector's process ended, or is stuck. Its work is lost; a new one can continue."""


class Link:
    """A collector process and two sockets in a private folder. Use it from one thread at a time.

    `report` is the newest report received; before the first one, its counts are 0.
    """

    def __init__(self, settings: CollectorSettings) -> None:
        """Opens the sockets, and starts the collector's process."""
        self.report = Report(sent=time.monotonic())
        self._has_message = False
        # Mode 700. The path of a Unix socket has at most 107 bytes, and TMPDIR may be long.
        self._held = HeldFolder("grpo-replay-link-", SOCKET_PARENT)
        self._folder = self._held.path
        self._context = zmq.Context()
        self._deliveries = self._socket(zmq.PULL)
        self._deliveries.bind(self._address("deliveries"))
        # The side that connects may send before the other side exists.
        self._commands = self._socket(zmq.PUSH)
        self._commands.connect(self._address("commands"))
        self._log = settings.log
        self._process = self._spawn(settings)

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder / name}"

    def _spawn(self, settings: CollectorSettings) -> subprocess.Popen:
        """Starts the collector's process, with settings in a file and its output in the log."""
        file = self._folder / "settings.json"
        values = {name: getattr(settings, name) for name in CollectorSettings.__slots__}
        values |= {"recipe": settings.recipe.model_dump(mode="json"), "log": str(settings.log)}
        sockets = {name: self._address(name) for name in ("deliveries", "commands")}
        file.write_text(json.dumps({"settings": values, "parent": os.getpid(), **sockets}))
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        with settings.log.open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, *PYTHON_MODULE),
                    *("grpo_replay.collection.collector_process", str(file)),
                ],
                env=collector_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the trainer, which says Stop
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Send a command without waiting."""
        self._commands.send(encode(command), zmq.NOBLOCK)

    def receive(self, timeout_seconds: float = 0.0) -> Iterator[Delivery]:
        """Yield the messages that have arrived; waits for the first at most `timeout_seconds`.

        Raises CollectorGone if the process ended or is stuck, and the error that it reported.
        """
        waited = timeout_seconds
        while self._deliveries.poll(int(1000 * waited)):
            waited = 0.0
            delivery = decode_delivery(self._deliveries.recv(zmq.NOBLOCK))
            self._has_message = True
            if isinstance(delivery.body, Failure):
                raise as_error(delivery.body, self._log)
            self.report = delivery.report
            yield delivery
        self._refuse_gone()

    def _refuse_gone(self) -> None:
        """Raises CollectorGone if the process ended and all it sent is read, or if its newest
        message is older than SILENCE_SECONDS (START_SECONDS before the first one, while it loads
        prompts and tokenizer). Called when `receive` has read what arrived."""
        code = self._process.poll()
        if code is not None and not self._deliveries.poll(0):
            raise CollectorGone(f"it exited with code {code}; {log_tail(self._log)}")
        silent = time.monotonic() - self.report.sent
        limit = SILENCE_SECONDS if self._has_message else START_SECONDS
        if silent > limit:
            raise CollectorGone(
                f"it has reported nothing for {silent:.0f} s; {log_tail(self._log)}"
            )

    def close(self) -> None:
        """End the process and remove the sockets. May be called twice."""
        if self._process.poll() is None:
            with contextlib.suppress(zmq.ZMQError):
                self.send(Stop())
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._deliveries.close()
        self._commands.close()
        self._context.term()
        self._held.release()


def collector_environment() -> dict[str, str]:
    """Returns this process's environment for the collector: no GPU, one thread, this process's
    import path, none of the variables that would make it a rank."""
    without_rank = {k: v for k, v in os.environ.items() if k not in TRAINER_VARIABLES}
    return {
        **without_rank,
        **import_path(),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def as_error(failure: Failure, log: Path) -> Exception:
    """Returns the collector's error as an exception of the same class, or a CollectorError if that
    class is not one of this package's."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.GrpoReplayError):
        return kind(failure.message)
    return errors.CollectorError(
        f"the collector failed with {failure.kind}: {failure.message}; its log is {log}. Resume "
        "from the last checkpoint with --resume"
    )
