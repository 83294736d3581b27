"""The moments between the files of a run: every rename and removal in its folder, and every file
of a folder that is removed."""

import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHANGES = ((os, "rename"), (os, "replace"), (os, "unlink"), (os, "symlink"), (shutil, "rmtree"))


PARENT = -1
"""As a victim: the process that started the one that changes the file."""


@dataclass(frozen=True)
class Window:
    """Right before or after the `count`-th change with a `label`, in `folder`. Changes are noted in
    `notes`, one label a line. Without a label, nothing is killed. `victim` is the process that
    is killed if it is not the one that changes the file."""

    folder: str
    notes: str
    label: str = ""
    after: bool = False
    count: int = 1
    victim: int = 0

    @property
    def name(self) -> str:
        return f"{'after' if self.after else 'before'} {self.label}"


def arm(window: Window) -> None:
    """From now on, SIGKILL this process, or the victim, in the window."""
    watch = _Watch(window)
    for module, name in _CHANGES:
        setattr(module, name, watch.watched(getattr(module, name), name))


class _Watch:
    """Counts the changes. `removed` is the label of the removal of a folder that goes on."""

    def __init__(self, window: Window) -> None:
        self.window, self.removed = window, ""
        self.seen: Counter[str] = Counter()

    def watched(self, change: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            label = _label(self.window.folder, name, arguments)
            if self.removed:  # with names relative to a descriptor
                label = f"{name} in {self.removed}"
            if label is None:
                return change(*arguments, **options)
            with open(self.window.notes, "a") as notes:
                notes.write(f"{label}\n")
            self.seen[label] += 1
            here = (label, self.seen[label]) == (self.window.label, self.window.count)
            self._kill(here and not self.window.after)
            self.removed = label if name == "rmtree" else self.removed
            result = change(*arguments, **options)
            self.removed = "" if name == "rmtree" else self.removed
            self._kill(here and self.window.after)
            return result

        return watched

    def _kill(self, is_due: bool) -> None:
        if is_due:
            victim = os.getppid() if self.window.victim == PARENT else self.window.victim
            os.kill(victim or os.getpid(), signal.SIGKILL)


def _label(folder: str, name: str, arguments: tuple[Any, ...]) -> str | None:
    """The change and the name that it is about, with # for numbers; None outside the folder."""
    paths = [str(each) for each in arguments if isinstance(each, str | Path)]
    inside = [path for path in paths if Path(path).is_relative_to(folder)]
    if not inside:
        return None
    return f"{name} {re.sub(r'[0-9]+', '#', os.path.relpath(inside[-1], folder))}"
