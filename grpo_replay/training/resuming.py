"""Finds where a run starts, in a new folder or at the last checkpoint, and refuses what a resume
may not change in the recipe.

A resume removes files only after everything that it needs is restored: `find_start` changes
nothing, `take_directory` creates or locks the folder, and `go_back` removes later files at the end.

A journal records the groups as they arrived, with rewards and policy versions; version v is the
policy after the first v recorded steps. A resume repeats the recorded steps after the checkpoint;
`sampling.collection.replay_journal` repeats all steps.
"""

import platform
from collections.abc import Mapping
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
    missing_file_system_features,
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
    content_differences,
    differences,
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
"""Keys, and sections (with a dot at the end), that a resume may change."""

CHANGE_SAMPLING = (
    "sampling.vllm.dtype",
    "sampling.vllm.hf_overrides",
    "sampling.vllm.quantization",
    "sampling.vllm.kv_cache_dtype",
)
"""Exceptions to `MAY_CHANGE`: they change what is sampled."""

CHANGE_UPDATES = (
    "model.dtype",
    "optimizer.",
    "run.steps",
    "checkpoint.restore_buffer",
)
"""Keys that a resume may change, but not while it repeats steps from a journal."""

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
"""Keys that decide which recorded groups a step takes, how they are used, and their rewards."""


@dataclass(slots=True)
class StartingPoint:
    """Where a run starts: at `checkpoint`, or at its first step if that is None. `is_new` says that
    the folder has no run yet; `notices` are messages for the user."""

    checkpoint: Path | None
    is_new: bool = True
    state: RunState = field(default_factory=RunState)
    notices: list[str] = field(default_factory=list)


def find_start(recipe: Recipe, run_dir: RunDirectory, comm: Comm, resume: bool) -> StartingPoint:
    """Find where the run would start, and change nothing in its folder. Raises
    OutputDirectoryError, CheckpointError or RecipeError if it cannot start there. Collective."""
    start = run_on_main(
        comm, lambda: _find_start_on_main(recipe, run_dir, resume)
    ) or StartingPoint(None)
    start.checkpoint = _visible_on_all_ranks(start.checkpoint, run_dir.checkpoints, comm)
    if start.checkpoint:
        start.state = read_state(start.checkpoint)
    return start


def _find_start_on_main(recipe: Recipe, run_dir: RunDirectory, resume: bool) -> StartingPoint:
    """Rank 0's part of `find_start`: a new start or the newest checkpoint, after all refusals.
    Notices tell what a resume changes or repeats."""
    refuse_other_journal(recipe)
    refuse_secrets(recipe)
    if not resume or run_dir.holds_only_opening_files:
        run_dir.refuse_occupied()
        run_dir.refuse_unwritable()
        notices = ["the run had not begun yet: it starts now"] if resume else []
        return StartingPoint(None, notices=notices)
    refuse_missing(run_dir.path)
    run_dir.refuse_in_use()
    stored = read_recipe_file(run_dir.recipe_path)
    refuse_other_recipe(stored, recipe, run_dir.path)
    checkpoint = find_checkpoint(run_dir.checkpoints)
    step = read_state(checkpoint).step if checkpoint else 0
    steps_made = run_dir.check(step)
    refuse_fewer_steps(recipe.run.steps, step)
    refuse_other_updates(stored, recipe, run_dir.path, step)
    notices = [f"the recipe changes from here on: {key}: {old!r} -> {new!r}"
               for key, old, new in differences(stored, recipe)]  # fmt: skip
    if not checkpoint:
        notices.insert(0, "the run had no checkpoint yet: it starts again from its first step")
    elif steps_made > step:
        notices.insert(0, f"steps {step + 1} to {steps_made}, after the checkpoint, are made again")
    elif step == recipe.run.steps:
        notices.append(
            f"all {step} steps are made: to go on, set a higher number with --set run.steps=…"
        )
    return StartingPoint(checkpoint, is_new=False, notices=notices)


def take_directory(
    recipe: Recipe, run_dir: RunDirectory, comm: Comm, start: StartingPoint, stack: ExitStack
) -> list[str]:
    """Create the directory of a new run, or lock that of a resumed one, and open the logs of all
    ranks. Returns notices about the file system (rank 0); sets the checkpoint's path in `start`.
    `stack` unlocks it. Collective."""
    stack.callback(run_dir.unlock)

    def take() -> list[str]:
        """Rank 0's part: folder, lock, log and environment file; returns the notices."""
        if start.is_new:
            run_dir.create(recipe)
        else:
            run_dir.lock()
            _refuse_newer_checkpoint(run_dir, start)
        attempt = run_dir.next_attempt()
        run_dir.open_log(attempt)
        run_dir.write_environment(attempt, environment_facts(comm.world_size))
        with named_if_unwritable(run_dir.checkpoints):
            return missing_file_system_features(run_dir.checkpoints)

    notices = run_on_main(comm, take) or []
    if start.checkpoint:
        start.checkpoint = run_dir.checkpoints / checkpoint_name(start.state.step)
    open_follower_logs(run_dir, comm)
    return notices


def _refuse_newer_checkpoint(run_dir: RunDirectory, start: StartingPoint) -> None:
    """Raises OutputDirectoryError if another process wrote a checkpoint after `find_start`."""
    if newest_state(run_dir.checkpoints).step > start.state.step:
        raise OutputDirectoryError(
            f"{run_dir.path} has a newer checkpoint than when this process began: another one went "
            "on with the run meanwhile. Resume again"
        )


