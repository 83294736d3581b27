"""`grpo-replay sweep`: run a grid of arms and seeds, or say what it would run."""

import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_replay.cli.sweep_display import SweepDisplay, cells_table
from grpo_replay.cli.sweep_estimate import print_estimate
from grpo_replay.errors import INTERRUPTED, UsageError, did_you_mean
from grpo_replay.lab.sweep.cells import CellState, shell_command
from grpo_replay.lab.sweep.folder import check_folder, open_folder
from grpo_replay.lab.sweep.grid import Cell, Comparison, choose_arms, expand
from grpo_replay.lab.sweep.local import (
    Launcher,
    LocalLauncher,
    share_of_cores,
)
from grpo_replay.lab.sweep.sweep_file import SweepFile, find_sweep, read_sweep_file
from grpo_replay.lab.sweep.sweep_run import Entry, Status, StopRequests, SweepRun
from grpo_replay.terminal.console import open_console

LOCAL = "local"
EXECUTORS = (LOCAL, "submitit-local", "slurm")
_ALL = 1_000_000
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """The command line of `sweep`."""

    sweep: str
    jobs: int | None = None
    only: str | None = None
    output_dir: str | None = None
    dry_run: bool = False
    print_commands: bool = False
    as_json: bool = False
    executor: str = LOCAL
    executor_options: tuple[str, ...] = ()


def run(options: SweepOptions) -> int:
    """Run the sweep, or print what it would run; returns the exit code."""
    if options.dry_run and options.print_commands:
        raise UsageError("--dry-run and --print are two ways to look at a sweep: choose one")
    if options.as_json and not options.dry_run:
        raise UsageError("--json needs --dry-run; `grpo-replay report` has the results of a sweep")
    if options.executor not in EXECUTORS:
        raise UsageError(
            f"--executor {options.executor}{did_you_mean(options.executor, EXECUTORS)}: "
            f"choose {', '.join(EXECUTORS)}"
        )
    if options.executor == LOCAL and options.executor_options:
        raise UsageError("--executor-option needs --executor slurm or submitit-local")
    path = find_sweep(options.sweep)
    sweep = read_sweep_file(path)
    output_dir = Path(options.output_dir) if options.output_dir else Path("runs") / sweep.name
    comparisons = expand(sweep, path, output_dir)
    chosen = choose_arms(comparisons, options.only)
    check_folder(output_dir, sweep)
    if options.dry_run or options.print_commands:
        return _look(chosen, output_dir, options)
    return _run(sweep, comparisons, chosen, output_dir, options)


def _open_launcher(output_dir: Path, options: SweepOptions) -> tuple[Launcher, int]:
    """What starts the cells, and how many at a time."""
    jobs = options.jobs or (_ALL if options.executor == "slurm" else 1)
    if options.executor == LOCAL:
        return LocalLauncher(jobs), jobs
    from grpo_replay.lab.sweep.submitting import SubmitLauncher, read_options

    parameters = read_options(options.executor, options.executor_options)
    environment = {} if options.executor == "slurm" else share_of_cores(jobs)
    folder = output_dir / "log" / "jobs"
    return SubmitLauncher(options.executor, folder, parameters, environment), jobs


def _look(chosen: Sequence[Comparison], output_dir: Path, options: SweepOptions) -> int:
    """Print the commands or the estimate of the cells; starts and writes nothing."""
    console = open_console(stderr=True, soft_wrap=True)
    launcher, jobs = _open_launcher(output_dir, options)
    sweep_run = SweepRun(chosen, launcher, jobs, SweepDisplay(console), StopRequests())
    sweep_run.prepare(record=False)
    if options.print_commands:
        for line in command_lines(sweep_run.entries, _writer(options)):
            print(line)
    else:
        print_estimate(sweep_run.entries, options.as_json)
    return 0


def _writer(options: SweepOptions) -> Callable[[Cell, CellState], str]:
    """How a cell is printed: as a command, or for Slurm as a script that is submitted."""
    if options.executor != "slurm":
        return shell_command
    from grpo_replay.lab.sweep.submitting import read_options, slurm_script

    parameters = read_options(options.executor, options.executor_options)

    def submission(cell: Cell, state: CellState) -> str:
        folder = shlex.quote(str(cell.log.parent))  # Slurm fails where it cannot write its log
        script = slurm_script(cell, state, parameters).rstrip()
        return f"mkdir -p {folder} && sbatch <<'END'\n{script}\nEND"

    return submission


def command_lines(
    entries: Sequence[Entry], written: Callable[[Cell, CellState], str] = shell_command
) -> Iterator[str]:
    """What starts each unfinished cell; a comment for those that wait for tuning."""
    for entry in entries:
        if entry.status is Status.RUNNING:
            yield f"# {entry.cell.name} is running: {entry.message}"
        elif entry.status is Status.WAITING and not entry.cell.awaits_choice:
            yield written(entry.cell, entry.disk)
    waiting = sum(entry.cell.awaits_choice for entry in entries)
    if waiting:
        yield f"# {waiting} cells wait for their tuning: run the lines above, then print again"


def _run(
    sweep: SweepFile,
    comparisons: Sequence[Comparison],
    chosen: Sequence[Comparison],
    output_dir: Path,
    options: SweepOptions,
) -> int:
    console = open_console(stderr=True)
    stops = StopRequests()
    launcher, jobs = _open_launcher(output_dir, options)
    launcher.check([arm.comparison[0] for each in chosen for arm in each.arms])
    lock = open_folder(output_dir, sweep, comparisons)
    try:
        with SweepDisplay(console) as display, _counted(stops):
            sweep_run = SweepRun(chosen, launcher, jobs, display, stops)
            sweep_run.prepare()
            code = sweep_run.run()
    finally:
        lock.unlock()
    _conclude(sweep_run.entries, output_dir, code)
    return code


@contextmanager
def _counted(stops: StopRequests) -> Iterator[None]:
    """Count SIGINT, SIGTERM and SIGHUP instead of dying of them."""

    def note(number: int, frame: object) -> None:
        stops.count += 1

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _conclude(entries: Sequence[Entry], output_dir: Path, code: int) -> None:
    """Print the cells, and why those that failed did."""
    out = open_console()
    out.print(cells_table(entries))
    err = open_console(stderr=True, soft_wrap=True)
    for entry in entries:
        if entry.status in (Status.FAILED, Status.BLOCKED):
            where = f" (see {entry.cell.log})" if entry.cell.log.exists() else ""
            err.print(f"{entry.status.value}: {entry.cell.name}: {entry.message}{where}")
    going_on = [entry for entry in entries if entry.running is not None]
    if going_on:
        err.print(f"{len(going_on)} jobs go on without the sweep, and it can follow them again")
    if code == INTERRUPTED:
        err.print("interrupted; the same command continues the sweep")
    elif code:
        err.print("the same command resumes the cells that failed")
    else:
        out.print(f"\nnext:\n  grpo-replay report {output_dir}", soft_wrap=True)
