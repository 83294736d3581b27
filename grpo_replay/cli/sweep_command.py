"""`grpo-replay sweep`: run a grid of arms and seeds, or say what it would run.

A run shows a live table of its cells, or plain lines; `--dry-run` an estimate, the cells with their
tokens and memory.
"""

import shlex
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grpo_replay.cli.options import SweepOptions
from grpo_replay.errors import INTERRUPTED, UsageError
from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.lab.sweep.cell_processes import Launcher
from grpo_replay.lab.sweep.cells import shell_command
from grpo_replay.lab.sweep.grid import (
    Comparison,
    choose_arms,
    expand,
    open_folder,
    refuse_other_sweep,
)
from grpo_replay.lab.sweep.sweep_file import find_sweep, read_sweep_file
from grpo_replay.lab.sweep.sweep_run import (
    Entry,
    Observer,
    Status,
    StopRequests,
    SweepRun,
    run_sweep,
)
from grpo_replay.terminal.console import open_console, plain_table, print_table

_STYLES = {
    Status.RUNNING: "cyan",
    Status.DONE: "green",
    Status.FAILED: "bold red",
    Status.BLOCKED: "yellow",
    Status.INTERRUPTED: "yellow",
    Status.WAITING: "dim",
}
_KINDS = {"problems": "red", "warnings": "yellow", "unchecked": "yellow", "assumptions": "dim"}
"""Styles of the sentences of an estimate."""
_MOST_INTERESTING_FIRST = (
    *(Status.FAILED, Status.RUNNING, Status.INTERRUPTED),
    *(Status.BLOCKED, Status.WAITING, Status.DONE),
)


