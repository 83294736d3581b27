"""Opens PATH as a run, a checkpoint or a snapshot, and finds its files up to a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_replay.errors import RecipeError, SnapshotError
from grpo_replay.recipe import Recipe
from grpo_replay.replay.snapshot import read_snapshot_facts
from grpo_replay.storage.checkpoint import MANIFEST, list_checkpoints, step_of
from grpo_replay.storage.recipe_history import RECIPE_FILE, RecipeHistory, read_history
from grpo_replay.storage.rollout_log import read_metrics


@dataclass(frozen=True, slots=True)
class Source:
    """The files behind an inspection, as of training step `step`.

    `snapshot` is the buffer written at exactly that step, or None if the buffer must be rebuilt
    from the rollout log. A snapshot outside a run has no run directory and no recipes.
    """

    path: Path
    kind: Literal["run", "checkpoint", "snapshot"]
    step: int
    snapshot: Path | None
    run_dir: Path | None
    recipes: RecipeHistory | None
    metrics: tuple[Mapping[str, Any], ...]
    rollout_files: tuple[tuple[int, Path], ...]  # (step, file), steps ascending and ≤ step
    draw_files: tuple[tuple[int, Path], ...]

    @property
    def recipe(self) -> Recipe | None:
        """The resolved recipe under which `step` was trained."""
        return None if self.recipes is None else self.recipes.at(self.step)


def open_source(path: str | Path, step: int | None = None) -> Source:
    """The source at PATH, as of `step` (default: the last step).

    Raises SnapshotError if PATH is not a run, checkpoint or snapshot, or does not have the step.
    """
    path = Path(path)
    if path.is_file():
        return _open_snapshot(path, path, step)
    if not path.is_dir():
        raise SnapshotError(
            f"{path}: no such file or directory. Give a run directory, a checkpoint, or a snapshot "
            "(buffer.parquet)"
        )
    if _is_run(path):
        return _open_run(path, step)
    if any((path / name).exists() for name in (MANIFEST, "state.json", "buffer.parquet")):
        return _open_snapshot(path.resolve(), path.resolve() / "buffer.parquet", step)
    raise SnapshotError(
        f"{path}: neither a run directory (metrics.jsonl, rollouts/, checkpoints/) nor a "
        "checkpoint (state.json, buffer.parquet)"
    )


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("metrics.jsonl", "rollouts", "checkpoints"))


def _open_run(run_dir: Path, step: int | None) -> Source:
    # While a step is written, its rollouts are on disk before its line of metrics.
    known = [int(line["step"]) for line in read_metrics(run_dir / "metrics.jsonl")]
    known = known or [at for at, _ in files_by_step(run_dir / "rollouts")]
    snapshots = checkpoint_snapshots(run_dir)
    known = known or sorted(snapshots)
    if not known:
        raise SnapshotError(
            f"{run_dir}: the run has not finished a step yet; there is nothing to inspect"
        )
    at = known[-1] if step is None else step
    if at not in known:
        raise SnapshotError(f"{run_dir}: no step {at}; the run has steps {known[0]} to {known[-1]}")
    return _source(run_dir, "run", at, snapshots.get(at), run_dir)


def _open_snapshot(path: Path, snapshot: Path, step: int | None) -> Source:
    """A checkpoint, or its buffer.parquet alone; `snapshot` is that file, which a checkpoint may
    lack. Its run is the folder that has the checkpoint, in checkpoints/ or, as TRL's, itself."""
    folder = snapshot.resolve().parent
    at = step_of(folder)
    if at is None:
        at = read_snapshot_facts(snapshot)["step"]
    if step not in (None, at):
        raise SnapshotError(
            f"{path}: --step {step} needs a run directory; a snapshot has a single step ({at})"
        )
    run_dir = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    inside = (run_dir / RECIPE_FILE).exists()
    kind: Literal["checkpoint", "snapshot"] = "checkpoint" if path.is_dir() else "snapshot"
    found = snapshot if snapshot.exists() else None
    return _source(path, kind, at, found, run_dir if inside else None)


def _source(
    path: Path,
    kind: Literal["run", "checkpoint", "snapshot"],
    step: int,
    snapshot: Path | None,
    run_dir: Path | None,
) -> Source:
    if run_dir is None:
        return Source(path, kind, step, snapshot, None, None, (), (), ())
    metrics = read_metrics(run_dir / "metrics.jsonl")
    rollouts, draws = (files_by_step(run_dir / name) for name in ("rollouts", "draws"))
    return Source(
        path=path,
        kind=kind,
        step=step,
        snapshot=snapshot,
        run_dir=run_dir,
        recipes=read_recipes(run_dir),
        metrics=tuple(line for line in metrics if line["step"] <= step),
        rollout_files=tuple(each for each in rollouts if each[0] <= step),
        draw_files=tuple(each for each in draws if each[0] <= step),
    )


def files_by_step(folder: Path) -> tuple[tuple[int, Path], ...]:
    """(step, file) of every `step_*.parquet` in a folder, ascending; empty without a folder."""
    if not folder.is_dir():
        return ()
    tables = [file for file in folder.iterdir() if file.suffix == ".parquet"]
    found = ((step_of(file.with_suffix("")), file) for file in tables)
    return tuple(sorted((step, file) for step, file in found if step is not None))


def checkpoint_snapshots(run_dir: Path) -> dict[int, Path]:
    """The buffer.parquet of every complete checkpoint, by the step after which it was written;
    those of a run in TRL are in checkpoint-N/, N counting updates."""
    found = list_checkpoints(run_dir / "checkpoints")
    whole = [path for path in found if (path / MANIFEST).exists()]
    snapshots = {step_of(path) or 0: path / "buffer.parquet" for path in whole}
    of_trl = run_dir.glob("checkpoint-*/buffer.parquet")
    snapshots |= {read_snapshot_facts(path)["step"]: path for path in of_trl}
    return {step: path for step, path in snapshots.items() if path.exists()}


def read_recipes(run_dir: Path) -> RecipeHistory | None:
    """All recipes of a run; None without one. Raises SnapshotError if one is invalid."""
    if not (run_dir / RECIPE_FILE).exists():
        return None
    try:
        return read_history(run_dir)
    except RecipeError as error:
        raise SnapshotError(f"the recipe of the run is invalid: {error}") from error
