"""What a recipe may not change while it repeats steps of a journal.

A journal has the groups as they arrived: with their rewards, and sampled by policies of which
version v is the policy after the first v steps as they were recorded. A resume repeats the steps
that the journal has after the checkpoint; `sampling.collection.replay_journal` repeats all.
"""

from collections.abc import Iterable
from pathlib import Path

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import Recipe
from grpo_replay.storage.recipe_history import (
    differences,
    read_history,
    read_recipe_file,
    recipe_file,
)
from grpo_replay.training.reward_watch import changes_of_reward, reward_facts

NEW_RUN = "start a new run from the last checkpoint's model (--set model.path=…)"

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

CHANGE_NO_UPDATE = (
    "name",
    "batch.max_tokens_per_microbatch",
    "batch.packing",
    "checkpoint.every_steps",
    "checkpoint.keep",
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
`reward.` changes is told by `_reward_changes`."""


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
    changes = [
        f"{key} {new!r}, was {old!r}"
        for key, old, new in differences(read_recipe_file(recorded), recipe)
        if key in JOURNAL_RULES
    ]
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
    return [
        f"{key} {new!r}, was {old!r}"
        for key, old, new in differences(before, now)
        if not key.startswith(CHANGE_NO_UPDATE) and not (key == "run.steps" and is_constant)
    ]


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
