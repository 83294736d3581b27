"""A run's directory belongs to one run at a time; the commit that a run records."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.recipe import load_recipe
from grpo_replay.storage import run_directory
from grpo_replay.storage.run_directory import RunDirectory, _AttemptLog, is_locked
from grpo_replay.storage.stored_recipe import read_recipe_file


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
                second.append_metrics({"step": 1})  # it was more than a start
                second.unlock()

    original = RunDirectory.refuse_occupied
    monkeypatch.setattr(RunDirectory, "refuse_occupied", refuse_occupied)
    with pytest.raises(OutputDirectoryError, match="already holds" if second_is_over else "in use"):
        first.create(load_recipe("tiny"))
    assert "steps: 500" in second.recipe_path.read_text()
    second.unlock()


@pytest.mark.parametrize("name", ["notes.txt", "checkpoints/x"])
def test_a_folder_with_anything_else_is_occupied(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(OutputDirectoryError, match=str(tmp_path)):
        RunDirectory(tmp_path).refuse_occupied()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_as_what_it_is(tmp_path, monkeypatch, number):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_directory.fcntl, "flock", flock)
    directory = RunDirectory(tmp_path / "run")
    with pytest.raises(OutputDirectoryError, match=rf"{os.strerror(number)}.*-o flock"):
        directory.create(load_recipe("tiny"))
    assert not is_locked(tmp_path / "run" / ".lock")  # a report reads the runs of such a disk
    directory.unlock()


def start_that_fails(path: Path) -> RunDirectory:
    directory = RunDirectory(path)
    directory.create(load_recipe("tiny"))
    directory.open_log(1).write_text("prompts: no such file")
    directory.write_environment(1, {})
    directory.unlock()
    return directory


def test_a_start_that_failed_leaves_the_folder_free_for_the_repaired_command(tmp_path):
    directory = start_that_fails(tmp_path / "run")
    kept = ["log/vllm-server-8300.log", "wandb_id", "notes.txt"]
    for name in kept:
        (directory.path / name).parent.mkdir(exist_ok=True)
        (directory.path / name).touch()
    directory.create(load_recipe("tiny", ["run.steps=7", "replay.warmup_steps=1"]))
    assert read_recipe_file(directory.recipe_path).run.steps == 7
    assert directory.next_attempt() == 2
    assert all((directory.path / name).exists() for name in kept)
    with pytest.raises(OutputDirectoryError, match=str(os.getpid())):
        RunDirectory(directory.path).create(load_recipe("tiny"))
    directory.unlock()


@pytest.mark.parametrize("name", ["models/x", "wandb_id"])
def test_what_a_start_leaves_is_somebodys_where_no_run_began(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(OutputDirectoryError, match=str(tmp_path)):
        RunDirectory(tmp_path).create(load_recipe("tiny"))
    assert (tmp_path / name).exists()


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "checkpoints/.tmp-step_000001/x", "eval/step_000000.json",
     "journal/segment_000001.journal"],
)  # fmt: skip
def test_a_run_with_a_step_or_a_checkpoint_is_not_free(tmp_path, name):
    directory = start_that_fails(tmp_path / "run")
    (directory.path / name).parent.mkdir(exist_ok=True, parents=True)
    (directory.path / name).touch()
    with pytest.raises(OutputDirectoryError, match=str(directory.path)):
        directory.refuse_occupied()


KILLED_WHILE_IT_BEGINS = """
import os, signal, sys
from pathlib import Path
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.run_directory import RunDirectory

recipe = load_recipe("tiny")
for moment in range(1, 100):
    child = os.fork()
    if child == 0:
        left = [moment]
        def count(event, args):
            changes = event in ("os.mkdir", "os.rename")
            if changes or (event == "open" and str(args[1])[0] in "aw"):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        RunDirectory(Path(sys.argv[1]) / str(moment)).create(recipe)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


def test_sigkill_at_any_moment_of_the_opening_blocks_nothing(tmp_path):
    """One child is killed just before its first change of the disk, the next before its second, …,
    until one survives."""
    words = [sys.executable, "-c", KILLED_WHILE_IT_BEGINS, str(tmp_path)]
    subprocess.run(words, check=True)
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    unborn = [folder for folder in folders if not (folder / "recipe.yaml").exists()]
    assert len(unborn) >= 7 and folders[-1] not in unborn
    for folder in unborn:
        directory = RunDirectory(folder)
        assert directory.holds_only_opening_files
        directory.create(load_recipe("tiny"))
        directory.unlock()


def test_the_commit_is_that_of_this_checkout_or_none(tmp_path, monkeypatch):
    """None for a package in a virtual environment that lies in the user's own checkout."""
    checkout = Path(__file__).parents[2]
    if (checkout / ".git").exists():
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=checkout, text=True)
        assert run_directory._git_commit() == head.strip()
    commit = "git -c user.name=a -c user.email=b commit -q --allow-empty -m x"
    for command in ("git init -q .", commit):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    (tmp_path / "run_directory.py").touch()  # there, and not committed
    monkeypatch.setattr(run_directory, "__file__", str(tmp_path / "run_directory.py"))
    assert run_directory._git_commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert run_directory._git_commit() is None


def test_half_a_character_is_no_trouble_for_the_log(tmp_path, capsys):
    log = RunDirectory(tmp_path / "run").open_log(1)
    (handler,) = (each for each in logging.getLogger().handlers if type(each) is _AttemptLog)
    # Not by a logger: pytest's workers could not send the record to each other.
    handler.handle(logging.makeLogRecord({"msg": "a reward function printed: \ud83d"}))
    assert log.read_text().endswith("printed: \\ud83d\n")
    assert capsys.readouterr().err == ""


def test_a_log_on_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    directory = RunDirectory(tmp_path / "run")
    directory.open_log(1)
    (handler,) = (each for each in logging.getLogger().handlers if type(each) is _AttemptLog)

    def full(_: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(handler, "stream", SimpleNamespace(write=full, flush=lambda: None))
    for number in range(3):
        logging.getLogger("grpo_replay").warning("record %d", number)
    monkeypatch.undo()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"the log {tmp_path}/run/log/attempt_001.log cannot be written: ")
    assert "No space left" in lines[0]
