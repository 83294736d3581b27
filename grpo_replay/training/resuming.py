"""Where a run begins: in a new folder, or at the last checkpoint of a run that is resumed; and what
the recipe of a resume may not change.

Nothing that a resume will remove is removed before everything that it needs is restored:
`find_start` only looks, `take_directory` makes or locks the folder, `go_back` comes last.

A journal has the groups as they arrived: with their rewards, and sampled by policies of which
version v is the policy after the first v steps as they were recorded. A resume repeats the steps
that the journal has after the checkpoint; `sampling.collection.replay_journal` repeats all.
"""

import platform
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import run_collectively, run_on_main
from grpo_replay.errors import OutputDirectoryError, RecipeError
from grpo_replay.recipe import Recipe
from grpo_replay.replay.snapshot import count_stored
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
from grpo_replay.storage.recipe_history import (
    differences,
    read_history,
    read_recipe_file,
    recipe_changes,
    recipe_file,
    refuse_secrets,
)
from grpo_replay.storage.run_directory import (
    JOURNAL_FOLDER,
    RunDirectory,
    environment_facts,
    refuse_missing,
)
from grpo_replay.training.reward_watch import changes_of_reward, reward_facts

NEW_RUN = "start a new run from the last checkpoint's model (--set model.path=…)"

JOURNAL_RULES = (
    "sampling.prompts_per_step",
    "sampling.group_size",
    "sampling.collection.order",
    "sampling.collection.partial_rollouts",
    "replay.preset",
    "replay.composition",
    "replay.max_age_steps",
    "replay.drop_zero_variance",
    "replay.shadow",
)
"""Keys that decide which groups of the journal a step takes, and how each of them ends."""

CHANGE_NO_UPDATE = (
    "name",
    "batch.max_tokens_per_microbatch",
    "batch.packing",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "checkpoint.merged",
    "engine.",
    "eval.",
    "model.attn_implementation",
    "model.compile",
    "model.gradient_checkpointing",
    "reward.",
    "sampling.collection.max_ahead_steps",
    "sampling.logprob_gap_limit",
    "sampling.max_batch_rollouts",
    "sampling.servers.",
    "sampling.vllm.",
    "tracking.",
)
"""Keys, and beginnings of keys, that change the updates of recorded steps by rounding at most. What
`reward.` changes is reported by `_reward_changes`."""


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
    refuse_other_rules(recipe, run_dir.path)
    refuse_other_unit(recipe.draws_per_step, run_dir.path)
    checkpoint = find_checkpoint(run_dir.checkpoints)
    refuse_other_advantages(recipe, run_dir.path, checkpoint)
    step = read_state(checkpoint).step if checkpoint else 0
    made = run_dir.check(step)
    refuse_fewer_steps(recipe.run.steps, step)
    refuse_other_steps(recipe, run_dir.path, step)
    notices = [f"the recipe changes from here on: {change}"
               for change in recipe_changes(run_dir.path, recipe)]  # fmt: skip
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


def refuse_other_unit(draws_per_step: int, run_dir: Path) -> None:
    """Raises RecipeError if the steps so far made another number of draws than `draws_per_step`:
    ages and last uses count draws."""
    recorded = recipe_file(run_dir)
    if not recorded.exists():
        return
    before = read_recipe_file(recorded).draws_per_step
    if before != draws_per_step:
        raise RecipeError(
            f"draws in a step of {run_dir}: {before} until now, {draws_per_step} by this "
            "recipe (batch.updates_per_step, replay.ratio, replay.preset): ages count draws. Leave "
            f"these keys as they were, or {NEW_RUN}"
        )


