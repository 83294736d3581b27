"""`grpo-replay sweep`: run a grid of arms and seeds, or print its commands."""

import shlex
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from grpo_replay.cli.options import SweepOptions
from grpo_replay.errors import INTERRUPTED
from grpo_replay.lab.sweep.cells import expand, shell_command
from grpo_replay.lab.sweep.sweep_file import find_sweep, read_sweep_file
from grpo_replay.lab.sweep.sweep_run import (
    Entry,
    Status,
    SweepRun,
    refuse_other_sweep,
    write_sweep,
)
from grpo_replay.terminal.console import open_console

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(options: SweepOptions) -> int:
    """Run the unfinished cells of a sweep, or print their commands; returns the exit code. Raises
    OutputDirectoryError if the folder has another sweep."""
    path = find_sweep(options.sweep)
    sweep = read_sweep_file(path)
    folder = Path(options.output_dir) if options.output_dir else Path("runs") / sweep.name
    attempt = SweepRun(expand(sweep, path, folder, options.only), options.jobs, _on_change, _say)
    refuse_other_sweep(folder, sweep)
    attempt.prepare()
    write_sweep(folder, sweep)
    if options.print_commands:
        for line in command_lines(attempt.entries):
            print(line)
        return 0
    if done := sum(entry.status is Status.DONE for entry in attempt.entries):
        _say(f"{done} of {len(attempt.entries)} cells are done already")
    with _count_signals(attempt):
        code = attempt.run()
    _conclude(attempt.entries, folder, code)
    return code


def _say(text: str) -> None:
    console = open_console(stderr=True, soft_wrap=True)
    console.print(text, highlight=False, markup=False)


def _on_change(entry: Entry) -> None:
    """Print a line for a cell that starts or ends."""
    parts = [entry.message] if entry.message else []
    if entry.status is Status.DONE and (accuracy := entry.cell.accuracy) is not None:
        parts.append(f"{100 * accuracy:.1f} %")
    if entry.status is Status.FAILED and entry.process is not None:
        parts[-1] += f" (see {entry.cell.log})"
    _say(": ".join([f"{entry.status.value}: {entry.cell.name}", *parts]))


@contextmanager
def _count_signals(run: SweepRun) -> Iterator[None]:
    """Count SIGINT, SIGTERM and SIGHUP in `run.stops` instead of ending the process."""

    def count(number: int, frame: object) -> None:
        run.stops += 1

    before = {number: signal.signal(number, count) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _conclude(entries: Sequence[Entry], folder: Path, code: int) -> None:
    """Print how many cells are done, and what to do next."""
    counts = Counter(entry.status.value for entry in entries)
    listed = ", ".join(f"{count} {word}" for word, count in counts.items())
    open_console(soft_wrap=True).print(f"{len(entries)} cells: {listed}")
    if code == INTERRUPTED:
        _say("interrupted; the same command continues the sweep")
    elif any(entry.status is Status.FAILED and entry.process for entry in entries):
        _say("the same command resumes the cells that failed")
    elif not code:
        next_step = f"\nnext:\n  grpo-replay report {shlex.quote(str(folder))}"
        open_console(soft_wrap=True).print(next_step)


def command_lines(entries: Sequence[Entry]) -> Iterator[str]:
    """Yields the shell command of each unfinished cell, and a comment if some wait for tuning."""
    for entry in entries:
        if entry.status is Status.WAITING and not entry.cell.awaits_tuning:
            yield shell_command(entry.cell, entry.state)
    if waiting := sum(entry.cell.awaits_tuning for entry in entries):
        yield f"# {waiting} cells wait for their tuning: run the lines above, then print again"
