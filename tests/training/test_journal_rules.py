"""What a recipe may not change while it repeats steps of a journal: by hand."""

from pathlib import Path

import pytest
from collected import group
from small_runs.asynchronous import async_recipe
from small_runs.trained import small_recipe

from grpo_replay.collection.journal import Journal
from grpo_replay.collection.messages import Step
from grpo_replay.errors import RecipeError
from grpo_replay.recipe import Recipe
from grpo_replay.storage.recipe_history import change_file, recipe_file, write_recipe
from grpo_replay.training import resuming

PROMPTS = 2


def recipe(*layers: dict) -> Recipe:
    sampling = {"prompts_per_step": PROMPTS, "group_size": 2}
    return async_recipe(["http://a:1"], {"sampling": sampling}, *layers)


def recorded(folder: Path, *layers: dict, steps: int = 0) -> Path:
    """A run's folder with its recipe, and a journal of so many steps."""
    write_recipe(recipe_file(folder), recipe(*layers))
    journal, _ = Journal.open(folder / "journal")
    for place in range(steps * PROMPTS):
        journal.append(group((0, place), version=place // PROMPTS))
        step, left = divmod(place + 1, PROMPTS)
        if not left:
            journal.append(Step(step, place + 1, 0, 0, 0, 0))
    journal.close()
    return folder


def repeating(run: Path, *layers: dict) -> Recipe:
    return recipe({"sampling": {"collection": {"replay_journal": str(run)}}}, *layers)


def test_a_journal_is_repeated_by_the_rules_that_it_was_recorded_under(tmp_path):
    others = recipe({"sampling": {"prompts_per_step": 7}, "replay": {"max_age_steps": 5}})
    resuming.refuse_other_rules(others, tmp_path)  # nothing was recorded
    run = recorded(tmp_path / "run")
    resuming.refuse_other_rules(recipe({"run": {"steps": 9}}), run)
    write_recipe(recipe_file(tmp_path / "synchronous"), small_recipe())
    resuming.refuse_other_rules(others, tmp_path / "synchronous")
    named = r"sampling\.prompts_per_step 7, was 2; replay\.max_age_steps 5, was 6"
    with pytest.raises(RecipeError, match=named):
        resuming.refuse_other_rules(others, run)


@pytest.mark.parametrize("left", ["nothing", "synchronous"])
def test_a_journal_to_repeat_must_be_there(tmp_path, left):
    if left == "synchronous":
        write_recipe(recipe_file(tmp_path / "run"), recipe())
    with pytest.raises(RecipeError, match=r"replay_journal '.*/run'"):
        resuming.refuse_other_journal(repeating(tmp_path / "run"))


PENALISED = {"reward": {"overlong_buffer_tokens": 4}}
REWARDS = [
    ({}, {"reward": {"correct": 2.0}}, "reward.correct 2.0, was 1.0"),
    ({}, {"reward": {"function": "minerva"}}, "reward.function 1 · minerva, was 1 · coll"),
    (PENALISED, {"sampling": {"max_completion_length": 8}}, "sampling.max_completion_length 8"),
]


@pytest.mark.parametrize(("before", "change", "named"), REWARDS)
def test_a_journal_is_repeated_with_its_own_rewards(tmp_path, before, change, named):
    run = recorded(tmp_path / "run", before, steps=1)
    resuming.refuse_other_journal(repeating(run, before))
    with pytest.raises(RecipeError) as refused:
        resuming.refuse_other_journal(repeating(run, before, change))
    assert named in str(refused.value)
    with pytest.raises(RecipeError) as refused:
        resuming.refuse_other_steps(recipe(before, change), run, 1)
    assert named in str(refused.value)


def test_the_same_rewards_by_another_path_or_with_other_limits_are_no_others(tmp_path):
    run = recorded(tmp_path / "run", {"reward": {"function": "/a/score.py:f"}})
    reward = {"function": "/b/score.py:f", "workers": 3, "time_limit_seconds": 1.0}
    other = {"reward": reward, "optimizer": {"learning_rate": 0.5}}
    resuming.refuse_other_journal(repeating(run, other))


UPDATES = [
    ({"optimizer": {"learning_rate": 0.5}}, "optimizer.learning_rate 0.5, was 0.001"),
    ({"replay": {"ratio": 1.0}}, "replay.ratio 1.0, was 0.5"),
    ({"checkpoint": {"restore_buffer": False}}, "checkpoint.restore_buffer False, was True"),
]


@pytest.mark.parametrize(("change", "named"), UPDATES)
def test_steps_after_the_checkpoint_are_repeated_with_their_own_updates(tmp_path, change, named):
    run = recorded(tmp_path / "run", steps=5)
    for step in (4, 3, 0):
        with pytest.raises(RecipeError, match="step 5") as refused:
            resuming.refuse_other_steps(recipe(change), run, step)
        assert f"changes: {named}. Resume" in str(refused.value)
    resuming.refuse_other_steps(recipe(change), run, 5)


def test_what_changes_no_update_may_change_while_steps_are_repeated(tmp_path):
    run = recorded(tmp_path / "run", steps=5)
    change = {
        "name": "other", "run": {"steps": 9}, "checkpoint": {"every_steps": 2, "keep": 5},
        "eval": {"seed": 3}, "tracking": {"report_to": ["tensorboard"]},
        "batch": {"max_tokens_per_microbatch": 300}, "engine": {"threads_per_process": 2},
        "sampling": {
            "servers": {"urls": ["http://b:2"]}, "vllm": {"enforce_eager": True},
            "logprob_gap_limit": 2.0, "collection": {"max_ahead_steps": 3},
        },
        "reward": {"workers": 2, "max_failed_share": 1.0},
    }  # fmt: skip
    resuming.refuse_other_steps(recipe(change), run, 3)
    resuming.refuse_other_steps(recipe(change), tmp_path, 3)  # a run without a journal


def test_the_last_step_is_part_of_a_schedule(tmp_path):
    falling = {"optimizer": {"schedule": "linear"}}
    run = recorded(tmp_path / "run", falling, steps=5)
    with pytest.raises(RecipeError, match=r"changes: run\.steps 9, was 6"):
        resuming.refuse_other_steps(recipe(falling, {"run": {"steps": 9}}), run, 3)


def test_steps_are_compared_with_the_recipe_that_they_were_recorded_under(tmp_path):
    """The learning rate changed after step 4, whose checkpoint is lost."""
    run, other = recorded(tmp_path / "run", steps=6), {"optimizer": {"learning_rate": 0.5}}
    write_recipe(change_file(run, 4), recipe(other))
    for changed, named in ((other, "0.5, was 0.001"), ({}, "0.001, was 0.5")):
        with pytest.raises(RecipeError, match=rf"changes: optimizer\.learning_rate {named}"):
            resuming.refuse_other_steps(recipe(changed), run, 3)
    resuming.refuse_other_steps(recipe(other), run, 4)
