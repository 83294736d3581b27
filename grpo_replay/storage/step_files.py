"""Finds, reads and cuts the files that each training step leaves: rollouts/, draws/ and eval/, and
its line of metrics.jsonl, one JSON object of names to numbers or null."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_replay.errors import CheckpointError, SnapshotError
from grpo_replay.storage.parquet import open_parquet
from grpo_replay.storage.recipe_history import RecipeHistory
from grpo_replay.storage.rollout_log import (
    DRAW_SCHEMA,
    ROLLOUT_FILE_SCHEMA,
    ROLLOUT_LOG_VERSION,
    step_path,
)


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


def mean_over_steps(name: str, metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """Over the steps in which the metric is defined, each counted once; None if there is none."""
    values = [step[name] for step in metrics if step.get(name) is not None]
    return fmean(values) if values else None


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


STEP_FOLDERS = ("rollouts", "draws", "eval")
_STEP_FILE = re.compile(r"step_(\d{6,})\.(?:parquet|json)(?:\.tmp)?")


def step_files(run_dir: Path, first: int, last: int) -> list[Path]:
    """The files of rollouts/ and draws/ of the steps `first` … `last`."""
    steps = range(first, last + 1)
    paths = [step_path(run_dir / kind, step) for step in steps for kind in ("rollouts", "draws")]
    return [path for path in paths if path.exists()]


def remove_later(run_dir: Path, step: int) -> None:
    """Remove the files of the steps after `step`. Files with other names stay."""
    for folder in STEP_FOLDERS:
        for file in (run_dir / folder).glob("step_*"):
            match = _STEP_FILE.fullmatch(file.name)
            if match and int(match[1]) > step:
                file.unlink()


def describe_damage(run_dir: Path, history: RecipeHistory, step: int) -> str | None:
    """One sentence if files of rollouts/ or draws/ up to `step` are missing or cannot be opened.
    Training on does not need them."""
    problems = list(_problems(run_dir, history, step))
    if not problems:
        return None
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return (
        f"{problems[0]}{more}: training goes on without, but inspect-buffer, plan --from-run and "
        "--verify cannot tell all of this run; restore from a copy"
    )


def _problems(run_dir: Path, history: RecipeHistory, step: int) -> Iterator[str]:
    for each in range(1, step + 1):
        recipe = history.at(each)
        kinds = [("rollouts", ROLLOUT_FILE_SCHEMA)]
        kinds += [("draws", DRAW_SCHEMA)] if recipe.replays else []
        for kind, schema in kinds:
            path = step_path(run_dir / kind, each)
            try:
                with open_parquet(path, kind, ROLLOUT_LOG_VERSION, schema):
                    pass
            except SnapshotError as error:
                yield str(error)
