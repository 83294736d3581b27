"""Progress on stderr for operations that take longer than two seconds."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

Item = TypeVar("Item")

DELAY_SECONDS = 2.0


def tracked(items: Sequence[Item], description: str) -> Iterator[Item]:
    """Yield the items in order, and report progress once this takes longer than two seconds.

    Progress is a bar if stderr is a terminal, otherwise one plain line.
    """
    start = time.monotonic()
    progress: Progress | None = None
    announced = False
    try:
        for done, item in enumerate(items):
            if not announced and time.monotonic() - start > DELAY_SECONDS:
                announced = True
                progress = _announce(description, len(items))
            if progress is not None:
                progress.update(progress.task_ids[0], completed=done)
            yield item
    finally:
        if progress is not None:
            progress.stop()


def _announce(description: str, total: int) -> "Progress | None":
    if not sys.stderr.isatty():
        print(f"{description}: {total:,} in total", file=sys.stderr)
        return None
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, *Progress.get_default_columns()[1:])
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task(description, total=total)
    progress.start()
    return progress
