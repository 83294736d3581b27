"""Where a run begins: in a new folder, or at the last checkpoint of a run that is resumed; and what
a resume may change in the recipe.

Nothing that a resume will remove is removed before everything that it needs is restored:
`find_start` only looks, `take_directory` makes or locks the folder, `go_back` comes last.

A journal has the groups as they arrived: with their rewards, and sampled by policies of which
version v is the policy after the first v steps as they were recorded. A resume repeats the steps
that the journal has after the checkpoint; `sampling.collection.replay_journal` repeats all.
"""

import platform
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import run_collectively, run_on_main
from grpo_replay.errors import DatasetError, OutputDirectoryError, RecipeError
from grpo_replay.recipe import Recipe
from grpo_replay.storage.atomic import named_if_unwritable
from grpo_replay.storage.checkpoint import (
    RunState,
    checkpoint_name,
    find_checkpoint,
    missing_at,
    newest_state,
    point_latest,
    read_state,
    remove_old,
)
from grpo_replay.storage.run_directory import (
    JOURNAL_FOLDER,
    RunDirectory,
    environment_facts,
    refuse_missing,
)
from grpo_replay.storage.stored_recipe import (
    RECIPE_FILE,
    differences,
    other_content,
    read_recipe_file,
    refuse_secrets,
)

MAY_CHANGE = (
    "name",
    "model.dtype",
    "model.attn_implementation",
    "model.gradient_checkpointing",
    "model.compile",
    "sampling.max_batch_rollouts",
    "sampling.logprob_gap_limit",
    "sampling.vllm.",
    "sampling.servers.",
    "sampling.collection.max_ahead_steps",
    "reward.max_failed_share",
    "reward.workers",
    "reward.time_limit_seconds",
    "batch.max_tokens_per_microbatch",
    "batch.packing",
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "engine.",
    "run.steps",
    "checkpoint.",
    "eval.",
    "tracking.",
)
"""What a resume may change: keys, and sections that end with a dot."""

CHANGE_WHAT_IS_SAMPLED = (
    "sampling.vllm.dtype",
    "sampling.vllm.hf_overrides",
    "sampling.vllm.quantization",
    "sampling.vllm.kv_cache_dtype",
)
"""Of these, what it may not change."""

CHANGE_UPDATES = (
    "model.dtype",
    "optimizer.",
    "run.steps",
    "checkpoint.restore_buffer",
)
"""Keys that a resume may change, but not while it repeats the steps of a journal."""

JOURNAL_RULES = (
    "sampling.prompts_per_step",
    "sampling.group_size",
    "sampling.max_completion_length",
    "sampling.collection.order",
    "sampling.collection.partial_rollouts",
    "reward.function",
    "reward.correct",
    "reward.incorrect",
    "reward.overlong_buffer_tokens",
    "reward.special_tokens",
    "replay.preset",
    "replay.composition",
    "replay.max_age_steps",
    "replay.drop_zero_variance",
    "replay.shadow",
)
"""Keys that decide which groups of a journal a step takes, how each of them ends, and the rewards
that they were given."""


@dataclass(slots=True)
class StartingPoint:
    """Where a run begins: its first step, or `checkpoint`. With `is_new` the folder gets a run;
    else it has one. `notices` are for the user."""

    checkpoint: Path | None
    is_new: bool = True
    state: RunState = field(default_factory=RunState)
    notices: list[str] = field(default_factory=list)


def find_start(recipe: Recipe, run_dir: RunDirectory, comm: Comm, resume: bool) -> StartingPoint:
    """Where the run would begin in its folder, which stays as it is. Raises for a folder or a
    checkpoint in which it cannot. Collective."""
    start = run_on_main(comm, lambda: _look(recipe, run_dir, resume)) or StartingPoint(None)
    start.checkpoint = _seen_by_all(start.checkpoint, run_dir.checkpoints, comm)
    if start.checkpoint:
        start.state = read_state(start.checkpoint)
    return start


