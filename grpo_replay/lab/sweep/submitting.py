"""Cells as jobs of a cluster, through submitit: Slurm, or submitit's local executor.

A job runs one cell. Before its time limit, or when it is preempted, the cell finishes its step and
writes a checkpoint, and submitit puts the job back into the queue. Jobs outlive the sweep: the next
one follows those that are still there, by the job's record beside the cell's log.
"""

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from grpo_replay.errors import UsageError
from grpo_replay.lab.sweep import local
from grpo_replay.lab.sweep.cells import CellState, raised_line, shell_command, state_of
from grpo_replay.lab.sweep.grid import Cell
from grpo_replay.storage.atomic import write_json_whole

if TYPE_CHECKING:
    import submitit

YEAR_MINUTES = 365 * 24 * 60
JOB_FAILED = 1


class CellJob:
    """What a job runs: one cell, until it ends. submitit pickles it."""

    def __init__(self, cell: Cell, environment: Mapping[str, str]) -> None:
        self.cell, self.environment, self.entry = cell, dict(environment), local.ENTRY
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: threading.Thread | None = None

    def __call__(self) -> int:
        """The exit code of the cell."""
        state = state_of(self.cell)
        if state is CellState.DONE:
            return 0
        # Slurm's warning signal is for this process: the cell has a session of its own.
        signal.signal(signal.SIGTERM, lambda number, frame: self._stop())
        self._process = local.start_process(self.cell, state, self.environment, self.entry)
        self._waiting = threading.Thread(target=self._process.wait, daemon=True)
        self._waiting.start()
        self._wait()
        return self._process.returncode

    def checkpoint(self) -> "submitit.helpers.DelayedSubmission":
        """Stop the cell after a checkpoint; returns the job that continues it. submitit calls it
        when the time is nearly over, or on preemption."""
        import submitit

        self._stop()
        self._wait()
        return submitit.helpers.DelayedSubmission(self)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: not the process, which has ended."""
        return self.__dict__ | {"_process": None, "_waiting": None}

    def _stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    def _wait(self) -> None:
        # A thread waits for the process, because a signal handler cannot wait for a process for
        # which the code that it interrupts is waiting.
        while self._waiting is not None and self._waiting.is_alive():
            self._waiting.join(0.5)


class SubmittedJob:
    """A job of a cell, submitted by this sweep or by an earlier one."""

    outlives_sweep = True

    def __init__(self, cell: Cell, job: Any, cluster: str) -> None:
        self._cell, self._job, self._cluster = cell, job, cluster

    def poll(self) -> int | None:
        if not self.has_ended():
            return None
        local.record_path(self._cell).unlink(missing_ok=True)
        if not self._job.paths.result_pickle.exists():
            return JOB_FAILED
        error = self._job.exception()
        return JOB_FAILED if error is not None else int(self._job.result())

    def has_ended(self) -> bool:
        """True if the job is no longer in the queue."""
        if self._job.paths.result_pickle.exists():
            return True
        if self._cluster == "slurm":
            return self._job.done()
        return not _is_controller(int(self._job.job_id))

    def stop(self, number: int) -> None:
        """A job outlives the sweep; the scheduler's own command stops it."""

    def reason(self) -> str | None:
        place = f"see {self._job.paths.stderr}"
        if self._job.paths.result_pickle.exists() and (error := self._job.exception()):
            return f"{self.describe()}: {raised_line(str(error)) or 'failed'}; {place}"
        return f"{self.describe()} ended as {self._job.state} without a result; {place}"

    def describe(self) -> str:
        return f"{self._cluster} job {self._job.job_id}"


