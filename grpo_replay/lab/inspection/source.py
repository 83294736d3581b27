"""Opens PATH as a run or as a snapshot of a buffer, and finds its files up to a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_replay.errors import SnapshotError, no_such_path
from grpo_replay.recipe import Recipe
from grpo_replay.replay.snapshot import read_snapshot_facts
from grpo_replay.storage.checkpoint import MANIFEST, list_checkpoints, step_of
from grpo_replay.storage.rollout_log import read_metrics
from grpo_replay.storage.stored_recipe import RECIPE_FILE, read_recipe_file


@dataclass(frozen=True, slots=True)
class Source:
    """The files behind an inspection, as of training step `step`.

    `snapshot` is the buffer written at exactly that step, or None if it must be rebuilt from the
    rollout log. A lone snapshot has no recipe, metrics, rollouts or draws.
    """

    path: Path
    step: int
    snapshot: Path | None
    recipe: Recipe | None = None
    metrics: tuple[Mapping[str, Any], ...] = ()
    rollout_files: tuple[tuple[int, Path], ...] = ()  # (step, file), steps ascending and ≤ step
    draw_files: tuple[tuple[int, Path], ...] = ()

    def points_of(self, name: str) -> tuple[tuple[int, float], ...]:
        """(step, value) of a metric, for the steps that define it."""
        lines = (line for line in self.metrics if line.get(name) is not None)
        return tuple((int(line["step"]), float(line[name])) for line in lines)


def open_source(path: str | Path, step: int | None = None) -> Source:
    """Open PATH as of `step` (default: the last step).

    Raises SnapshotError if PATH is not a run, checkpoint or snapshot, or does not have the step.
    """
    path = Path(path)
    if not path.exists():
        raise SnapshotError(no_such_path(path))
    snapshot = path / "buffer.parquet" if path.is_dir() else path
    if snapshot.exists():
        own_step = read_snapshot_facts(snapshot)["step"]
        if step not in (None, own_step):
            raise SnapshotError(
                f"{path}: --step {step} needs a run directory; a snapshot has one step ({own_step})"
            )
        return Source(path, own_step, snapshot)
    metrics = read_metrics(path / "metrics.jsonl")
    rollouts, draws = (files_by_step(path / name) for name in ("rollouts", "draws"))
    snapshots = checkpoint_snapshots(path)
    # While a step is written, its rollouts are on disk before its line of metrics.
    steps = [int(line["step"]) for line in metrics] or [number for number, _ in rollouts]
    steps = steps or sorted(snapshots)
    if not steps:
        raise SnapshotError(
            f"{path}: neither a run directory with a finished step (metrics.jsonl, rollouts/, "
            "checkpoints/) nor a checkpoint or a snapshot (buffer.parquet)"
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        raise SnapshotError(f"{path}: no step {step}; the run has steps {steps[0]} to {steps[-1]}")
    return Source(
        path=path,
        step=step,
        snapshot=snapshots.get(step),
        recipe=read_recipe_file(path / RECIPE_FILE),
        metrics=tuple(line for line in metrics if line["step"] <= step),
        rollout_files=tuple((number, file) for number, file in rollouts if number <= step),
        draw_files=tuple((number, file) for number, file in draws if number <= step),
    )


def files_by_step(folder: Path) -> tuple[tuple[int, Path], ...]:
    """(step, file) of every `step_*.parquet` in a folder, ascending; empty without a folder."""
    files = ((step_of(file.with_suffix("")), file) for file in folder.glob("step_*.parquet"))
    return tuple(sorted((step, file) for step, file in files if step is not None))


def checkpoint_snapshots(run_dir: Path) -> dict[int, Path]:
    """Find the buffer.parquet of every complete checkpoint, by the step after which it was written.
    A run in TRL has them in checkpoint-N/, where N counts updates."""
    checkpoints = list_checkpoints(run_dir / "checkpoints")
    complete = [path for path in checkpoints if (path / MANIFEST).exists()]
    snapshots = {step_of(path) or 0: path / "buffer.parquet" for path in complete}
    trl_snapshots = run_dir.glob("checkpoint-*/buffer.parquet")
    snapshots |= {read_snapshot_facts(path)["step"]: path for path in trl_snapshots}
    return {step: path for step, path in snapshots.items() if path.exists()}
