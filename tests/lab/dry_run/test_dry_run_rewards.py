"""The dry run calls the reward functions and grades reference answers, in worker processes."""

import json

import pytest

from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.recipe import load_recipe


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def report_of(name: str, *overrides: str) -> dict:
    return dry_run(load_recipe(name, list(overrides)))


def test_the_tiny_recipe_is_checked_in_full_and_fits_here():
    report = report_of("tiny")
    assert report["fits"] is True and report["problems"] == [] and report["unchecked"] == []
    assert report["hardware"]["device"] == "cpu"


@pytest.mark.parametrize("function, reason", [
    ("no_such_module_here:score", "No module named 'no_such_module_here'"),
    ("my_rewards:no_such_score", "has no attribute 'no_such_score'"),
])  # fmt: skip
def test_a_reward_function_that_cannot_be_found_is_a_problem(
    tmp_path, monkeypatch, function, reason
):
    (tmp_path / "my_rewards.py").write_text("def score(completion, answer, row):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    (problem,) = report_of("tiny", f"reward.function={function}")["problems"]
    assert f"reward.function '{function}' cannot be loaded" in problem and reason in problem
    assert report_of("tiny", "reward.function=my_rewards:score")["problems"] == []


def test_reward_functions_are_called_and_answers_graded(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def fails(completion, answer, row):\n    return row['no such field']\n"
        "def shifted(text, gold):\n    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    (problem,) = report_of("tiny", "reward.function=my_rewards.py:fails")["problems"]
    assert "failed on all 4 rows" in problem and "KeyError: 'no such field'" in problem
    (problem,) = report_of("tiny", "eval.reward=my_rewards:shifted")["problems"]
    assert "shifted(text, gold) cannot be called: a reward function is f(completion" in problem
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"problem": "1+1", "answer": "w " * 300}) + "\n"
    )
    rows = ["prompts.source=rows.jsonl", "prompts.id_field=null", "reward.function=minerva"]
    (problem,) = report_of("tiny", *rows)["problems"]
    assert "minerva can read none of 1 reference answers checked" in problem


@pytest.mark.slow
def test_the_function_that_grades_evaluations_is_called_on_their_problems(tmp_path, monkeypatch):
    (tmp_path / "graders.py").write_text(
        "def graded(completion, answer):\n    raise ValueError('no grade for ' + answer)\n"
        "def half(completion, answer):\n    return 0.5\n"
    )
    monkeypatch.chdir(tmp_path)
    report = report_of("tiny", "eval.reward=graders.py:graded")
    (problem,) = report["problems"]
    assert "graders.py:graded failed on all 4 rows that it was tried on" in problem
    assert "ValueError: no grade for" in problem and report["exit_code"] == 2
    report = report_of("tiny", "eval.reward=graders.py:half")
    assert report["problems"] == []
    assert sum("half gives 0.5 at most" in each for each in report["assumptions"]) == 1


def test_how_evaluations_are_graded_is_said_as_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def score(completion, answer):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    said = report_of("tiny", "reward.function=own.py:score")["assumptions"]
    assert any("evaluations are graded by math_verify" in each for each in said)