def _is_controller(pid: int) -> bool:
    """True if a process is the controller of one of submitit's local jobs, and alive."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        dead = process.status() == psutil.STATUS_ZOMBIE
        return not dead and "submitit.local._local" in " ".join(process.cmdline())
    return False


class SubmitLauncher:
    """Submits each cell as a job. `options` are parameters of submitit's executor."""

    def __init__(
        self, cluster: str, folder: Path, options: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self._cluster, self._folder, self._options = cluster, folder, dict(options)
        self._environment = environment
        self._executor: Any = None

    def check(self, cells: Sequence[Cell]) -> None:
        """Raises UsageError without submitit or Slurm, or for an option that submitit lacks."""
        import_submitit(self._cluster)
        if self._cluster == "slurm":  # the local executor would already make its folder
            _open_executor(self._cluster, self._folder, self._options)

    def start(self, cell: Cell, state: CellState) -> SubmittedJob:
        if self._executor is None:
            self._executor = _open_executor(self._cluster, self._folder, self._options)
        if self._cluster == "slurm":
            self._executor.update_parameters(job_name=cell.name)
        job = self._executor.submit(CellJob(cell, self._environment))
        facts = {"cluster": self._cluster, "job_id": job.job_id, "folder": str(self._folder)}
        cell.log.parent.mkdir(parents=True, exist_ok=True)
        write_json_whole(local.record_path(cell), facts)
        return SubmittedJob(cell, job, self._cluster)

    def find(self, cell: Cell) -> "SubmittedJob | local.LeftoverProcess | None":
        """The job or process that an earlier sweep left for the cell; None if there is none."""
        facts = local.read_record(cell)
        if facts is None:
            return local.find_leftover(cell)
        submitit = import_submitit(facts["cluster"])
        kind = submitit.SlurmJob if facts["cluster"] == "slurm" else submitit.LocalJob
        job = SubmittedJob(cell, kind(facts["folder"], facts["job_id"]), facts["cluster"])
        if not job.has_ended():
            return job
        local.record_path(cell).unlink(missing_ok=True)
        return local.find_leftover(cell)


def import_submitit(cluster: str) -> Any:
    """submitit. Raises UsageError if it is not installed."""
    try:
        import submitit
    except ImportError as error:
        raise UsageError(
            f"--executor {cluster} needs submitit: pip install 'grpo-replay[sweep]'"
        ) from error
    return submitit


def read_options(cluster: str, words: Sequence[str]) -> dict[str, Any]:
    """`--executor-option` as parameters of submitit's executor. Raises UsageError."""
    options = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise UsageError(f"--executor-option {word!r}: expected key=value, such as time=600")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    if cluster == "slurm" and not isinstance(options.get("time"), int):
        raise UsageError(
            "--executor slurm needs --executor-option time=MINUTES, a whole number, after which a "
            "run is checkpointed and put back into the queue"
        )
    return options


def _open_executor(cluster: str, folder: Path, options: Mapping[str, Any]) -> Any:
    """submitit's executor. Raises UsageError for an option it does not have, or without Slurm."""
    submitit = import_submitit(cluster)
    try:
        if cluster == "slurm":
            executor = submitit.SlurmExecutor(folder, max_num_timeout=1000)
            executor.update_parameters(**options)
        else:
            executor = submitit.LocalExecutor(folder)
            executor.update_parameters(**{"timeout_min": YEAR_MINUTES, **options})
    except (RuntimeError, ValueError, TypeError) as error:
        raise UsageError(f"--executor {cluster}: {error}") from error
    return executor


def slurm_script(cell: Cell, state: CellState, options: Mapping[str, Any]) -> str:
    """A batch script for one cell, as submitit writes them, which needs no sweep to run it.

    Slurm sends SIGTERM before the time limit, upon which the run writes a checkpoint.
    """
    submitit = import_submitit("slurm")

    class Printing(submitit.SlurmExecutor):  # type: ignore[name-defined]
        """Formats scripts on machines without Slurm too."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    seconds = options.get("signal_delay_s", 90)
    try:
        executor = Printing(cell.log.parent)
        executor.update_parameters(
            **{
                "job_name": cell.name,
                **options,
                "additional_parameters": {
                    "signal": f"TERM@{seconds}",
                    **options.get("additional_parameters", {}),
                },
            }
        )
    except (ValueError, TypeError) as error:
        raise UsageError(f"--executor slurm: {error}") from error
    return executor._make_submission_file_text(shell_command(cell, state), "")
