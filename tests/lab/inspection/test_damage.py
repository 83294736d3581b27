"""A run that lacks a part never looks healthy."""

import shutil

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.lab.inspection.compute import find_gaps, summarise
from grpo_replay.lab.inspection.source import open_source


@pytest.fixture
def copy(runs, tmp_path):
    return shutil.copytree(runs["ours"], tmp_path / "run")


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def gaps(copy) -> list[str]:
    return list(find_gaps(open_source(copy)))


def test_a_whole_run_has_no_gaps(runs):
    for preset in ("ours", "fifo", "grpo"):
        assert gaps(runs[preset]) == []


def test_a_missing_file_is_the_first_warning_of_the_screen_and_of_other_commands(copy):
    assert "warning" not in call("inspect-buffer", copy, "--show", 3).stderr
    (copy / "draws/step_000012.parquet").unlink()
    assert "draws/" in summarise(open_source(copy)).warnings[0]
    for words in (
        ("inspect-buffer", copy, "--what-if", "ratio=1"),
        ("inspect-buffer", copy, "--show", 3),
        ("plan", "--from-run", copy),
    ):
        shown = call(*words)
        assert shown.exit_code == 0
        assert shown.stderr.startswith("warning: draws/ lacks the file of step 12:")
    (copy / "draws/step_000010.parquet").unlink()
    (said,) = gaps(copy)
    assert "step 10" in said and "1 more" in said


def test_a_plan_does_not_assume_a_mu_that_the_run_should_have(copy):
    (copy / "metrics.jsonl").unlink()
    refused = call("plan", "--from-run", copy)
    assert refused.exit_code == 3 and "--mu" in refused.stderr
    assert call("plan", "--mu", "4", "--from-run", copy).exit_code == 0