class SweepDisplay(Observer):
    """Shows a live table on a terminal, and elsewhere one line per change of a cell."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._shown: dict[str, float | None] = {}

    def __enter__(self) -> "SweepDisplay":
        if self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_change(self, entry: Entry) -> None:
        if self._live is None and entry.status in (
            *(Status.RUNNING, Status.DONE, Status.FAILED, Status.INTERRUPTED),
        ):
            self._print(f"{entry.status.value} {entry.cell.name}{_after(entry)}")

    def on_notice(self, text: str) -> None:
        self._print(f"note: {text}")

    def on_progress(self, entries: Sequence[Entry]) -> None:
        if self._live is not None:
            room = max(5, self._console.height - 6)
            self._live.update(cells_table(entries, room), refresh=True)
            return
        for entry in entries:
            evaluated = entry.status is Status.RUNNING and entry.accuracy is not None
            if evaluated and self._shown.get(entry.cell.name) != entry.accuracy:
                self._shown[entry.cell.name] = entry.accuracy
                self._print(f"running {entry.cell.name}{_after(entry)}")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


def _after(entry: Entry) -> str:
    words = []
    if entry.status is not Status.DONE and entry.progress.step:
        words.append(f"step {entry.progress.step}/{entry.steps}")
    if entry.accuracy is not None:
        words.append(f"{100 * entry.accuracy:.1f} %")
    if entry.message and (entry.status is Status.FAILED or not words):
        words.append(entry.message)
    return f": {', '.join(words)}" if words else ""


def cells_table(entries: Sequence[Entry], room: int | None = None) -> Table:
    """Cells with state, step and held-out accuracy. With `room`, at most so many rows, and what
    fails or runs comes first."""
    counts = Counter(entry.status for entry in entries)
    title = ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])
    table = Table(title=f"{len(entries)} cells: {title}", title_justify="left")
    table.add_column("cell", overflow="fold", min_width=24)
    table.add_column("state")
    table.add_column("step", justify="right")
    table.add_column("accuracy, %", justify="right")
    shown = list(entries)
    if room is not None and len(shown) > room:
        shown = sorted(entries, key=lambda entry: _MOST_INTERESTING_FIRST.index(entry.status))
        shown = shown[: room - 1]
    for entry in shown:
        table.add_row(*_row(entry))
    if len(shown) < len(entries):
        table.add_row(f"… and {len(entries) - len(shown)} more", "", "", "", style="dim")
    return table


def _row(entry: Entry) -> Iterable[str | Text]:
    step = entry.steps if entry.status is Status.DONE else entry.progress.step
    yield entry.cell.name
    yield Text(entry.status.value, _STYLES[entry.status])
    yield f"{step}/{entry.steps}" if step else ""
    yield "" if entry.accuracy is None else f"{100 * entry.accuracy:.1f}"


def print_estimate(entries: Sequence[Entry]) -> int:
    """Print what the cells take, those with equal costs in one row, and what was found; returns 0
    if nothing was found that would stop a cell, else the exit code that the first such cell would
    end with. Tuning runs of an arm are `tune/ARM`."""
    estimated = _estimates(entries)
    reports = list({id(report): report for _, report in estimated}.values())
    rows = [
        tuple(_estimate_row(report, [cell for cell, found in estimated if found is report]))
        for report in reports
    ]
    console = open_console()
    print_table(console, plain_table("tokens still to do; * after tuning", _COLUMNS, rows))
    console.print(_describe_totals(estimated), soft_wrap=True)
    for kind, style in _KINDS.items():
        for sentence in dict.fromkeys(each for report in reports for each in report[kind]):
            console.print(f"{kind.rstrip('s')}: {sentence}", style=style)
    codes = (report["exit_code"] for cell, report in estimated if cell.status is not Status.DONE)
    return next((code for code in codes if code), 0)


_COLUMNS = ("cells", "states", "steps", "generated", "trained", "GiB ×\nranks", "fits")


def _estimates(entries: Sequence[Entry]) -> list[tuple[Entry, dict[str, Any]]]:
    """The dry run of each cell. Runs that differ in seed or optimizer share one. Its tokens are
    expected ones of training steps; evaluations come on top."""
    reports: dict[str, dict[str, Any]] = {}
    found = []
    for entry in entries:
        recipe = entry.cell.resolved_recipe()
        run = recipe.run.model_copy(update={"seed": 0})
        same = recipe.model_copy(update={"run": run, "optimizer": None}).model_dump_json()
        if same not in reports:
            reports[same] = dry_run(recipe, output_dir=entry.cell.root)
        found.append((entry, reports[same]))
    return found


def _estimate_row(report: dict[str, Any], cells: Sequence[Entry]) -> Iterator[str]:
    folders = (
        PurePath(each.cell.name).parents[0 if each.cell.value is None else 1] for each in cells
    )
    yield "\n".join(dict.fromkeys(map(str, folders)))
    states = Counter((c.disk if c.status is Status.WAITING else c.status).value for c in cells)
    mark = "*" if any(cell.cell.awaits_choice for cell in cells) else ""
    yield ", ".join(f"{count} {state}" for state, count in states.items()) + mark
    yield f"{cells[0].steps:,}"
    for kind in ("generated", "trained"):
        yield f"{sum(_tokens_left(cell, report, kind) for cell in cells) / 1e6:,.1f} M"
    peak = None if report["memory"] is None else report["memory"]["peak_gib"]
    yield f"{_number(peak)} × {report['hardware']['processes']}"
    yield {True: "yes", False: "no", None: "?"}[report["fits"]]


def _tokens_left(entry: Entry, report: dict[str, Any], kind: str) -> int:
    left = 0 if entry.status is Status.DONE else entry.steps - entry.progress.step
    tokens: int = left * report["step"][f"{kind}_tokens_expected"]
    return tokens


def _describe_totals(estimated: Sequence[tuple[Entry, dict[str, Any]]]) -> str:
    generated, trained = (
        sum(_tokens_left(*each, kind) for each in estimated) for kind in ("generated", "trained")
    )
    unfinished = sum(entry.status is not Status.DONE for entry, _ in estimated)
    sizes = [report["storage"]["checkpoints_gib_most"] for _, report in estimated]
    return (
        f"{len(estimated)} cells, {unfinished} unfinished; to do: {generated:,} tokens generated, "
        f"{trained:,} trained; checkpoints {_number(None if None in sizes else sum(sizes))} GiB"
    )


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.2f}"


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(options: SweepOptions) -> int:
    """Run the sweep, or print what it would run; returns the exit code."""
    if options.dry_run and options.print_commands:
        raise UsageError("--dry-run and --print are two ways to look at a sweep: choose one")
    path = find_sweep(options.sweep)
    sweep = read_sweep_file(path)
    output_dir = Path(options.output_dir) if options.output_dir else Path("runs") / sweep.name
    comparisons = expand(sweep, path, output_dir)
    chosen = choose_arms(comparisons, options.only)
    refuse_other_sweep(output_dir, sweep)
    if options.dry_run:
        return print_estimate(_entries(chosen, options.jobs, record=False))
    if not options.print_commands:
        stops = StopRequests()
        with SweepDisplay(open_console(stderr=True)) as display, _counted(stops):
            entries, code = run_sweep(
                sweep, comparisons, chosen, output_dir, options.jobs, display, stops
            )
        _conclude(entries, output_dir, code)
        return code
    lock = open_folder(output_dir, sweep, comparisons)  # for what the printed commands leave there
    for line in command_lines(_entries(chosen, options.jobs, record=True)):
        print(line)
    lock.unlock()
    return 0


def _entries(chosen: Sequence[Comparison], jobs: int, record: bool) -> Sequence[Entry]:
    """The cells as they are; `record` writes what complete tuning chooses."""
    display = SweepDisplay(open_console(stderr=True, soft_wrap=True))
    sweep_run = SweepRun(chosen, Launcher(jobs), display, StopRequests())
    sweep_run.prepare(record, starts=False)
    return sweep_run.entries


def command_lines(entries: Sequence[Entry]) -> Iterator[str]:
    """What starts each unfinished cell; a comment for one that runs or cannot start, and for those
    that wait for tuning."""
    for entry in entries:
        if entry.status in (Status.RUNNING, Status.FAILED):
            state = "is running" if entry.status is Status.RUNNING else "cannot start"
            yield f"# {entry.cell.name} {state}: {entry.message}"
        elif entry.status is Status.WAITING and not entry.cell.awaits_choice:
            yield shell_command(entry.cell, entry.disk)
    waiting = sum(entry.cell.awaits_choice for entry in entries)
    if waiting:
        yield f"# {waiting} cells wait for their tuning: run the lines above, then print again"


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
        folder = shlex.quote(str(output_dir))
        out.print(f"\nnext:\n  grpo-replay report {folder}", soft_wrap=True)