def _look(recipe: Recipe, run_dir: RunDirectory, resume: bool) -> StartingPoint:
    """Called on rank 0 only."""
    refuse_other_journal(recipe)
    refuse_secrets(recipe)
    if not resume or run_dir.only_opened:
        run_dir.refuse_occupied()
        run_dir.refuse_unwritable()
        notices = ["the run had not begun yet: it starts now"] if resume else []
        return StartingPoint(None, notices=notices)
    refuse_missing(run_dir.path)
    run_dir.refuse_in_use()
    own = read_recipe_file(run_dir.recipe_path)
    refuse_other_recipe(own, recipe, run_dir.path)
    checkpoint = find_checkpoint(run_dir.checkpoints)
    step = read_state(checkpoint).step if checkpoint else 0
    made = run_dir.check(step)
    refuse_fewer_steps(recipe.run.steps, step)
    refuse_other_updates(own, recipe, run_dir.path, step)
    notices = [f"the recipe changes from here on: {key}: {old!r} -> {new!r}"
               for key, old, new in differences(own, recipe)]  # fmt: skip
    if not checkpoint:
        notices.insert(0, "the run had no checkpoint yet: it starts again from its first step")
    elif made > step:
        notices.insert(0, f"steps {step + 1} to {made}, after the checkpoint, are made again")
    elif step == recipe.run.steps:
        notices.append(f"all {step} steps are made: a higher --set run.steps=… goes on from here")
    return StartingPoint(checkpoint, False, notices=notices)


def take_directory(
    recipe: Recipe, run_dir: RunDirectory, comm: Comm, start: StartingPoint, stack: ExitStack
) -> list[str]:
    """Create the directory of the run, or lock the one that `start` was found in, and open the logs
    of all ranks. Returns what the user should know of its file system, on rank 0. Collective;
    `stack` unlocks the directory."""
    stack.callback(run_dir.unlock)

    def take() -> list[str]:
        if start.is_new:
            run_dir.create(recipe)
        else:
            run_dir.lock()
            _refuse_moved(run_dir, start)
        attempt = run_dir.next_attempt()
        run_dir.open_log(attempt)
        run_dir.write_environment(attempt, environment_facts(comm.world_size))
        with named_if_unwritable(run_dir.checkpoints):
            return missing_at(run_dir.checkpoints)

    notices = run_on_main(comm, take) or []
    if start.checkpoint:
        start.checkpoint = run_dir.checkpoints / checkpoint_name(start.state.step)
    open_other_logs(run_dir, comm)
    return notices


def _refuse_moved(run_dir: RunDirectory, start: StartingPoint) -> None:
    """Raises OutputDirectoryError if another process wrote a checkpoint after `find_start`."""
    if newest_state(run_dir.checkpoints).step > start.state.step:
        raise OutputDirectoryError(
            f"{run_dir.path} has a newer checkpoint than when this process began: another one went "
            "on with the run meanwhile. Resume again"
        )


def refuse_other_recipe(own: Recipe, recipe: Recipe, run_dir: Path) -> None:
    """Raises RecipeError if `recipe` changes more of a run's `own` recipe than a resume may. The
    folder of a file may be another one: what matters in files is compared by digests."""
    refused = [
        f"{key} is {old!r} in the run, and {new!r} is asked for"
        for key, old, new in other_content(own, recipe)
        if not key.startswith(MAY_CHANGE) or key.startswith(CHANGE_WHAT_IS_SAMPLED)
    ]
    if refused:
        allowed = ", ".join(f"{key}*" if key.endswith(".") else key for key in MAY_CHANGE)
        raise RecipeError(
            f"--resume: the run in {run_dir} keeps its recipe: {'; '.join(refused)}. Leave these "
            f"keys as they were, or {new_run(run_dir)}. A resume may change {allowed} (but not "
            f"{', '.join(CHANGE_WHAT_IS_SAMPLED)}), and the folders of files"
        )


def refuse_other_prompts(before: str, now: str) -> None:
    """Raises DatasetError if the prompts have another digest `now` than `before`, at the
    checkpoint; an empty one is of none."""
    if before and before != now:
        raise DatasetError(
            "prompts.source: problems, answers or their order are others than at the checkpoint, "
            "and a run keeps its prompts: restore them, or start a new run from the checkpoint's "
            "model (--set model.path=…), whose optimizer and KL reference begin anew"
        )


def new_run(run_dir: Path) -> str:
    """What to do instead of a resume that is refused."""
    return (
        "start a new run from the model of the last checkpoint (--set model.path="
        f"{run_dir}/checkpoints/latest/model): its optimizer and KL reference begin anew"
    )


def refuse_fewer_steps(steps: int, done: int) -> None:
    """Raises RecipeError if the run has `done` more steps than the recipe's `steps`."""
    if steps < done:
        raise RecipeError(
            f"run.steps {steps}: the run has a checkpoint of step {done}, and a resume goes on "
            f"from there: set run.steps to {done} or more"
        )


