"""Cells as processes of this machine, which share its cores."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Protocol

from grpo_replay.distributed.environment import CORES_VARIABLE, available_cores
from grpo_replay.experiments.cells import (
    CellState,
    clear_empty_folders,
    describe_holder,
    is_running,
    locked_log,
    note_start,
    train_arguments,
)
from grpo_replay.experiments.grid import Cell

ENTRY = "grpo_replay.experiments.entry"


class Running(Protocol):
    """A cell at work."""

    def poll(self) -> int | None:
        """The exit code once it has ended (negative: killed by that signal); None before."""

    def stop(self, number: int) -> None:
        """Send it a signal."""

    def describe(self) -> str:
        """`process 1234`."""


class Launcher(Protocol):
    """Starts cells."""

    def start(self, cell: Cell, state: CellState) -> Running:
        """Start a new cell, or resume a started one."""


class LocalProcess:
    """A cell that this process started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self, number: int) -> None:
        self._process.send_signal(number)

    def describe(self) -> str:
        return f"process {self._process.pid}"


class LeftoverProcess:
    """A cell that a sweep before this one started, and that is still alive."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def poll(self) -> int | None:
        return None if is_running(self._cell) else 0

    def stop(self, number: int) -> None:
        pid = describe_holder(self._cell).removeprefix("process ")
        if pid.isdigit() and is_running(self._cell):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def describe(self) -> str:
        return describe_holder(self._cell)


class LocalLauncher:
    """Starts each cell as `grpo-replay train` in a session of its own, with its share of the
    cores. Call it from the main thread: the cells stop when the thread that started them dies."""

    def __init__(self, jobs: int) -> None:
        self.cores = max(1, available_cores() // jobs)

    def start(self, cell: Cell, state: CellState) -> LocalProcess:
        share = {CORES_VARIABLE: str(self.cores), "OMP_NUM_THREADS": str(self.cores)}
        return LocalProcess(start_process(cell, state, share))


def start_process(
    cell: Cell, state: CellState, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the cell's process, which stops when this one dies. It holds the lock of the cell.

    Raises CellRunning if a process of the cell is alive.
    """
    words = [sys.executable, "-m", ENTRY, str(os.getpid()), *train_arguments(cell, state)]
    with locked_log(cell) as log:
        if state is CellState.NEW:
            clear_empty_folders(cell)
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # signals reach it once, through the process that started it
            env={**os.environ, **environment},
        )
        note_start(log, process.pid, cell, state)
    return process


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
"""What a cell gets at the first, second and third request to stop: finish the step and checkpoint;
stop at once; die."""
