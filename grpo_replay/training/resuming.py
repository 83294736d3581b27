"""Checkpoints of a run, and its directory: a new one, or one that is resumed from the last of them.

Writing: room first, then shards, then a manifest. Every rank flushes and hashes what it wrote
itself; rank 0 completes the folder. Resuming: nothing that it will remove is removed before
everything that it needs is restored: `take_directory` only looks, `go_back` comes last.
"""

import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import run_collectively, run_on_main
from grpo_replay.errors import CheckpointError, OutputDirectoryError, RecipeError
from grpo_replay.recipe import Recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.snapshot import restore_snapshot, write_snapshot
from grpo_replay.storage.atomic import (
    describe_write_failure,
    flush_files,
    free_bytes,
    write_text_whole,
)
from grpo_replay.storage.checkpoint import (
    MODEL_CARD,
    FileFacts,
    RunState,
    adopt_latest,
    begin_checkpoint,
    checkpoint_bytes_on_disk,
    complete_checkpoint,
    file_facts,
    find_checkpoint,
    list_checkpoints,
    point_latest,
    read_state,
    remove_old,
    temporary_folder,
    to_gib,
)
from grpo_replay.storage.recipe_history import read_recipe_file, recipe_file
from grpo_replay.storage.run_directory import RunDirectory, environment_facts, refuse_missing
from grpo_replay.training.journal_rules import (
    NEW_RUN,
    refuse_other_journal,
    refuse_other_rules,
    refuse_other_steps,
)
from grpo_replay.training.rollout_source import Parts, RolloutSource

_SHARD = re.compile(r"zero_pp_rank_(\d+)_")


def write_checkpoint(
    parts: Parts,
    source: RolloutSource,
    state: RunState,
    expected_bytes: int,
    model_card: Callable[[], str],
) -> None:
    """Write the checkpoint of `state.step` and drop the oldest. Collective.

    Its files: model/ (weights, tokenizer, card), adapter/ with LoRA, engine/ (each rank's shards),
    buffer.parquet, those of the source, state.json and the manifest last. Rollouts and draws up to
    it are flushed.

    `expected_bytes` is its size if there is none yet to go by. Raises OutputDirectoryError if the
    disk has no room for it, or runs full; earlier checkpoints are then as they were.
    """
    comm, checkpoints = parts.comm, parts.run_dir.checkpoints
    temporary = temporary_folder(checkpoints, state.step)

    def begin() -> None:
        if comm.is_main:
            refuse_full_disk(checkpoints, f"the checkpoint of step {state.step}", expected_bytes)
            with removed_if_unwritable(temporary):
                parts.run_dir.flush_steps(state.step)
                begin_checkpoint(temporary)

    def complete() -> None:
        with removed_if_unwritable(temporary):
            write_text_whole(temporary / MODEL_CARD, model_card())
            write_snapshot(temporary / "buffer.parquet", parts.buffer, state.step)
            source.save(temporary)
            complete_checkpoint(temporary, state, parts.recipe.checkpoint.keep, facts)

    run_collectively(comm, begin)
    with removed_if_unwritable(temporary):
        parts.engine.save(temporary / "engine")
        parts.engine.save_model(temporary / "model")
        parts.engine.save_adapter(temporary / "adapter")
        facts = _facts_of_all(comm, temporary)
    run_on_main(comm, complete)


def _facts_of_all(comm: Comm, folder: Path) -> FileFacts:
    """Size and SHA-256 of every file in `folder`, each flushed and read by the rank that wrote it:
    DeepSpeed's shards name theirs, the rest is rank 0's."""
    comm.barrier()
    names = comm.broadcast_json(_files_in(folder) if comm.is_main else None)
    mine = [name for name in names if _writer(name) % comm.world_size == comm.rank]
    flush_files([folder / name for name in mine])
    facts: FileFacts = {}
    for part in comm.all_gather_json(file_facts(folder, mine)):
        facts |= part
    return facts