def _seen_by_all(found: Path | None, checkpoints: Path, comm: Comm) -> Path | None:
    """Broadcast the checkpoint that rank 0 verified. Raises OutputDirectoryError on a rank that
    does not see it."""
    name = comm.broadcast(found.name if found else None)
    if name is None:
        return None
    checkpoint = checkpoints / name
    run_collectively(comm, lambda: _refuse_unseen(checkpoint))
    return checkpoint


def _refuse_unseen(path: Path) -> None:
    """Raises OutputDirectoryError if a file or folder that rank 0 has is not there."""
    if not path.exists():
        raise OutputDirectoryError(
            f"{path} is not there on {platform.node()}, though rank 0 sees it: --output-dir must "
            "be on a file system that all nodes share"
        )


def open_other_logs(run_dir: RunDirectory, comm: Comm) -> None:
    """Open the logs of ranks other than 0, next to rank 0's, which has the newest number. Raises
    OutputDirectoryError on a rank that does not see rank 0's."""
    attempt = comm.broadcast(run_dir.next_attempt() - 1 if comm.is_main else 0)

    def open_log() -> None:
        if not comm.is_main:
            _refuse_unseen(run_dir.log_path(attempt))
            run_dir.open_log(attempt, comm.rank)

    run_collectively(comm, open_log)


def go_back(recipe: Recipe, run_dir: RunDirectory, start: StartingPoint) -> None:
    """Remove what comes after the checkpoint, now that it is restored. Called on rank 0 only."""
    run_dir.go_back(recipe, start.state.step)
    if start.checkpoint:
        point_latest(start.checkpoint)
        remove_old(start.checkpoint, recipe.checkpoint.keep)


def refuse_other_journal(recipe: Recipe) -> None:
    """Raises RecipeError if the journal that `recipe` repeats is not there, or was recorded by
    other rules or rewards: groups would be trained on in other steps, twice, or not at all."""
    repeated = recipe.sampling.collection.replay_journal
    if repeated is None:
        return
    run = Path(repeated)
    if not any((run / JOURNAL_FOLDER).glob("segment_*")):
        raise RecipeError(
            f"sampling.collection.replay_journal {repeated!r}: {run / JOURNAL_FOLDER} has no "
            "segment_*.journal; the directory of an asynchronous run is expected"
        )
    if not (run / RECIPE_FILE).exists():
        return
    recorded = read_recipe_file(run / RECIPE_FILE)
    if changes := _changes(recorded, recipe, JOURNAL_RULES):
        raise RecipeError(
            f"the steps in {run / JOURNAL_FOLDER} are repeated by the rules and with the rewards "
            f"that they were recorded with, which the recipe changes: {'; '.join(changes)}. Leave "
            "these keys as they were"
        )


def refuse_other_updates(own: Recipe, recipe: Recipe, run_dir: Path, step: int) -> None:
    """Raises RecipeError if `recipe` changes the updates of steps that the journal in `run_dir` has
    after `step`, that of the checkpoint."""
    changes = _changes(own, recipe, CHANGE_UPDATES)
    if own.optimizer.schedule == recipe.optimizer.schedule == "constant":
        changes = [each for each in changes if not each.startswith("run.steps ")]
    if not changes or not (run_dir / JOURNAL_FOLDER).is_dir():
        return  # reading a journal takes time
    from grpo_replay.collection.journal import JournalRecords

    last = JournalRecords.of(run_dir / JOURNAL_FOLDER).steps
    if last > step:
        checkpoint = f"the checkpoint of step {step}" if step else "the start"
        raise RecipeError(
            f"{run_dir / JOURNAL_FOLDER} goes on to step {last}, and the steps after {checkpoint} "
            f"are repeated as they were recorded, which the recipe changes: {'; '.join(changes)}. "
            f"Resume without these changes, stop with Ctrl-C when step {last} is done, and make "
            f"them at the checkpoint that is then written; or {new_run(run_dir)}"
        )


def _changes(before: Recipe, now: Recipe, keys: tuple[str, ...]) -> list[str]:
    """Those of `keys` (and of what begins with them) that differ, with both values."""
    return [f"{key} {new!r}, was {old!r}" for key, old, new in other_content(before, now)
            if key.startswith(keys)]  # fmt: skip
