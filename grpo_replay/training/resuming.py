"""The directory of a run: a new one, or one that is resumed from its last checkpoint.

Nothing that a resume will remove is removed before everything that it needs is restored: `take`
only looks, `go_back` comes last.
"""

import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import run_collectively, run_on_main
from grpo_replay.errors import CheckpointError, RecipeError
from grpo_replay.recipe import Recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.snapshot import restore_snapshot
from grpo_replay.storage.checkpoint import (
    RunState,
    adopt_latest,
    find_checkpoint,
    point_latest,
    read_state,
)
from grpo_replay.storage.recipe_history import differences, read_recipe_file, recipe_file
from grpo_replay.storage.run_directory import RunDirectory, environment_facts, refuse_missing

JOURNAL_FOLDER = "journal"

JOURNAL_RULES = (
    "sampling.prompts_per_step",
    "sampling.group_size",
    "sampling.collection.order",
    "sampling.collection.straddlers",
    "replay.preset",
    "replay.composition",
    "replay.max_age_steps",
    "replay.drop_zero_variance",
)
"""Keys that decide which groups of the journal a step takes, and how each of them ends."""


@dataclass(slots=True)
class StartingPoint:
    """Where a run begins: its first step, or `checkpoint`. `notices` are for the user."""

    checkpoint: Path | None
    state: RunState = field(default_factory=RunState)
    notices: list[str] = field(default_factory=list)


def take_directory(
    recipe: Recipe, run_dir: RunDirectory, comm: Comm, resume: bool, stack: ExitStack
) -> StartingPoint:
    """Create the directory of the run, or find the checkpoint that it goes on from. Opens the logs
    of all ranks. Collective; `stack` unlocks the directory."""
    stack.callback(run_dir.unlock)

    def take() -> StartingPoint:
        start = _find_start(recipe, run_dir, resume)
        attempt = run_dir.next_attempt()
        run_dir.open_log(attempt)
        run_dir.write_environment(attempt, environment_facts(comm.world_size))
        return start

    start = run_on_main(comm, take) or StartingPoint(None)
    start.checkpoint = _seen_by_all(start.checkpoint, run_dir.checkpoints, comm)
    open_other_logs(run_dir, comm)
    if start.checkpoint:
        start.state = read_state(start.checkpoint)
    return start


def _find_start(recipe: Recipe, run_dir: RunDirectory, resume: bool) -> StartingPoint:
    """Called on rank 0 only."""
    repeated = recipe.sampling.collection.replay_journal
    if repeated is not None:
        refuse_other_rules(recipe, Path(repeated))
    if not resume or run_dir.is_unborn:
        run_dir.create(recipe)
        notices = ["the run had not begun yet: it starts now"] if resume else []
        return StartingPoint(None, notices=notices)
    refuse_missing(run_dir.path)
    refuse_other_rules(recipe, run_dir.path)
    run_dir.lock()
    adopt_latest(run_dir.checkpoints)
    checkpoint = find_checkpoint(run_dir.checkpoints)
    damage = run_dir.check(read_state(checkpoint).step if checkpoint else 0)
    notices = [damage] if damage else []
    if checkpoint is None:
        notices.append("the run had no checkpoint yet: it starts again from its first step")
    return StartingPoint(checkpoint, notices=notices)


def refuse_other_rules(recipe: Recipe, run_dir: Path) -> None:
    """Raises RecipeError if `recipe` cannot repeat the steps of the journal in `run_dir`: groups
    would be trained on in other steps, twice, or not at all."""
    recorded = recipe_file(run_dir)
    if not (run_dir / JOURNAL_FOLDER).is_dir() or not recorded.exists():
        return
    changes = [
        f"{key} {new!r}, was {old!r}"
        for key, old, new in differences(read_recipe_file(recorded), recipe)
        if key in JOURNAL_RULES
    ]
    if changes:
        raise RecipeError(
            f"the steps in {run_dir / JOURNAL_FOLDER} are repeated by the rules that they were "
            f"recorded under, which the recipe changes: {'; '.join(changes)}. Leave these keys as "
            "they were, or start a new run from the last checkpoint's model (--set model.path=…)"
        )


def _seen_by_all(found: Path | None, checkpoints: Path, comm: Comm) -> Path | None:
    """Broadcast the checkpoint that rank 0 verified. Raises CheckpointError on a rank that does not
    see it."""
    name = comm.broadcast_json(found.name if found else None)
    if name is None:
        return None
    checkpoint = checkpoints / name

    def look() -> None:
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"{checkpoint} is not there on {platform.node()}, though rank 0 sees it: "
                "--output-dir must be on a file system that all nodes share"
            )

    run_collectively(comm, look)
    return checkpoint


def open_other_logs(run_dir: RunDirectory, comm: Comm) -> None:
    """Open the logs of ranks other than 0, next to rank 0's, which has the newest number."""
    attempt = comm.broadcast_json(run_dir.next_attempt() - 1 if comm.is_main else None)
    opened: Callable[[], object] = lambda: run_dir.open_log(attempt, comm.rank)  # noqa: E731
    run_collectively(comm, (lambda: None) if comm.is_main else opened)


def restore_buffer(checkpoint: Path, step: int, buffer: ReplayBuffer) -> None:
    """The buffer as it was after `step`. Called on rank 0 only."""
    snapshot = checkpoint / "buffer.parquet"
    found = restore_snapshot(snapshot, buffer)
    if found != step:
        raise CheckpointError(
            f"{snapshot} is the buffer after step {found}, in the checkpoint of step {step}: "
            "restore it from a copy, or start with an empty buffer with --set "
            "checkpoint.restore_buffer=false"
        )


def go_back(recipe: Recipe, run_dir: RunDirectory, start: StartingPoint) -> list[str]:
    """Remove what comes after the checkpoint, now that it is restored; returns notices. Called on
    rank 0 only."""
    changes = run_dir.go_back(recipe, start.state.step)
    if start.checkpoint:
        point_latest(start.checkpoint)
    return [f"the recipe changes from here on: {change}" for change in changes]
