"""Runs cells as processes of this machine, which share its cores and GPUs.

A sweep starts a cell by `python -m grpo_replay.lab.sweep.cell_processes PARENT_PID ARGUMENTS`. It
runs `grpo-replay ARGUMENTS`, and stops after its step if the sweep dies, also by SIGKILL.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

from grpo_replay.distributed.environment import (
    CORES_VARIABLE,
    GPUS_VARIABLE,
    PYTHON_MODULE,
    available_cores,
    import_path,
    named_gpus,
    stop_with_parent,
)
from grpo_replay.lab.sweep.cells import STARTED, Cell, CellState, shell_command, train_arguments

ENTRY = "grpo_replay.lab.sweep.cell_processes"
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")

Process = subprocess.Popen[bytes]


class Launcher:
    """Starts each cell as `grpo-replay train` in a session of its own, with its share of cores and
    GPUs. Call it from the main thread: the cells stop when the thread that started them dies."""

    def __init__(self, jobs: int) -> None:
        self._environment = share_of_cores(jobs)
        self._gpus = shares_of_gpus(jobs)
        self._processes: list[Process | None] = [None] * jobs

    def free_slot(self) -> int | None:
        """Returns the number of a job slot without a running cell; None if all are taken."""
        for number, process in enumerate(self._processes):
            if process is None or process.poll() is not None:
                return number
        return None

    def start(self, cell: Cell, state: CellState, slot: int) -> Process:
        """Start a new cell, or resume a started one, in a free job slot: with the slot's GPUs and
        cores, output to the cell's log, and its own name for trackers."""
        # Trackers list all runs together, where a name like `seed-42` is ambiguous.
        name = f"{cell.root.name}/{cell.name}"
        names = {"WANDB_NAME": name, "TRACKIO_NAME": name}
        environment = {**self._environment, **import_path(), **names}
        if self._gpus:
            environment[GPUS_VARIABLE] = self._gpus[slot]
        entry = [sys.executable, *PYTHON_MODULE, ENTRY, str(os.getpid())]
        command = [*entry, *train_arguments(cell, state)]
        cell.log.parent.mkdir(parents=True, exist_ok=True)
        with cell.log.open("ab", buffering=0) as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # signals reach it once, through this process
                env={**os.environ, **environment},
            )
            log.write(f"{STARTED}{process.pid}: {shell_command(cell, state)}\n".encode())
        self._processes[slot] = process
        return process


def share_of_cores(jobs: int) -> dict[str, str]:
    """Environment variables that limit the threads of one of `jobs` cells and its children."""
    cores = str(max(1, available_cores() // jobs))
    return {CORES_VARIABLE: cores, "OMP_NUM_THREADS": cores}


def visible_gpus() -> list[str]:
    """List visible GPUs as in CUDA_VISIBLE_DEVICES, without torch. LaunchError if one is twice."""
    gpus = named_gpus()
    if gpus is not None:
        return gpus
    return [str(number) for number in range(len(list(_GPU_FOLDER.glob("*"))))]


def shares_of_gpus(jobs: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each of `jobs` cells: equal shares, or one GPU each, in turn,
    if there are more cells than GPUs. Empty for one job (which has all) or no GPU."""
    gpus = visible_gpus()
    if jobs == 1 or not gpus:
        return []
    size = max(1, len(gpus) // jobs)
    shares = [gpus[(size * job) % len(gpus) :][:size] for job in range(jobs)]
    return [",".join(share) for share in shares]


def main() -> None:
    stop_with_parent(int(sys.argv[1]))
    sys.argv = ["grpo-replay", *sys.argv[2:]]
    runpy.run_module("grpo_replay", run_name="__main__")


if __name__ == "__main__":
    main()
