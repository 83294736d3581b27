"""Cells as processes of this machine, which share its cores."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from grpo_replay.distributed.environment import CORES_VARIABLE, available_cores
from grpo_replay.errors import OutputDirectoryError, UsageError
from grpo_replay.lab.sweep.cells import (
    GPUS_VARIABLE,
    CellState,
    describe_holder,
    gpus_of,
    is_running,
    locked_log,
    note_start,
    train_arguments,
)
from grpo_replay.lab.sweep.grid import Cell

ENTRY = "grpo_replay.lab.sweep.cell_entry"
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


class Running(Protocol):
    """A cell at work. One that outlives the sweep is not told to stop with it."""

    outlives_sweep: bool

    def poll(self) -> int | None:
        """The exit code once it has ended (negative: killed by that signal); None before."""

    def stop(self, number: int) -> None:
        """Send it a signal."""

    def describe(self) -> str:
        """`process 1234`."""

    def reason(self) -> str | None:
        """Why it ended, if it is not for the cell's own log to say."""


class Launcher(Protocol):
    """Starts cells."""

    def check(self, cells: Sequence[Cell]) -> None:
        """Raises UsageError if such cells cannot be started here."""

    def start(self, cell: Cell, state: CellState) -> Running:
        """Start a new cell, or resume a started one."""

    def find(self, cell: Cell) -> Running | None:
        """What an earlier sweep left running in the cell; None if there is nothing."""


class LocalProcess:
    """A cell that this process started."""

    outlives_sweep = False

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self, number: int) -> None:
        self._process.send_signal(number)

    def describe(self) -> str:
        return f"process {self._process.pid}"

    def reason(self) -> str | None:
        return None


class LeftoverProcess:
    """A cell that a sweep before this one started, and that is still alive."""

    outlives_sweep = False

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

    def reason(self) -> str | None:
        return None


def find_leftover(cell: Cell) -> LeftoverProcess | None:
    """The process of an earlier sweep that is alive in the cell; None if there is none."""
    return LeftoverProcess(cell) if is_running(cell) else None


class LocalLauncher:
    """Starts each cell as `grpo-replay train` in a session of its own, with its share of cores and
    GPUs. Call it from the main thread: the cells stop when the thread that started them dies."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._environment = share_of_cores(jobs)
        self._gpus = shares_of_gpus(jobs)
        self._in_share: dict[int, list[Running]] = {}

    def check(self, cells: Sequence[Cell]) -> None:
        """Raises UsageError if a cell has more ranks on GPUs than its share of them."""
        gpus, jobs = len(visible_gpus()), self._jobs
        for cell in cells if gpus and jobs > 1 else []:
            engine = cell.resolved_recipe().engine
            if engine.device != "cpu" and engine.num_processes > gpus // jobs:
                raise UsageError(
                    f"--jobs {jobs}: {gpus} GPUs are {gpus // jobs} for each of {jobs} cells, and "
                    f"{cell.name} has engine.num_processes {engine.num_processes}: lower --jobs to "
                    f"{max(1, gpus // engine.num_processes)}"
                )

    def start(self, cell: Cell, state: CellState) -> LocalProcess:
        share = self._free_share()
        gpus = {} if share is None else {GPUS_VARIABLE: self._gpus[share]}
        process = LocalProcess(start_process(cell, state, self._environment | gpus, ENTRY))
        if share is not None:
            self._in_share.setdefault(share, []).append(process)
        return process

    def _free_share(self) -> int | None:
        """The number of a share of the GPUs that no cell has; None if there are no shares."""
        for share in range(len(self._gpus)):
            if all(process.poll() is not None for process in self._in_share.get(share, [])):
                return share
        return None

    def find(self, cell: Cell) -> LeftoverProcess | None:
        """Raises OutputDirectoryError if the cell was submitted as a job, or still runs on what are
        now the GPUs of several cells."""
        if job := read_record(cell):
            raise OutputDirectoryError(
                f"{cell.name} was submitted as {job['cluster']} job {job['job_id']}: continue with "
                f"--executor {job['cluster']}, or remove {record_path(cell)} if that job is gone"
            )
        leftover = find_leftover(cell)
        if leftover is not None and self._gpus:
            self._keep_share(cell, leftover)
        return leftover

    def _keep_share(self, cell: Cell, leftover: LeftoverProcess) -> None:
        """What an earlier sweep left running keeps its GPUs until it ends."""
        used = gpus_of(cell)
        shares = [
            share
            for share, gpus in enumerate(self._gpus)
            if used is None or not used.isdisjoint(gpus.split(","))
        ]
        if len(shares) > 1:
            place, help_ = "of several cells of this one", "; or give --jobs as then"
            if used is None:
                place, help_ = "that its log does not name", ""
            raise OutputDirectoryError(
                f"{cell.name} was left running by an earlier sweep, {leftover.describe()}, on GPUs "
                f"{place}: wait for it or stop it{help_}"
            )
        for share in shares:
            self._in_share.setdefault(share, []).append(leftover)


def visible_gpus() -> list[str]:
    """The GPUs that a process sees, as CUDA_VISIBLE_DEVICES names them; found without torch."""
    named = os.environ.get(GPUS_VARIABLE)
    if named is not None:
        return [word.strip() for word in named.split(",") if word.strip()]
    return [str(number) for number in range(len(list(_GPU_FOLDER.glob("*"))))]


def shares_of_gpus(jobs: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each of `jobs` cells, in equal parts; empty for one job or no GPU."""
    gpus = visible_gpus()
    size = len(gpus) // jobs
    if jobs == 1 or not gpus:
        return []
    return [",".join(gpus[size * job : size * (job + 1)]) for job in range(jobs)]


def share_of_cores(jobs: int) -> dict[str, str]:
    """Variables that limit the threads of one of `jobs` cells, and of its children."""
    cores = str(max(1, available_cores() // jobs))
    return {CORES_VARIABLE: cores, "OMP_NUM_THREADS": cores}


def start_process(
    cell: Cell, state: CellState, environment: Mapping[str, str], entry: str
) -> subprocess.Popen[bytes]:
    """Start the cell's process, which stops when this one dies. It holds the lock of the cell.

    Raises CellRunning if a process of the cell is alive.
    """
    words = [sys.executable, "-m", entry, str(os.getpid()), *train_arguments(cell, state)]
    with locked_log(cell) as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # signals reach it once, through the process that started it
            env={**os.environ, **environment},
        )
        note_start(log, process.pid, cell, state, environment.get(GPUS_VARIABLE))
    return process


def record_path(cell: Cell) -> Path:
    """Where the job of a cell is recorded while it is in the queue of a cluster."""
    return cell.log.with_name(cell.log.name + ".job")


def read_record(cell: Cell) -> dict[str, str] | None:
    """The job that was submitted for a cell; None if there is none, or it was seen to end."""
    path = record_path(cell)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutputDirectoryError(f"{path} cannot be read: {error}") from error


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
"""What a cell gets at the first, second and third request to stop: finish the step and checkpoint;
stop at once; die."""
