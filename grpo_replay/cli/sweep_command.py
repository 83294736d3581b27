"""`grpo-replay sweep`: run a grid of arms and seeds, or say what it would run."""

import shlex
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_replay.cli.options import SweepOptions
from grpo_replay.errors import INTERRUPTED, UsageError
from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.lab.sweep.cells import expand, shell_command
from grpo_replay.lab.sweep.sweep_file import find_sweep, read_sweep_file
from grpo_replay.lab.sweep.sweep_run import Entry, Status, SweepRun, open_folder
from grpo_replay.terminal.console import open_console, plain_table, print_table

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLUMNS = ("arm", "cells", "left", "steps", "generated", "trained", "GiB ×\nranks", "fits")


def run(options: SweepOptions) -> int:
    """Run the sweep, or print what it would run; returns the exit code."""
    if options.dry_run and options.print_commands:
        raise UsageError("--dry-run and --print are two ways to look at a sweep: choose one")
    path = find_sweep(options.sweep)
    sweep = read_sweep_file(path)
    folder = Path(options.output_dir) if options.output_dir else Path("runs") / sweep.name
    attempt = SweepRun(expand(sweep, path, folder, options.only), options.jobs, _on_change, _say)
    if options.dry_run:
        attempt.prepare()
        return print_estimate(attempt.entries)
    open_folder(folder, sweep)
    attempt.prepare()
    if options.print_commands:
        for line in command_lines(attempt.entries):
            print(line)
        return 0
    if done := sum(entry.status is Status.DONE for entry in attempt.entries):
        _say(f"{done} of {len(attempt.entries)} cells are done already")
    with _counted(attempt):
        code = attempt.run()
    _conclude(attempt.entries, folder, code)
    return code


def _say(text: str) -> None:
    console = open_console(stderr=True, soft_wrap=True)
    console.print(text, highlight=False, markup=False)


def _on_change(entry: Entry) -> None:
    """A line for each cell that starts or ends."""
    words = [entry.message] if entry.message else []
    if entry.status is Status.DONE and entry.accuracy is not None:
        words.append(f"{100 * entry.accuracy:.1f} %")
    if entry.status is Status.FAILED and entry.cell.log.exists():
        words[-1] += f" (see {entry.cell.log})"
    _say(": ".join([f"{entry.status.value}: {entry.cell.name}", *words]))


@contextmanager
def _counted(run: SweepRun) -> Iterator[None]:
    """Count SIGINT, SIGTERM and SIGHUP instead of dying of them."""

    def note(number: int, frame: object) -> None:
        run.stops += 1

    before = {number: signal.signal(number, note) for number in _SIGNALS}
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
    elif code:
        _say("the same command resumes the cells that failed")
    else:
        next_step = f"\nnext:\n  grpo-replay report {shlex.quote(str(folder))}"
        open_console(soft_wrap=True).print(next_step)


def command_lines(entries: Sequence[Entry]) -> Iterator[str]:
    """What starts each unfinished cell; comments for cells that cannot start, and for those that
    wait for tuning."""
    for entry in entries:
        if entry.status is Status.FAILED:
            yield f"# {entry.cell.name} cannot start: {entry.message}"
        elif entry.status is Status.WAITING and not entry.cell.awaits_choice:
            yield shell_command(entry.cell, entry.state)
    if waiting := sum(e.cell.awaits_choice and e.status is Status.WAITING for e in entries):
        yield f"# {waiting} cells wait for their tuning: run the lines above, then print again"


def print_estimate(entries: Sequence[Entry]) -> int:
    """Print what the unfinished cells of each arm take, and what was found; returns 0 if nothing
    was found that would stop a cell, else the exit code that the first such arm would end with."""
    arms: dict[str, list[Entry]] = {}
    for entry in entries:
        arms.setdefault(entry.cell.arm, []).append(entry)
    reports = {arm: dry_run(own[0].cell.resolved_recipe()) for arm, own in arms.items()}
    console = open_console()
    rows = [tuple(_estimate_row(arm, arms[arm], reports[arm])) for arm in arms]
    print_table(console, plain_table("tokens still to do, expected", _COLUMNS, rows))
    for kind in ("problems", "warnings", "unchecked"):
        for sentence in dict.fromkeys(each for found in reports.values() for each in found[kind]):
            console.print(f"{kind.rstrip('s')}: {sentence}")
    return next((found["exit_code"] for found in reports.values() if found["exit_code"]), 0)


def _estimate_row(arm: str, own: Sequence[Entry], report: dict[str, Any]) -> Iterator[str]:
    left = sum(entry.status is not Status.DONE for entry in own)
    steps = own[0].cell.resolved_recipe().run.steps
    yield from (arm, f"{len(own)}", f"{left}", f"{steps:,}")
    for kind in ("generated", "trained"):
        yield f"{left * steps * report['step'][f'{kind}_tokens_expected'] / 1e6:,.1f} M"
    peak = "?" if report["memory"] is None else f"{report['memory']['peak_gib']:,.2f}"
    yield f"{peak} × {report['hardware']['processes']}"
    yield {True: "yes", False: "no", None: "?"}[report["fits"]]