def _files_in(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _writer(name: str) -> int:
    shard = _SHARD.search(name)
    return int(shard[1]) if shard else 0


def notices_of_room(checkpoints: Path, keep: int, expected_bytes: int) -> list[str]:
    """At the start: a sentence if the disk will be full before `keep` checkpoints are there and
    another is written. Raises OutputDirectoryError if there is no room for one."""
    refuse_full_disk(checkpoints, "a checkpoint of this run", expected_bytes)
    more = max(keep + 1 - len(list_checkpoints(checkpoints)), 1)
    each, free = _expected_size(checkpoints, expected_bytes), free_bytes(checkpoints)
    if free >= more * each:
        return []
    return [
        f"{checkpoints} has {to_gib(free)} GiB free, and {more} more checkpoints "
        f"(checkpoint.keep {keep} and one being written) take {to_gib(more * each)} GiB: the run "
        "stops at the one that does not fit; make room"
    ]


def refuse_full_disk(checkpoints: Path, what: str, expected_bytes: int) -> None:
    """Raises OutputDirectoryError if a checkpoint does not fit on the disk."""
    needed, free = _expected_size(checkpoints, expected_bytes), free_bytes(checkpoints)
    if free < needed:
        raise OutputDirectoryError(
            f"{what} needs {to_gib(needed)} GiB, and {checkpoints} has {to_gib(free)} GiB free: "
            f"nothing was written. {_what_is_left(list_checkpoints(checkpoints))}"
        )


def _expected_size(checkpoints: Path, expected_bytes: int) -> int:
    """As large as the newest, or as expected if that is more."""
    kept = list_checkpoints(checkpoints)
    return max(expected_bytes, checkpoint_bytes_on_disk(kept[-1]) if kept else 0)


def _what_is_left(kept: Sequence[Path]) -> str:
    if not kept:
        return "There is no earlier checkpoint: free the place, and start again"
    return f"{kept[-1].name} is complete: free the place, and go on from there with --resume"


@contextmanager
def removed_if_unwritable(temporary: Path) -> Iterator[None]:
    """Within, a disk that is full or fails, or a folder that may not be changed, becomes an
    OutputDirectoryError, and what was written of the checkpoint is removed."""
    try:
        yield
    except Exception as error:
        reason = describe_write_failure(error)
        if reason is None:
            raise
        free = free_bytes(temporary.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        raise OutputDirectoryError(
            f"{temporary} cannot be written ({reason}; {to_gib(free)} GiB free then): what was "
            f"written of it was removed. {_what_is_left(list_checkpoints(temporary.parent))}"
        ) from error


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
    if recipe.sampling.collection.replay_journal is not None:
        refuse_other_journal(recipe)
    if not resume or run_dir.is_unborn:
        run_dir.create(recipe)
        notices = ["the run had not begun yet: it starts now"] if resume else []
        return StartingPoint(None, notices=notices)
    refuse_missing(run_dir.path)
    refuse_other_rules(recipe, run_dir.path)
    refuse_other_unit(recipe.draws_per_step, run_dir.path)
    run_dir.lock()
    adopt_latest(run_dir.checkpoints)
    checkpoint = find_checkpoint(run_dir.checkpoints)
    step = read_state(checkpoint).step if checkpoint else 0
    run_dir.check(step)
    refuse_fewer_steps(recipe.run.steps, step)
    refuse_other_steps(recipe, run_dir.path, step)
    again = "the run had no checkpoint yet: it starts again from its first step"
    return StartingPoint(checkpoint, notices=[] if checkpoint else [again])


def refuse_other_unit(draws_per_step: int, run_dir: Path) -> None:
    """Raises RecipeError if the steps so far made another number of draws than `draws_per_step`:
    ages and last uses count draws."""
    recorded = recipe_file(run_dir)
    if not recorded.exists():
        return
    before = read_recipe_file(recorded).draws_per_step
    if before != draws_per_step:
        raise RecipeError(
            f"a step of {run_dir} made {before} draws, and would make {draws_per_step} by this "
            "recipe (batch.updates_per_step, replay.ratio, replay.preset): ages count draws. Leave "
            f"these keys as they were, or {NEW_RUN}"
        )


def refuse_fewer_steps(steps: int, done: int) -> None:
    """Raises RecipeError if the run has `done` more steps than the recipe's `steps`."""
    if steps < done:
        raise RecipeError(
            f"run.steps {steps}: the run has a checkpoint of step {done}, and a resume goes on "
            f"from there: set run.steps to {done} or more"
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
        remove_old(start.checkpoint, recipe.checkpoint.keep)
    return [f"the recipe changes from here on: {change}" for change in changes]
