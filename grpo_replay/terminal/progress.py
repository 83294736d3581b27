"""Progress on stderr for whatever turns out to take longer than two seconds."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

PATIENCE_SECONDS = 2.0


def tracked(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The items, in order. After two seconds: a bar on a terminal, else one plain line."""
    start = time.monotonic()
    bar = task = None
    said = False
    try:
        for done, item in enumerate(items):
            if not said and time.monotonic() - start > PATIENCE_SECONDS:
                said = True
                bar, task = _announce(what, len(items))
            if bar is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()


def _announce(what: str, total: int):
    if not sys.stderr.isatty():
        print(f"{what}: {total:,} in all", file=sys.stderr)
        return None, None
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    bar.start()
    return bar, bar.add_task(what, total=total)
