"""What a power cut may not lose: every file, folder and name is flushed, in this order."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.recipe import load_recipe
from grpo_replay.storage import atomic
from grpo_replay.storage.checkpoint import (
    RunState,
    begin_checkpoint,
    complete_checkpoint,
    temporary_folder,
)
from grpo_replay.storage.run_directory import RunDirectory, _git_commit


@pytest.fixture
def events(monkeypatch):
    """("flush" or "rename", path) as they happen."""
    seen = []

    def fsync(descriptor):
        seen.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def spy(original):
        def rename(source, target, **options):
            original(source, target, **options)
            seen.append(("rename", Path(target)))

        return rename

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", spy(os.rename))
    monkeypatch.setattr(os, "replace", spy(os.replace))
    return seen


def test_a_file_is_flushed_before_and_its_folder_after_it_gets_its_name(tmp_path, events):
    atomic.write_json_whole(tmp_path / "a.json", {"x": 1})
    assert events == [
        ("flush", tmp_path / "a.json.tmp"),
        ("rename", tmp_path / "a.json"),
        ("flush", tmp_path),
    ]


def test_a_checkpoint_is_on_disk_before_it_is_named_and_before_latest_names_it(tmp_path, events):
    temporary = temporary_folder(tmp_path, 3)
    begin_checkpoint(temporary)
    (temporary / "model" / "deep").mkdir(parents=True)
    (temporary / "model" / "deep" / "weights").write_text("w")
    final = complete_checkpoint(temporary, RunState(step=3), keep=2)
    named = events.index(("rename", final))
    for path in ("model/deep/weights", "model/deep", "model", "state.json"):
        assert ("flush", temporary / path) in events[:named]
    manifest = events.index(("rename", temporary / "manifest.json"))
    assert ("flush", temporary) in events[manifest:named]
    assert events[named:] == [
        ("rename", final),
        ("flush", tmp_path),
        ("rename", tmp_path / "latest"),
        ("flush", tmp_path),
    ]


def test_a_failed_write_leaves_only_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    atomic.write_text_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic.write_text_whole(path, "\ud800")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_file_systems_that_cannot_flush_folders_are_supported(tmp_path, monkeypatch, number):
    real = os.fsync

    def fsync(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(number, "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EINVAL:
        atomic.write_text_whole(tmp_path / "a.txt", "text")
        assert (tmp_path / "a.txt").read_text() == "text"
    else:
        with pytest.raises(OSError, match="no"):
            atomic.write_text_whole(tmp_path / "a.txt", "text")


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


def test_a_directory_with_only_a_lock_file_is_free(tmp_path):
    (tmp_path / ".lock").write_text("1\n")
    directory = RunDirectory(tmp_path)
    directory.create(load_recipe("tiny"))
    directory.unlock()


def test_a_directory_that_cannot_be_locked_is_reported_as_unwritable(tmp_path):
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


def test_a_package_installed_inside_another_repository_has_no_commit(tmp_path):
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
