"""The dry run looks at the folder that --output-dir names, as the run does before it begins."""

import json

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.storage import run_directory


@pytest.fixture(autouse=True)
def no_verifier(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


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


def test_a_folder_that_may_not_be_written_stops_the_run(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(run_directory.os, "access", lambda path, _: asked.append(path))
    (problem,) = report_of("tiny", "--output-dir", tmp_path / "a/b")["problems"]
    assert f"{tmp_path}/a/b: {tmp_path} cannot be written" in problem
    assert asked == [tmp_path]


def test_a_journal_to_repeat_must_be_there(tmp_path):
    key = "sampling.collection.replay_journal"
    words = f"{key}={tmp_path}/typo", "eval.benchmarks=[]"
    report = report_of("tiny-async", *(each for word in words for each in ("--set", word)))
    assert any(f"{key} '{tmp_path}/typo'" in problem for problem in report["problems"])
