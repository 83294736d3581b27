"""The state of a cell on disk, and the command that starts or continues it."""

import contextlib
import enum
import fcntl
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_replay.errors import OutputDirectoryError, RecipeError
from grpo_replay.lab.sweep.grid import Cell
from grpo_replay.storage.recipe_history import differences, read_history
from grpo_replay.storage.run_directory import (
    LOCK,
    RunDirectory,
    is_locked,
    read_summary,
    refuse_newer,
)


class CellState(enum.Enum):
    """What a cell's folder holds."""

    NEW = "new"
    """No run was started."""
    STARTED = "started"
    """A run that did not finish: it is resumed."""
    DONE = "done"
    """A run with its last step and its summary."""


def state_of(cell: Cell) -> CellState:
    """The state of a cell whose processes have ended.

    Raises OutputDirectoryError for a folder that holds something other than this cell's run: other
    files, a run of another recipe, or a run written by a newer version.
    """
    run = RunDirectory(cell.folder)
    if not run.recipe_path.exists():
        _refuse_other_files(cell)
        return CellState.NEW
    refuse_newer(cell.folder)
    recipe = cell.resolved_recipe()
    if not cell.awaits_choice:
        _refuse_other_recipe(cell)
    summary = read_summary(cell.folder)
    return CellState.DONE if summary and summary["steps"] >= recipe.run.steps else CellState.STARTED


def _refuse_other_files(cell: Cell) -> None:
    if cell.folder.exists() and not RunDirectory(cell.folder).is_unborn:
        raise OutputDirectoryError(
            f"{cell.folder} holds files but no run: the sweep would start a run there; move it, or "
            "choose another --output-dir"
        )


def _refuse_other_recipe(cell: Cell) -> None:
    try:
        history = read_history(cell.folder)
    except RecipeError as error:
        raise OutputDirectoryError(
            f"{cell.folder} has a recipe that is not one of this version: {error}"
        ) from error
    ours = cell.resolved_recipe()
    for recipe in history.recipes:
        if found := differences(recipe, ours):
            shown = ", ".join(f"{key} {old!r}, now {new!r}" for key, old, new in found[:3])
            raise OutputDirectoryError(
                f"{cell.folder} is a run of another recipe: {shown}: choose another --output-dir, "
                "or restore the recipe or the sweep file"
            )


def train_arguments(cell: Cell, state: CellState) -> list[str]:
    """The words after `grpo-replay` that start the run, or continue it with its own recipe."""
    folder = ["--output-dir", str(cell.folder)]
    if state is CellState.STARTED:
        return ["train", "--resume", *folder]
    overrides = [word for each in cell.all_overrides() for word in ("--set", each)]
    return ["train", cell.recipe, *overrides, *folder]


def shell_command(cell: Cell, state: CellState) -> str:
    """The cell as one line for a shell."""
    return shlex.join(["grpo-replay", *train_arguments(cell, state)])


@contextlib.contextmanager
def locked_log(cell: Cell) -> Iterator[int]:
    """Yields a descriptor of the cell's log, which holds the lock of the cell.

    A process that inherits it as its output keeps the lock until it ends, in whatever way. Raises
    OutputDirectoryError if such a process is alive.
    """
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(cell.log, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputDirectoryError(
                f"{cell.name} is running: {describe_holder(cell)}"
            ) from error
        yield descriptor
    finally:
        os.close(descriptor)


def is_running(cell: Cell) -> bool:
    """True if a process that a sweep started in this cell is alive."""
    return is_locked(cell.log)


def process_in(cell: Cell) -> str | None:
    """`process 1234` if one that no sweep started is in the run directory, as a queue's job."""
    lock = cell.folder / LOCK
    return f"process {lock.read_text(encoding='utf-8').strip()}" if is_locked(lock) else None


_STARTED = "# process "
_TAIL_BYTES = 65_536


def note_start(descriptor: int, pid: int, cell: Cell, state: CellState) -> None:
    """Write to the log which process runs which command."""
    os.write(descriptor, f"{_STARTED}{pid}: {shell_command(cell, state)}\n".encode())


def describe_holder(cell: Cell) -> str:
    """`process 1234`, from the log."""
    pid = last_attempt(cell.log)[0].removeprefix(_STARTED).partition(":")[0]
    return f"process {pid}"


def last_attempt(log: Path) -> list[str]:
    """The lines of a cell's log since the last start; the first names the process."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return [f"{_STARTED}unknown"]
    starts = [i for i, line in enumerate(lines) if line.startswith(_STARTED)]
    return lines[starts[-1] :] if starts else [f"{_STARTED}unknown", *lines]


_RAISED = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b")


def error_line(log: Path) -> str | None:
    """The first line of the error with which a cell's last attempt ended, or the end of its
    traceback; None if it printed none."""
    lines = last_attempt(log)[1:]
    errors = [line for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1].removeprefix("error: ")
    return next((line for line in reversed(lines) if _RAISED.match(line)), None)


@dataclass(slots=True)
class Progress:
    """Step and held-out accuracy of a run, from the last lines of its metrics.jsonl."""

    path: Path
    step: int = 0
    accuracy: float | None = None

    def refresh(self) -> None:
        """Read the end of the file. The accuracy stays that of the last evaluation seen."""
        try:
            with self.path.open("rb") as file:
                start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
                file.seek(start)
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return
        rows = [json.loads(line) for line in lines[int(start > 0) : -1]]
        if rows:
            self.step = rows[-1]["step"]
        for row in rows:
            self.accuracy = row.get("eval/mean", self.accuracy)
