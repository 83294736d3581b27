"""Cells as processes of this machine, which share its cores and GPUs.

`python -m grpo_replay.lab.sweep.cell_processes PARENT_PID ARGUMENTS` is what a sweep starts as a
cell: `grpo-replay ARGUMENTS`, told to stop after its step if the sweep dies, also by SIGKILL.
"""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_replay.distributed.environment import CORES_VARIABLE, available_cores, stop_with_parent
from grpo_replay.errors import UsageError
from grpo_replay.lab.sweep.cells import (
    CellState,
    locked_log,
    note_start,
    train_arguments,
)
from grpo_replay.lab.sweep.grid import Cell

ENTRY = "grpo_replay.lab.sweep.cell_processes"
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
"""What a cell gets at the first, second and third request to stop: finish the step and checkpoint;
stop at once; die."""


class Launcher:
    """Starts each cell as `grpo-replay train` in a session of its own, with its share of cores and
    GPUs. Call it from the main thread: the cells stop when the thread that started them dies."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._environment = share_of_cores(jobs)
        self._gpus = shares_of_gpus(jobs)
        self._in_share: dict[int, subprocess.Popen[bytes]] = {}

    def check(self, cells: Sequence[Cell]) -> None:
        """Raises UsageError if a cell has more ranks on GPUs than its share of them."""
        gpus, jobs = len(visible_gpus()), self.jobs
        for cell in cells if gpus and jobs > 1 else []:
            engine = cell.resolved_recipe().engine
            if engine.device != "cpu" and engine.num_processes > gpus // jobs:
                raise UsageError(
                    f"--jobs {jobs}: {gpus} GPUs are {gpus // jobs} for each of {jobs} cells, and "
                    f"{cell.name} has engine.num_processes {engine.num_processes}: lower --jobs to "
                    f"{max(1, gpus // engine.num_processes)}"
                )

    def start(self, cell: Cell, state: CellState) -> subprocess.Popen[bytes]:
        """Start a new cell, or resume a started one. It holds the lock of the cell.

        Raises OutputDirectoryError if a process of the cell is alive.
        """
        # For trackers that keep all runs in one place, where `seed-42` says nothing.
        name = f"{cell.root.name}/{cell.place}"
        environment = {**self._environment, "WANDB_NAME": name, "TRACKIO_NAME": name}
        share = self._free_share()
        if share is not None:
            environment = environment | {GPUS_VARIABLE: self._gpus[share]}
        words = [sys.executable, "-m", ENTRY, str(os.getpid()), *train_arguments(cell, state)]
        with locked_log(cell) as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # signals reach it once, through this process
                env={**os.environ, **environment},
            )
            note_start(log, process.pid, cell, state)
        if share is not None:
            self._in_share[share] = process
        return process

    def _free_share(self) -> int | None:
        """The number of a share of the GPUs that no cell has; None if there are no shares."""
        for share in range(len(self._gpus)):
            if share not in self._in_share or self._in_share[share].poll() is not None:
                return share
        return None


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


def main() -> None:
    stop_with_parent(int(sys.argv[1]))
    sys.argv = ["grpo-replay", *sys.argv[2:]]
    runpy.run_module("grpo_replay", run_name="__main__")


if __name__ == "__main__":
    main()