def refuse_other_recipe(stored: Recipe, recipe: Recipe, run_dir: Path) -> None:
    """Raises RecipeError if `recipe` changes more of a run's `stored` recipe than a resume may.
    Folders of files may differ: the contents that matter are compared by digests."""
    refused = [
        f"{key} is {old!r} in the run, and {new!r} is asked for"
        for key, old, new in content_differences(stored, recipe)
        if not key.startswith(MAY_CHANGE) or key.startswith(CHANGE_SAMPLING)
    ]
    if refused:
        allowed = ", ".join(f"{key}*" if key.endswith(".") else key for key in MAY_CHANGE)
        raise RecipeError(
            f"--resume: the run in {run_dir} keeps its recipe: {'; '.join(refused)}. Leave these "
            f"keys as they were, or {new_run_advice(run_dir)}. A resume may change {allowed} (but "
            f"not {', '.join(CHANGE_SAMPLING)}), and the folders of files"
        )


def refuse_other_prompts(before: str, now: str, run_dir: Path) -> None:
    """Raises DatasetError if the prompts' digest `now` differs from that at the checkpoint,
    `before`; an empty digest means that there were no prompts yet."""
    if before and before != now:
        raise DatasetError(
            "prompts.source: problems, answers or their order are others than at the checkpoint, "
            f"and a run keeps its prompts: restore them, or {new_run_advice(run_dir)}"
        )


def refuse_edited_rewards(
    before: Mapping[str, str | None], now: Mapping[str, str | None], run_dir: Path
) -> None:
    """Raises RecipeError if the digest of a function's source file `now` differs from that at the
    checkpoint, `before` (`reward_watch.reward_digests`)."""
    edited = [name for name in before if now.get(name, before[name]) != before[name]]
    if edited:
        raise RecipeError(
            f"reward.function: the source file of {', '.join(edited)} was edited after the "
            "checkpoint, and a run keeps its reward: restore the file, or "
            f"{new_run_advice(run_dir)}"
        )


def new_run_advice(run_dir: Path) -> str:
    """Advice for a refused resume: how to start a new run instead."""
    return (
        "start a new run from the model of the last checkpoint (--set model.path="
        f"{run_dir}/checkpoints/latest/model): its optimizer and KL reference begin anew"
    )


def refuse_fewer_steps(steps: int, done: int) -> None:
    """Raises RecipeError if the run has `done` steps, more than the recipe's `steps`."""
    if steps < done:
        raise RecipeError(
            f"run.steps {steps}: the run has a checkpoint of step {done}, and a resume goes on "
            f"from there: set run.steps to {done} or more"
        )


def _visible_on_all_ranks(verified: Path | None, checkpoints: Path, comm: Comm) -> Path | None:
    """Broadcast rank 0's checkpoint. Raises OutputDirectoryError on a rank that does not see it."""
    name = comm.broadcast(verified.name if verified else None)
    if name is None:
        return None
    checkpoint = checkpoints / name
    run_collectively(comm, lambda: _refuse_not_shared(checkpoint))
    return checkpoint


def _refuse_not_shared(path: Path) -> None:
    """Raises OutputDirectoryError if this rank does not see a file or folder of rank 0."""
    if not path.exists():
        raise OutputDirectoryError(
            f"{path} is missing on {platform.node()}, though rank 0 sees it: --output-dir must "
            "be on a file system that all nodes share"
        )


def open_follower_logs(run_dir: RunDirectory, comm: Comm) -> None:
    """Open the logs of ranks other than 0, beside rank 0's log of this attempt. Raises
    OutputDirectoryError on a rank that does not see rank 0's."""
    attempt = comm.broadcast(run_dir.next_attempt() - 1 if comm.is_main else 0)

    def open_log() -> None:
        if not comm.is_main:
            _refuse_not_shared(run_dir.log_path(attempt))
            run_dir.open_log(attempt, comm.rank)

    run_collectively(comm, open_log)


def go_back(recipe: Recipe, run_dir: RunDirectory, start: StartingPoint) -> None:
    """Remove the files of steps after the restored checkpoint. Called on rank 0 only."""
    run_dir.go_back(recipe, start.state.step)
    if start.checkpoint:
        point_latest(start.checkpoint)
        remove_old(start.checkpoint, recipe.checkpoint.keep)


def refuse_other_journal(recipe: Recipe) -> None:
    """Raises RecipeError if the journal that `recipe` replays is missing, or was recorded with
    other rules or rewards: groups would be trained on in other steps, twice, or never."""
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


def refuse_other_updates(stored: Recipe, recipe: Recipe, run_dir: Path, step: int) -> None:
    """Raises RecipeError if `recipe` would change updates of steps that the journal in `run_dir`
    has recorded after the checkpoint of `step`."""
    changes = _changes(stored, recipe, CHANGE_UPDATES)
    if stored.optimizer.schedule == recipe.optimizer.schedule == "constant":
        changes = [change for change in changes if not change.startswith("run.steps ")]
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
            f"them at the checkpoint that is then written; or {new_run_advice(run_dir)}"
        )


def _changes(before: Recipe, now: Recipe, keys: tuple[str, ...]) -> list[str]:
    """Describe the differences in recipe keys that begin with one of `keys`, with both values."""
    return [f"{key} {new!r}, was {old!r}" for key, old, new in content_differences(before, now)
            if key.startswith(keys)]  # fmt: skip
