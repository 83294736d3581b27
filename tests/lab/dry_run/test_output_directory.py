"""The dry run looks at the folder that --output-dir names, as the run does before it begins."""

import json

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.errors import RecipeError
from grpo_replay.lab.dry_run import start_checks
from grpo_replay.training import journal_rules


@pytest.fixture(autouse=True)
def no_verifier(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(start_checks, "check_rewards", lambda *_: None)


def report_of(*words: object) -> dict:
    done = CliRunner().invoke(app, ["train", *map(str, words), "--dry-run", "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == report["exit_code"]
    return report


def test_an_occupied_folder_stops_a_new_run(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    report = report_of("tiny", "--output-dir", tmp_path)
    (problem,) = report["problems"]
    assert f"output directory {tmp_path} already holds another run" in problem
    assert report["exit_code"] == 3 and report["fits"] is False
    assert report_of("tiny", "--output-dir", tmp_path / "new")["problems"] == []
    planned = report_of("tiny", "--output-dir", tmp_path, "--gpu-memory-gib", 80)
    assert planned["problems"] == [], "the run is for another machine"
    assert any("on this machine: output directory" in each for each in planned["unchecked"])


def test_a_folder_that_may_not_be_written_stops_the_run(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(start_checks.os, "access", lambda path, _: asked.append(path))
    (problem,) = report_of("tiny", "--output-dir", tmp_path / "a/b")["problems"]
    assert f"{tmp_path}/a/b: {tmp_path} cannot be written" in problem
    assert asked == [tmp_path]


@pytest.mark.slow
def test_a_run_goes_on_in_its_own_folder_with_its_own_reward(ours_run):
    own = "--resume", "--output-dir", ours_run.path
    assert report_of(*own)["problems"] == []
    report = report_of(*own, "--set", "reward.correct=0.5")
    (problem,) = report["problems"]
    assert "the reward is another than before step 13: reward.correct 0.5, was 1.0" in problem
    assert report["exit_code"] == 2
    emptied = report_of(
        *own, "--set", "reward.correct=0.5", "--set", "checkpoint.restore_buffer=false"
    )
    assert emptied["problems"] == []
    assert any("the reward is another than" in each for each in emptied["assumptions"])


def test_a_run_that_goes_on_has_the_lengths_and_the_speed_that_it_measured(ours_run, tmp_path):
    own = report_of("--resume", "--output-dir", ours_run.path)
    named = report_of("--resume", "--output-dir", ours_run.path, "--from-run", ours_run.path)
    for part in ("step", "time", "assumptions"):
        assert own[part] == named[part]
    assert any("kept (measured in the run)" in each for each in own["assumptions"])
    assert own["time"]["hours"] is not None
    (tmp_path / "log").mkdir()  # it died while it began
    unborn = report_of("tiny", "--resume", "--output-dir", tmp_path)
    assert unborn["exit_code"] == 0 and unborn["time"]["hours"] is None


def test_what_a_journal_holds_decides_which_changes_a_resume_takes(ours_run, monkeypatch):
    asked = []

    def refuse(recipe, folder, step):
        asked.append((folder, step))
        raise RecipeError("the steps after the checkpoint are repeated")

    monkeypatch.setattr(journal_rules, "refuse_other_steps", refuse)
    report = report_of("--resume", "--output-dir", ours_run.path)
    assert report["problems"] == ["the steps after the checkpoint are repeated"]
    assert asked == [(ours_run.path, 12)]


def test_a_journal_to_repeat_must_be_there(tmp_path):
    key = "sampling.collection.replay_journal"
    words = f"{key}={tmp_path}/typo", "eval.benchmarks=[]"
    report = report_of("tiny-async", *(each for word in words for each in ("--set", word)))
    assert any(f"{key} '{tmp_path}/typo'" in problem for problem in report["problems"])
