"""Opens PATH as a run, a checkpoint or a snapshot, and finds its files up to a step."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_replay.errors import RecipeError, SnapshotError
from grpo_replay.recipe import Recipe
from grpo_replay.storage.checkpoint import MANIFEST, list_checkpoints, step_of
from grpo_replay.storage.recipe_history import (
    RecipeHistory,
    read_history,
    read_recipe_file,
    recipe_file,
)
from grpo_replay.storage.rollout_log import read_metrics

_STEP_FILE = re.compile(r"step_(\d+)\.parquet")


@dataclass(frozen=True, slots=True)
class Source:
    """The files behind an inspection, as of training step `step`.

    `snapshot` is the buffer written at exactly that step, or None if the buffer must be rebuilt
    from the rollout log. A snapshot outside a run has no run directory and no recipe.
    """

    path: Path
    kind: Literal["run", "checkpoint", "snapshot"]
    step: int | None  # None if only the metadata of the snapshot has it
    snapshot: Path | None
    run_dir: Path | None
    recipe: Recipe | None
    metrics: tuple[Mapping[str, Any], ...]
    rollout_files: tuple[tuple[int, Path], ...]  # (step, file), steps ascending and ≤ step
    draw_files: tuple[tuple[int, Path], ...]


def open_source(path: str | Path, step: int | None = None) -> Source:
    """The source at PATH, as of `step` (default: the last step).

    Raises SnapshotError if PATH is not a run, checkpoint or snapshot, or does not have the step.
    """
    path = Path(path)
    if path.is_dir():
        if _is_checkpoint(path):
            return _open_checkpoint(path, step)
        if _is_run(path):
            return _open_run(path, step)
        runs = sorted(str(each) for each in path.iterdir() if each.is_dir() and _is_run(each))
        if runs:
            more = ", …" if len(runs) > 8 else ""
            raise SnapshotError(
                f"{path} is a folder of runs: name one: {', '.join(runs[:8])}{more}"
            )
        raise SnapshotError(
            f"{path}: neither a run directory (metrics.jsonl, rollouts/, checkpoints/) nor a "
            f"checkpoint (state.json, buffer.parquet); it contains {_listing(path)}"
        )
    if path.is_file():
        return _open_snapshot(path, step)
    raise SnapshotError(
        f"{path}: no such file or directory. Give a run directory, a checkpoint, or a snapshot "
        "(buffer.parquet)"
    )


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("metrics.jsonl", "rollouts", "checkpoints"))


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("manifest.json", "state.json")) or (
        (folder / "buffer.parquet").exists() and not _is_run(folder)
    )


def _open_run(run_dir: Path, step: int | None) -> Source:
    metrics = read_metrics(run_dir / "metrics.jsonl")
    rollout_files = step_files(run_dir / "rollouts")
    # While a step is written, its rollouts are on disk before its line of metrics.
    known = [int(line["step"]) for line in metrics] or [at for at, _ in rollout_files]
    snapshots = checkpoint_snapshots(run_dir)
    if not known:
        known = sorted(snapshots)
    if not known:
        raise SnapshotError(
            f"{run_dir}: the run has not finished a step yet; there is nothing to inspect"
        )
    at = known[-1] if step is None else step
    if at not in known:
        raise SnapshotError(f"{run_dir}: no step {at}; the run has steps {known[0]} to {known[-1]}")
    return _source(run_dir, "run", at, snapshots.get(at), run_dir)


def _open_checkpoint(folder: Path, step: int | None) -> Source:
    folder = folder.resolve()
    if not (folder / "manifest.json").exists() and (folder / "state.json").exists():
        raise SnapshotError(
            f"{folder}: the checkpoint is incomplete (no manifest.json); use the previous one"
        )
    at = _checkpoint_step(folder)
    if step is not None and at is not None and step != at:
        raise SnapshotError(
            f"{folder}: this is the checkpoint of step {at}, not of step {step}; pass the run "
            "directory to inspect other steps"
        )
    snapshot = folder / "buffer.parquet"
    return _source(
        folder, "checkpoint", at, snapshot if snapshot.exists() else None, _run_of(folder)
    )


def _open_snapshot(path: Path, step: int | None) -> Source:
    folder = path.resolve().parent
    at = _checkpoint_step(folder)
    if step is not None and at != step:
        raise SnapshotError(
            f"{path}: --step {step} needs a run directory; a snapshot has a single step"
            + (f" ({at})" if at is not None else "")
        )
    return _source(path, "snapshot", at, path, _run_of(folder))


def _checkpoint_step(folder: Path) -> int | None:
    state = folder / "state.json"
    if state.exists():
        try:
            return int(json.loads(state.read_text(encoding="utf-8"))["step"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise SnapshotError(
                f"{state}: not a valid checkpoint state (a JSON object with a step)"
            ) from error
    return step_of(folder)


def _run_of(checkpoint: Path) -> Path | None:
    """The run directory that contains a checkpoint folder; None if the folder was moved."""
    if checkpoint.parent.name != "checkpoints":
        return None
    run_dir = checkpoint.parent.parent
    return run_dir if (run_dir / "recipe.yaml").exists() else None


def _source(
    path: Path,
    kind: Literal["run", "checkpoint", "snapshot"],
    step: int | None,
    snapshot: Path | None,
    run_dir: Path | None,
) -> Source:
    def until(files: tuple[tuple[int, Path], ...]) -> tuple[tuple[int, Path], ...]:
        return tuple((at, file) for at, file in files if step is None or at <= step)

    if run_dir is None:
        return Source(path, kind, step, snapshot, None, None, (), (), ())
    metrics = read_metrics(run_dir / "metrics.jsonl")
    return Source(
        path=path,
        kind=kind,
        step=step,
        snapshot=snapshot,
        run_dir=run_dir,
        recipe=read_run_recipe(run_dir, step),
        metrics=tuple(line for line in metrics if step is None or line["step"] <= step),
        rollout_files=until(step_files(run_dir / "rollouts")),
        draw_files=until(step_files(run_dir / "draws")),
    )


def step_files(folder: Path) -> tuple[tuple[int, Path], ...]:
    """(step, file) of every `step_*.parquet` in a folder, ascending; empty without a folder."""
    if not folder.is_dir():
        return ()
    matches = ((_STEP_FILE.fullmatch(file.name), file) for file in folder.iterdir())
    return tuple(sorted((int(match.group(1)), file) for match, file in matches if match))


def checkpoint_snapshots(run_dir: Path) -> dict[int, Path]:
    """The buffer.parquet of every complete checkpoint, by step."""
    found = list_checkpoints(run_dir / "checkpoints")
    whole = [path for path in found if (path / MANIFEST).exists()]
    snapshots = {step_of(path) or 0: path / "buffer.parquet" for path in whole}
    return {step: path for step, path in snapshots.items() if path.exists()}


def read_run_recipe(run_dir: Path, step: int | None = None) -> Recipe | None:
    """The resolved recipe under which a run trained `step` (default: the last); None without one.
    Raises SnapshotError if invalid."""
    path = recipe_file(run_dir, step)
    if not path.exists():
        return None
    try:
        return read_recipe_file(path)
    except RecipeError as error:
        raise SnapshotError(f"the recipe of the run is invalid: {error}") from error


def read_run_history(run_dir: Path) -> RecipeHistory:
    """All recipes of a run. Raises SnapshotError if one is invalid."""
    try:
        return read_history(run_dir)
    except RecipeError as error:
        raise SnapshotError(f"the recipe of the run is invalid: {error}") from error
