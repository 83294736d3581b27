"""The terminal display of a sweep: a live table of its cells, or plain lines."""

from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grpo_replay.lab.sweep.sweep_run import Entry, Status

_STYLES = {
    Status.RUNNING: "cyan",
    Status.DONE: "green",
    Status.FAILED: "bold red",
    Status.BLOCKED: "yellow",
    Status.INTERRUPTED: "yellow",
    Status.WAITING: "dim",
}
_MOST_INTERESTING_FIRST = (
    *(Status.FAILED, Status.RUNNING, Status.INTERRUPTED),
    *(Status.BLOCKED, Status.WAITING, Status.DONE),
)


class SweepDisplay:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
