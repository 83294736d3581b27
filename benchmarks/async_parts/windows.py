"""The moments between the files of a run: every rename and removal in its folder."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHANGES = ((os, "rename"), (os, "replace"), (os, "unlink"), (os, "symlink"), (shutil, "rmtree"))


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
    seen: dict[str, int] = {}
    for module, name in _CHANGES:
        setattr(module, name, _watched(getattr(module, name), name, window, seen))


def _watched(
    change: Callable[..., Any], name: str, window: Window, seen: dict[str, int]
) -> Callable[..., Any]:
    def watched(*arguments: Any, **options: Any) -> Any:
        label = _label(window.folder, name, arguments)
        if label is None:
            return change(*arguments, **options)
        with open(window.notes, "a") as notes:
            notes.write(f"{label}\n")
        seen[label] = seen.get(label, 0) + 1
        here = label == window.label and seen[label] == window.count
        if here and not window.after:
            os.kill(window.victim or os.getpid(), signal.SIGKILL)
        result = change(*arguments, **options)
        if here and window.after:
            os.kill(window.victim or os.getpid(), signal.SIGKILL)
        return result

    return watched


def _label(folder: str, name: str, arguments: tuple[Any, ...]) -> str | None:
    """The change and the name that it is about, with # for numbers; None outside the folder."""
    paths = [str(each) for each in arguments if isinstance(each, str | Path)]
    inside = [path for path in paths if Path(path).is_relative_to(folder)]
    if not inside:
        return None
    return f"{name} {re.sub(r'[0-9]+', '#', os.path.relpath(inside[-1], folder))}"
