"""The recipe of a run at a resume: its own, changed by explicit --set only."""

import pytest

from grpo_replay.errors import RecipeError, UsageError
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.stored_recipe import (
    recipe_to_resume,
    write_recipe,
)

STARTED_WITH = ["run.steps=30", "replay.preset=grpo"]


@pytest.fixture
def run(tmp_path):
    """A run of `train tiny` with two overrides."""
    write_recipe(tmp_path / "recipe.yaml", load_recipe("tiny", STARTED_WITH))
    return tmp_path


def test_a_resume_uses_the_runs_own_recipe_and_set_changes_nothing_else(run):
    assert recipe_to_resume(run, None, []) == load_recipe("tiny", STARTED_WITH)
    assert recipe_to_resume(run, "tiny", STARTED_WITH) == load_recipe("tiny", STARTED_WITH)
    resumed = recipe_to_resume(run, None, ["run.steps=40"])
    assert resumed == load_recipe("tiny", ["run.steps=40", "replay.preset=grpo"])
    resumed = recipe_to_resume(run, None, ["replay.preset=uniform"])
    assert (resumed.replay.unit, resumed.replay.composition) == ("query", "pool")


def test_a_recipe_that_differs_is_refused_with_the_difference_and_the_remedy(run):
    with pytest.raises(UsageError, match=r"run\.steps is 30 .*240 .*--set run\.steps=240"):
        recipe_to_resume(run, "tiny", ["replay.preset=grpo"])


def test_a_recipe_that_is_no_longer_valid_is_named(run):
    (run / "recipe.yaml").write_text("nonsense: 1\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml.*nonsense"):
        recipe_to_resume(run, None, [])


def test_relative_paths_after_set_start_at_the_working_directory(run, monkeypatch):
    folder = run / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = ["eval.benchmarks=[test.jsonl]", "reward.function=x/r.py:f"]
    resumed = recipe_to_resume(run, None, words)
    assert resumed.eval.benchmarks == [f"{folder}/test.jsonl"]
    write_recipe(run / "recipe.yaml", resumed)
    assert recipe_to_resume(run, None, []) == resumed
    assert resumed.reward.main_function == f"{folder}/x/r.py:f"
    assert recipe_to_resume(run, "tiny", [*STARTED_WITH, *words]) == resumed
