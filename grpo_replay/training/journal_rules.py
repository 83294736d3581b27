"""What a recipe may not change while it repeats steps of a journal.

A journal has the groups as they arrived: with their rewards, and sampled by policies of which
version v is the policy after the first v steps as they were recorded. A resume repeats the steps
that the journal has after the checkpoint; `sampling.collection.replay_journal` repeats all.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import Recipe
from grpo_replay.storage.recipe_history import (
    differences,
    read_history,
    read_recipe_file,
    recipe_file,
)
from grpo_replay.training.resuming import NEW_RUN
from grpo_replay.training.reward_watch import changes_of_reward, reward_facts

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
    if not recipe_file(run).exists():
        return
    if changes := _reward_changes(read_recipe_file(recipe_file(run)), recipe):
        raise RecipeError(
            f"the groups in {run / JOURNAL_FOLDER} have the rewards that they were given, which "
            f"the recipe changes: {'; '.join(changes)}. Leave these keys as they were"
        )


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
    of the checkpoint: updates and rewards of its steps, or rewards of groups that wait."""
    if not (run_dir / JOURNAL_FOLDER).is_dir():
        return
    history = read_history(run_dir)
    recorded = [history.at(step + 1), *(each for after, each in history.changed if after > step)]
    rewards = _unique(_reward_changes(before, recipe) for before in recorded)
    updates = _unique(_update_changes(before, recipe) for before in recorded)
    if not rewards and not updates:
        return  # reading a journal takes time
    rest = read_rest(recipe, run_dir)
    if rest.last_step > step:
        _refuse_steps(_unique([rewards, updates]), run_dir, step, rest.last_step)
    if rest.waiting_groups and rewards:
        _refuse_groups(rewards, recipe, run_dir, rest)


def _refuse_steps(changes: list[str], run_dir: Path, step: int, last: int) -> None:
    checkpoint = f"the checkpoint of step {step}" if step else "the start"
    raise RecipeError(
        f"{run_dir / JOURNAL_FOLDER} goes on to step {last}, and the steps after {checkpoint} are "
        f"repeated as they were recorded, which the recipe changes: {'; '.join(changes)}. Resume "
        f"without these changes, stop with Ctrl-C when step {last} is done, and make them at the "
        f"checkpoint that is then written; or {NEW_RUN}"
    )


def _refuse_groups(changes: list[str], recipe: Recipe, run_dir: Path, rest: "Rest") -> None:
    last, waiting = rest
    end = last + math.ceil(waiting / recipe.sampling.prompts_per_step)
    until = f"until the run has ended (run.steps {end} or more)"
    if recipe.replays and recipe.replay.stores_first:
        until = "and stop again with Ctrl-C: the next step takes all groups that wait"
    raise RecipeError(
        f"{run_dir / JOURNAL_FOLDER} has {waiting} groups that wait for step {last + 1} with the "
        f"rewards that they were given, which the recipe changes: {'; '.join(changes)}. Leave "
        f"these keys as they were {until}, or {NEW_RUN}"
    )


def notices_of_rest(recipe: Recipe, run_dir: Path, step: int) -> list[str]:
    """For a run that is resumed after `step` with another reward: a notice if the journal goes on,
    with rewards that were given before."""
    if not (run_dir / JOURNAL_FOLDER).is_dir():
        return []
    rest = read_rest(recipe, run_dir)
    steps = f"the steps up to {rest.last_step}" if rest.last_step > step else ""
    groups = f"{rest.waiting_groups} groups that wait" if rest.waiting_groups else ""
    if not steps and not groups:
        return []
    return [
        f"{' and '.join(filter(None, (steps, groups)))} come from {run_dir / JOURNAL_FOLDER}, with "
        "the rewards that they were given"
    ]


class Rest(NamedTuple):
    """The end of a journal: its last step, and the groups that wait for the next."""

    last_step: int
    waiting_groups: int


def read_rest(recipe: Recipe, run_dir: Path) -> Rest:
    """The end of the journal in `run_dir`, which is read whole. Raises JournalError."""
    # Loads the client of the collector.
    from grpo_replay.collection.arrivals import Arrivals
    from grpo_replay.collection.intake import arrival_rules
    from grpo_replay.collection.journal import read_journal
    from grpo_replay.collection.messages import Step

    arrivals, last = Arrivals(arrival_rules(recipe.sampling, recipe.replay)), 0
    for record in read_journal(run_dir / JOURNAL_FOLDER):
        if isinstance(record, Step):
            last = record.step
            arrivals.select(last)
        else:
            arrivals.take_in(record)
    return Rest(last, arrivals.ready(last + 1))


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
