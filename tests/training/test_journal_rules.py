"""What a recipe may not change while it repeats steps of a journal: by hand."""

from pathlib import Path

import pytest
from collected import group
from small_runs.asynchronous import async_recipe

from grpo_replay.collection.journal import Journal
from grpo_replay.collection.messages import Step
from grpo_replay.errors import RecipeError
from grpo_replay.recipe import Recipe
from grpo_replay.storage.stored_recipe import RECIPE_FILE, write_recipe
from grpo_replay.training import resuming

PROMPTS = 2


def recipe(*layers: dict) -> Recipe:
    sampling = {"prompts_per_step": PROMPTS, "group_size": 2}
    return async_recipe(["http://a:1"], {"sampling": sampling}, *layers)


def recorded(folder: Path, *layers: dict, steps: int = 0) -> Path:
    """A run's folder with its recipe, and a journal of so many steps."""
    write_recipe(folder / RECIPE_FILE, recipe(*layers))
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


@pytest.mark.parametrize("left", ["nothing", "synchronous"])
def test_a_journal_to_repeat_must_be_there(tmp_path, left):
    if left == "synchronous":
        write_recipe(tmp_path / "run" / RECIPE_FILE, recipe())
    with pytest.raises(RecipeError, match=r"replay_journal '.*/run'"):
        resuming.refuse_other_journal(repeating(tmp_path / "run"))


OTHERS = [
    ({"sampling": {"prompts_per_step": 7}}, "sampling.prompts_per_step 7, was 2"),
    ({"replay": {"max_age_steps": 5}}, "replay.max_age_steps 5, was 6"),
    ({"reward": {"correct": 2.0}}, "reward.correct 2.0, was 1.0"),
    ({"reward": {"function": "minerva"}}, "reward.function 'minerva', was 'coll"),
    ({"sampling": {"max_completion_length": 8}}, "sampling.max_completion_length 8"),
]


@pytest.mark.parametrize(("change", "named"), OTHERS)
def test_a_journal_is_repeated_by_its_own_rules_and_with_its_own_rewards(tmp_path, change, named):
    run = recorded(tmp_path / "run", steps=1)
    resuming.refuse_other_journal(repeating(run))
    with pytest.raises(RecipeError) as refused:
        resuming.refuse_other_journal(repeating(run, change))
    assert named in str(refused.value)


def test_the_same_rewards_by_another_path_or_with_other_limits_are_no_others(tmp_path):
    run = recorded(tmp_path / "run", {"reward": {"function": "/a/score.py:f"}})
    reward = {"function": "/b/score.py:f", "workers": 3, "time_limit_seconds": 1.0}
    other = {"reward": reward, "optimizer": {"learning_rate": 0.5}}
    resuming.refuse_other_journal(repeating(run, other))


UPDATES = [
    ({"optimizer": {"learning_rate": 0.5}}, "optimizer.learning_rate 0.5, was 0.001"),
    ({"model": {"dtype": "bfloat16"}}, "model.dtype 'bfloat16', was 'float32'"),
    ({"checkpoint": {"restore_buffer": False}}, "checkpoint.restore_buffer False, was True"),
]


@pytest.mark.parametrize(("change", "named"), UPDATES)
def test_steps_after_the_checkpoint_are_repeated_with_their_own_updates(tmp_path, change, named):
    run = recorded(tmp_path / "run", steps=5)
    for step in (4, 3, 0):
        with pytest.raises(RecipeError, match="step 5") as refused:
            resuming.refuse_other_updates(recipe(), recipe(change), run, step)
        assert f"changes: {named}. Resume" in str(refused.value)
    resuming.refuse_other_updates(recipe(), recipe(change), run, 5)
    resuming.refuse_other_updates(recipe(), recipe(change), tmp_path, 3)  # without a journal
    longer = recipe({"run": {"steps": 9}, "eval": {"seed": 3}, "reward": {"workers": 2}})
    resuming.refuse_other_updates(recipe(), longer, run, 3)


def test_the_last_step_is_part_of_a_schedule(tmp_path):
    falling = {"optimizer": {"schedule": "linear"}}
    run, longer = recorded(tmp_path / "run", falling, steps=5), {"run": {"steps": 9}}
    with pytest.raises(RecipeError, match=r"changes: run\.steps 9, was 6"):
        resuming.refuse_other_updates(recipe(falling), recipe(falling, longer), run, 3)
