"""A run's directory belongs to one run at a time; the commit that a run records."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.run_directory import RunDirectory, _git_commit


@pytest.mark.parametrize("second_is_over", [False, True])
def test_of_two_runs_that_start_at_once_one_is_refused_and_changes_nothing(
    tmp_path, monkeypatch, second_is_over
):
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    checks = []

    def refuse_occupied(self):
        original(self)
        checks.append(self)
        if len(checks) == 1:  # the first has looked, and not yet written
            second.create(load_recipe("tiny", ["run.steps=500"]))
            if second_is_over:
                second.unlock()

    original = RunDirectory.refuse_occupied
    monkeypatch.setattr(RunDirectory, "refuse_occupied", refuse_occupied)
    with pytest.raises(OutputDirectoryError, match="already holds" if second_is_over else "in use"):
        first.create(load_recipe("tiny"))
    assert "steps: 500" in second.recipe_path.read_text()
    second.unlock()


def test_a_directory_with_nothing_but_a_lock_is_free(tmp_path):
    (tmp_path / ".lock").write_text("1\n")
    directory = RunDirectory(tmp_path)
    directory.create(load_recipe("tiny"))
    directory.unlock()


def test_a_directory_that_cannot_be_locked_is_said_to_be_unwritable(tmp_path):
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(OutputDirectoryError, match=r"run cannot be written.*--output-dir"):
        RunDirectory(tmp_path / "run").lock()


def test_the_commit_is_that_of_this_checkout_or_none(tmp_path, monkeypatch):
    checkout = Path(__file__).parents[2]
    if (checkout / ".git").exists():
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
        ).stdout.strip()
        assert _git_commit() == head
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert _git_commit() is None


def test_a_package_inside_somebodys_repository_has_no_commit(tmp_path):
    """As in a virtual environment that lies in the user's own checkout."""
    commands = ("git init -q .", "git -c user.name=a -c user.email=b commit -q --allow-empty -m x")
    for command in commands:
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "run_directory.py").touch()  # there, and not committed
    program = (
        "import grpo_replay.storage.run_directory as r, pathlib\n"
        "r.__file__ = str(pathlib.Path('package/run_directory.py').absolute())\n"
        "print(r._git_commit())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "None"
