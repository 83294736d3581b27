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


def test_reward_functions_are_called_and_answers_graded(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def fails(completion, answer, row):\n    return row['no such field']\n"
        "def shifted(text, gold):\n    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    (problem,) = report_of("tiny", "reward.function=my_rewards:no_such_score")["problems"]
    assert "reward.function" in problem and "'no_such_score'" in problem
    (problem,) = report_of("tiny", "reward.function=my_rewards.py:fails")["problems"]
    assert "all 4 rows" in problem and "KeyError: 'no such field'" in problem
    (problem,) = report_of("tiny", "eval.reward=my_rewards:shifted")["problems"]
    assert "shifted(text, gold)" in problem
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"problem": "1+1", "answer": "w " * 300}) + "\n"
    )
    rows = ["prompts.source=rows.jsonl", "prompts.id_field=null", "reward.function=minerva"]
    (problem,) = report_of("tiny", *rows)["problems"]
    assert "minerva can read none of 1" in problem
