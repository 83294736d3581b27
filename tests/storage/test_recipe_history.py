"""The recipes of a run over its resumes: kept, not overwritten, changed by explicit --set only."""

import pytest

from grpo_replay.errors import RecipeError, UsageError
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.recipe_history import (
    read_history,
    recipe_file,
    recipe_to_resume,
    record_recipe,
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


def test_a_change_is_kept_beside_the_first_recipe_with_its_step(run):
    before = (run / "recipe.yaml").read_bytes()
    changes = record_recipe(run, recipe_to_resume(run, None, ["run.steps=40"]), 6)
    assert changes == ["run.steps: 30 -> 40"]
    assert (run / "recipe.yaml").read_bytes() == before
    assert [path.name for path in (run / "recipes").iterdir()] == ["step_000006.yaml"]
    history = read_history(run)
    assert [history.at(step).run.steps for step in (1, 6, 7, 40)] == [30, 30, 40, 40]
    assert history.latest.run.steps == 40
    assert recipe_file(run, 6).name == "recipe.yaml"
    assert recipe_file(run, 7) == recipe_file(run) == run / "recipes" / "step_000006.yaml"
    assert recipe_to_resume(run, None, []).run.steps == 40


def test_a_resume_without_changes_leaves_no_file(run):
    assert record_recipe(run, recipe_to_resume(run, None, []), 6) == []
    assert not (run / "recipes").exists()


def test_a_resume_before_a_change_takes_the_change_along(run):
    record_recipe(run, recipe_to_resume(run, None, ["run.steps=40"]), 6)
    assert record_recipe(run, recipe_to_resume(run, None, []), 3) == []
    assert [path.name for path in (run / "recipes").iterdir()] == ["step_000003.yaml"]
    assert [read_history(run).at(step).run.steps for step in (3, 4)] == [30, 40]


def test_two_changes_are_both_kept(run):
    record_recipe(run, recipe_to_resume(run, None, ["run.steps=40"]), 6)
    record_recipe(run, recipe_to_resume(run, None, ["replay.ratio=0.2"]), 9)
    history = read_history(run)
    assert [history.at(step).run.steps for step in (6, 7, 10)] == [30, 40, 40]
    assert [history.at(step).replay.ratio for step in (9, 10)] == [1.0, 0.2]


def test_relative_paths_after_set_start_at_the_working_directory(run, monkeypatch):
    folder = run / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = ["eval.benchmarks=[test.jsonl]", "reward.function=x/r.py:f"]
    resumed = recipe_to_resume(run, None, words)
    assert resumed.eval.benchmarks == [f"{folder}/test.jsonl"]
    record_recipe(run, resumed, 6)
    assert recipe_to_resume(run, None, []) == resumed
    assert resumed.reward.main_function == f"{folder}/x/r.py:f"
    assert recipe_to_resume(run, "tiny", [*STARTED_WITH, *words]) == resumed