def refuse_other_advantages(recipe: Recipe, run_dir: Path, checkpoint: Path | None) -> None:
    """Raises RecipeError if the buffer of the checkpoint is kept, also through steps without
    replay, and the advantages of its rollouts are other ones than those that `recipe` gives."""
    if checkpoint is None or not recipe.checkpoint.restore_buffer:
        return
    if not count_stored(checkpoint / "buffer.parquet"):
        return
    before = read_recipe_file(recipe_file(run_dir, read_state(checkpoint).step))
    if changes := _changes(before, recipe, lambda key: key.startswith("advantage.")):
        raise RecipeError(
            f"the rollouts in the buffer of {run_dir} have advantages by other rules, which the "
            f"recipe changes: {'; '.join(changes)}. Leave these keys as they were, empty the "
            f"buffer (--set checkpoint.restore_buffer=false), or {NEW_RUN}"
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
    name = comm.broadcast_json(found.name if found else None)
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
    attempt = comm.broadcast_json(run_dir.next_attempt() - 1 if comm.is_main else None)

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
    other rules or rewards."""
    repeated = recipe.sampling.collection.replay_journal
    if repeated is None:
        return
    run = Path(repeated)
    if not any((run / JOURNAL_FOLDER).glob("segment_*")):
        raise RecipeError(
            f"sampling.collection.replay_journal {repeated!r}: {run / JOURNAL_FOLDER} has no "
            "segment_*.journal; the directory of an asynchronous run is expected"
        )
    refuse_other_rules(recipe, run)
    if recipe_file(run).exists():
        _refuse_other_rewards([read_recipe_file(recipe_file(run))], recipe, run)


def refuse_other_rules(recipe: Recipe, run_dir: Path) -> None:
    """Raises RecipeError if `recipe` cannot repeat the steps of the journal in `run_dir`: groups
    would be trained on in other steps, twice, or not at all."""
    recorded = recipe_file(run_dir)
    if not (run_dir / JOURNAL_FOLDER).is_dir() or not recorded.exists():
        return
    changes = _changes(read_recipe_file(recorded), recipe, JOURNAL_RULES.__contains__)
    if changes:
        raise RecipeError(
            f"the steps in {run_dir / JOURNAL_FOLDER} are repeated by the rules that they were "
            f"recorded under, which the recipe changes: {'; '.join(changes)}. Leave these keys as "
            f"they were, or {NEW_RUN}"
        )


def refuse_other_steps(recipe: Recipe, run_dir: Path, step: int) -> None:
    """Raises RecipeError if `recipe` changes what the journal in `run_dir` has after `step`, that
    of the checkpoint: updates of its steps, or rewards."""
    if not (run_dir / JOURNAL_FOLDER).is_dir():
        return
    history = read_history(run_dir)
    recorded = [history.at(step + 1), *(each for after, each in history.changed if after > step)]
    _refuse_other_rewards(recorded, recipe, run_dir)
    changes = _unique(_update_changes(before, recipe) for before in recorded)
    if not changes:
        return  # reading a journal takes time
    from grpo_replay.collection.journal import JournalRecords

    last = JournalRecords.of(run_dir / JOURNAL_FOLDER).steps
    if last > step:
        checkpoint = f"the checkpoint of step {step}" if step else "the start"
        raise RecipeError(
            f"{run_dir / JOURNAL_FOLDER} goes on to step {last}, and the steps after {checkpoint} "
            f"are repeated as they were recorded, which the recipe changes: {'; '.join(changes)}. "
            f"Resume without these changes, stop with Ctrl-C when step {last} is done, and make "
            f"them at the checkpoint that is then written; or {NEW_RUN}"
        )


def _refuse_other_rewards(recorded: Iterable[Recipe], recipe: Recipe, run_dir: Path) -> None:
    """Raises RecipeError if `recipe` gives other rewards than the recipes under which the groups of
    the journal in `run_dir` arrived: they keep theirs, those that wait for a step as well."""
    changes = _unique(_reward_changes(before, recipe) for before in recorded)
    if changes:
        raise RecipeError(
            f"the groups in {run_dir / JOURNAL_FOLDER} have the rewards that they were given, "
            f"which the recipe changes: {'; '.join(changes)}. Leave these keys as they were, or "
            f"{NEW_RUN}"
        )


def _update_changes(before: Recipe, now: Recipe) -> list[str]:
    """The keys of `now` that make updates other than those of `before`."""
    is_constant = now.optimizer.schedule == "constant"  # others fall to 0 at run.steps
    return _changes(
        before,
        now,
        lambda key: (
            not key.startswith(CHANGE_NO_UPDATE) and not (key == "run.steps" and is_constant)
        ),
    )


def _changes(before: Recipe, now: Recipe, concerns: Callable[[str], bool]) -> list[str]:
    """The keys that differ and `concerns`, with both values."""
    return [f"{key} {new!r}, was {old!r}" for key, old, new in differences(before, now)
            if concerns(key)]  # fmt: skip


def _reward_changes(before: Recipe, now: Recipe) -> list[str]:
    """The keys of `now` that give other rewards than those of `before`. What a function of the
    user's does is not looked at."""
    changes = changes_of_reward(reward_facts(before.reward, {}), reward_facts(now.reward, {}))
    old, new = (each.sampling.max_completion_length for each in (before, now))
    if now.reward.overlong_buffer_tokens is not None and old != new:
        changes.append(f"sampling.max_completion_length {new!r}, was {old!r}")
    return changes


def _unique(lists: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(text for texts in lists for text in texts))
