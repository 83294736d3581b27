"""Evaluation progress on stderr: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from grpo_replay.evaluation.evaluate import Progress
from grpo_replay.terminal.console import open_console

PLAIN_LINES = 10


@contextmanager
def open_progress(
    world_size: int, doing: str = "evaluating"
) -> Iterator[Callable[[Progress], None]]:
    """A function that displays the `Progress` of rank 0."""
    what = doing if world_size == 1 else f"{doing} (rank 0 of {world_size})"
    console = open_console(stderr=True)
    if not console.is_terminal:
        yield _PlainLines(console, what)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(TextColumn(what), *columns, TextColumn("{task.description}"), console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda progress: bar.update(
            task, total=progress.total, completed=progress.done, description=_accuracy(progress)
        )


class _PlainLines:
    def __init__(self, console: Console, what: str) -> None:
        self._console = console
        self._what = what
        self._lines = 0

    def __call__(self, progress: Progress) -> None:
        if progress.done * PLAIN_LINES < (self._lines + 1) * progress.total:
            return
        self._lines = progress.done * PLAIN_LINES // progress.total
        self._console.print(f"{self._what} {progress.done}/{progress.total} {_accuracy(progress)}")


def _accuracy(progress: Progress) -> str:
    accuracy = progress.accuracy
    return "" if accuracy is None else f"accuracy so far {100 * accuracy:.1f} %"
