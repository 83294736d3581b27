"""The folder of a sweep: its lock, and sweep.yaml, which says whose cells are in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_replay.errors import OutputDirectoryError, SweepFileError
from grpo_replay.lab.sweep.grid import Comparison
from grpo_replay.lab.sweep.sweep_file import SweepFile, read_sweep_file, sweep_to_yaml
from grpo_replay.storage.atomic import named_if_unwritable, write_text_whole
from grpo_replay.storage.recipe_history import flatten
from grpo_replay.storage.run_directory import RunDirectory

SWEEP = "sweep.yaml"


def check_folder(output_dir: Path, sweep: SweepFile) -> None:
    """Raises OutputDirectoryError unless the folder is new or holds this sweep."""
    path = output_dir / SWEEP
    if not path.exists():
        _refuse_occupied(output_dir)
        return
    try:
        before = read_sweep_file(path)
    except SweepFileError as error:
        raise OutputDirectoryError(str(error)) from error
    if before.name != sweep.name:
        raise OutputDirectoryError(
            f"{output_dir} holds the sweep {before.name}, not {sweep.name}: choose another "
            "--output-dir"
        )
    if changes := _changes(before, sweep):
        raise OutputDirectoryError(
            f"{output_dir} holds the sweep {sweep.name} with other contents: "
            f"{'; '.join(changes[:3])}: choose another --output-dir, or restore the sweep file"
        )


def _refuse_occupied(output_dir: Path) -> None:
    run = RunDirectory(output_dir)
    if run.exists:
        raise OutputDirectoryError(
            f"{output_dir} holds a run, not a sweep: choose another --output-dir"
        )
    if output_dir.exists() and not output_dir.is_dir():
        raise OutputDirectoryError(f"{output_dir} is a file: choose another --output-dir")
    others = [path.name for path in output_dir.glob("*") if path.name != ".lock"]
    if others:
        raise OutputDirectoryError(
            f"{output_dir} holds {sorted(others)[0]} but no {SWEEP}: choose an empty --output-dir"
        )


def _changes(before: SweepFile, after: SweepFile) -> list[str]:
    old, new = (flatten(each.model_dump(mode="json")) for each in (before, after))
    missing: Any = "nothing"
    return [
        f"{key} was {old.get(key, missing)}, now {new.get(key, missing)}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, missing) != new.get(key, missing)
    ]


def open_folder(
    output_dir: Path, sweep: SweepFile, comparisons: Sequence[Comparison]
) -> RunDirectory:
    """Lock the folder until this process ends, and write sweep.yaml if the sweep is new.

    Raises OutputDirectoryError if another sweep works in the folder, or it cannot be written.
    """
    with named_if_unwritable(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    lock = RunDirectory(output_dir)
    lock.lock()
    check_folder(output_dir, sweep)
    with named_if_unwritable(output_dir):
        for comparison in comparisons:
            comparison.root.mkdir(parents=True, exist_ok=True)
            if comparison.root != output_dir:
                write_text_whole(comparison.root / SWEEP, sweep_to_yaml(comparison.file))
        write_text_whole(output_dir / SWEEP, sweep_to_yaml(sweep))
    return lock
