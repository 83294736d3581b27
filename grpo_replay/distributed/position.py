"""Where a rank is in the run: written by its main thread, read by others."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

_Item = TypeVar("_Item")


class Place(NamedTuple):
    """A place in the run. `part` is the current part of the stage ("micro-batch 3 of 8");
    `collective` is the method of Comm in which the rank waits, or ""."""

    step: int = 0
    stage: str = "start"
    part: str = ""
    collective: str = ""

    def __str__(self) -> str:
        words = [f"step {self.step}", self.stage, self.part]
        waiting = f"in {self.collective}" if self.collective else ""
        return ", ".join(filter(None, [*words, waiting]))


class Position:
    """The place of one rank, and when it got there.

    DeepSpeed's own collectives are not marked: a rank that waits in one of them stays at the part
    in which it called DeepSpeed. A move replaces one tuple, so a reader in another thread needs no
    lock.
    """

    def __init__(self) -> None:
        self._held = (Place(), time.monotonic())
        self._enclosing = ""  # what `note` puts before the part

    def read(self) -> tuple[Place, float]:
        """The place, and the `time.monotonic()` at which it was reached."""
        return self._held

    def _move(self, place: Place) -> None:
        self._held = (place, time.monotonic())

    def begin_step(self, step: int) -> None:
        self._enclosing = ""
        self._move(Place(step, "between stages"))

    def note(self, part: str) -> None:
        """Move to another part of the stage, or of the current item of `each`."""
        self._move(self._held[0]._replace(part=self._enclosing + part))

    # No `finally` in these: after an exception, the place where it was raised is reported.

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        before, enclosing = self._held[0], self._enclosing
        self._enclosing = ""
        self._move(Place(before.step, name))
        yield
        self._enclosing = enclosing
        self._move(before)

    @contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Mark a collective of Comm. Nested ones keep the name of the outermost."""
        before = self._held[0]
        self._move(before._replace(collective=before.collective or collective))
        yield
        self._move(before)

    def each(self, name: str, items: Iterable[_Item], total: int | None = None) -> Iterator[_Item]:
        """The items, with the part "`name` 3 of `total`" while one is waited for or in use."""
        of_total = f" of {total}" if total is not None else ""
        before, enclosing = self._held[0], self._enclosing
        self.note(f"{name} 1{of_total}")
        for number, item in enumerate(items, start=1):
            self._enclosing = f"{enclosing}{name} {number}{of_total}, "
            yield item
            self._enclosing = enclosing
            if number != total:
                self.note(f"{name} {number + 1}{of_total}")
        self._move(before)
