"""Reading metrics.jsonl: one JSON object per training step, names to numbers or null."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_replay.errors import CheckpointError, SnapshotError


def read_metrics(path: Path, allow_unfinished: bool = True) -> tuple[dict[str, Any], ...]:
    """The lines of metrics.jsonl, in file order; empty if there is no file.

    A last line without a newline is still being written; it is skipped, or with `allow_unfinished`
    false read as any other. Raises SnapshotError, naming file and line, for a line that is not an
    object of numbers with a step.
    """
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    unfinished = lines.pop()
    if unfinished and not allow_unfinished:
        lines.append(unfinished)
    return tuple(_parse(path, number, text) for number, text in enumerate(lines, start=1))


def first_steps(path: Path, steps: int) -> list[str]:
    """The lines of steps 1 to `steps` as they are in the file, which a checkpoint of that step
    needs. Raises CheckpointError if they are not the first lines, each once and in order."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except FileNotFoundError:
        lines = []
    for step in range(1, steps + 1):
        problem = _problem_of(path, lines, step)
        if problem:
            raise CheckpointError(
                f"{problem}; the checkpoint of step {steps} needs one line for each of its steps. "
                "Nothing was changed: restore the file from a copy, or start a new run from the "
                "checkpoint's weights with --set model.path=CHECKPOINT/model"
            )
    return lines[:steps]


def _problem_of(path: Path, lines: list[str], step: int) -> str | None:
    """What is wrong with the line of `step`; None if nothing is."""
    if not path.exists():
        return f"{path} is missing"
    if step > len(lines):
        return f"{path} ends after {len(lines)} complete lines"
    try:
        found = _parse(path, step, lines[step - 1])["step"]
    except SnapshotError as error:
        return str(error)
    return None if found == step else f"{path}:{step} is of step {found}, expected step {step}"


def _parse(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict) or not _is_step(line.get("step")):
        raise SnapshotError(
            f"{path}:{number}: not a line of metrics (a JSON object with a step): {text[:80]!r}"
        )
    _refuse_text(path, number, line)
    return line


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _refuse_text(path: Path, number: int, line: Mapping[str, Any]) -> None:
    for name, value in line.items():
        if not _is_number_or_null(value):
            raise SnapshotError(
                f"{path}:{number}: {name} is {str(value)[:80]!r}, expected a number or null: the "
                "file was changed; restore it from a copy"
            )


def _is_number_or_null(value: Any) -> bool:
    try:
        return value is None or math.isfinite(value)
    except (TypeError, OverflowError):
        return False
