"""Every wrong input of the table gets one clear line and the exit code of its kind."""

import shlex
from pathlib import Path

import pytest
from hostile_inputs import Hostile, read_table
from typer.testing import CliRunner

from grpo_replay.cli.app import app

TABLE = read_table()


def cases(heavy: bool) -> list:
    return [pytest.param(each, id=each.what) for each in TABLE if each.heavy == heavy]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def check(case: Hostile, run: Path) -> None:
    case.prepare(run)
    result = CliRunner().invoke(app, shlex.split(case.command))
    told = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.output
    assert len(told) == 1, result.output
    assert result.exit_code == case.code, told[0]
    assert case.is_answered_by(told[0]), told[0]
    assert result.stdout == ""


@pytest.mark.parametrize("case", cases(heavy=False))
def test_a_wrong_input_is_answered(case, runs):
    check(case, runs["ours"])


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(heavy=True))
def test_a_wrong_input_that_needs_torch_is_answered(case, runs):
    check(case, runs["ours"])


def test_the_entries_of_the_table_differ_and_have_every_command_and_code():
    assert len({case.what for case in TABLE}) == len(TABLE)
    assert {case.code for case in TABLE} == {2, 3, 4}
    commands = {case.command.split()[0] for case in TABLE}
    assert commands == {"train", "eval", "inspect-buffer", "aes", "plan", "sweep", "report"}


def test_nothing_is_written_outside_the_folder_by_a_name(tmp_path):
    result = CliRunner().invoke(app, ["train", "tiny", "--set", "name=../../evil"])
    assert result.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert not list(Path().iterdir())
