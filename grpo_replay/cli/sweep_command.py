"""`grpo-replay sweep`: run a grid of arms and seeds, or say what it would run."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from grpo_replay.cli.options import SweepOptions
from grpo_replay.cli.sweep_display import SweepDisplay, cells_table, print_estimate
from grpo_replay.errors import INTERRUPTED, UsageError
from grpo_replay.lab.sweep.cell_processes import Launcher
from grpo_replay.lab.sweep.cells import shell_command
from grpo_replay.lab.sweep.grid import (
    Comparison,
    check_folder,
    choose_arms,
    expand,
    open_folder,
)
from grpo_replay.lab.sweep.sweep_file import SweepFile, find_sweep, read_sweep_file
from grpo_replay.lab.sweep.sweep_run import Entry, Status, StopRequests, SweepRun
from grpo_replay.terminal.console import open_console

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(options: SweepOptions) -> int:
    """Run the sweep, or print what it would run; returns the exit code."""
    if options.dry_run and options.print_commands:
        raise UsageError("--dry-run and --print are two ways to look at a sweep: choose one")
    if options.as_json and not options.dry_run:
        raise UsageError("--json needs --dry-run; `grpo-replay report` has the results of a sweep")
    path = find_sweep(options.sweep)
    sweep = read_sweep_file(path)
    output_dir = Path(options.output_dir) if options.output_dir else Path("runs") / sweep.name
    comparisons = expand(sweep, path, output_dir)
    chosen = choose_arms(comparisons, options.only)
    check_folder(output_dir, sweep)
    if options.dry_run or options.print_commands:
        return _look(chosen, options)
    return _run(sweep, comparisons, chosen, output_dir, options)


def _look(chosen: Sequence[Comparison], options: SweepOptions) -> int:
    """Print the commands or the estimate of the cells; starts and writes nothing."""
    console = open_console(stderr=True, soft_wrap=True)
    launcher = Launcher(options.jobs)
    sweep_run = SweepRun(chosen, launcher, SweepDisplay(console), StopRequests())
    sweep_run.prepare(record=False)
    if options.print_commands:
        for line in command_lines(sweep_run.entries):
            print(line)
    else:
        print_estimate(sweep_run.entries, options.as_json)
    return 0


def command_lines(entries: Sequence[Entry]) -> Iterator[str]:
    """What starts each unfinished cell; a comment for those that wait for tuning."""
    for entry in entries:
        if entry.status is Status.RUNNING:
            yield f"# {entry.cell.name} is running: {entry.message}"
        elif entry.status is Status.WAITING and not entry.cell.awaits_choice:
            yield shell_command(entry.cell, entry.disk)
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
    launcher = Launcher(options.jobs)
    launcher.check([arm.comparison[0] for each in chosen for arm in each.arms])
    lock = open_folder(output_dir, sweep, comparisons)
    try:
        with SweepDisplay(console) as display, _counted(stops):
            sweep_run = SweepRun(chosen, launcher, display, stops)
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
    if code == INTERRUPTED:
        err.print("interrupted; the same command continues the sweep")
    elif code:
        err.print("the same command resumes the cells that failed")
    else:
        out.print(f"\nnext:\n  grpo-replay report {output_dir}", soft_wrap=True)
