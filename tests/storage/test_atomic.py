"""What a power cut may not lose: every file, folder and name is flushed, in this order."""

import errno
import os
from pathlib import Path

import pytest
from slow_tests import slow_except
from small_runs.trained import Listener, small_recipe, train_small_run

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.evaluation.session import find_model
from grpo_replay.storage import atomic
from grpo_replay.storage.checkpoint import (
    RunState,
    begin_checkpoint,
    complete_checkpoint,
    missing_file_system_features,
    point_latest,
    temporary_folder,
)
from grpo_replay.training.checkpoint_writer import removed_if_unwritable
from grpo_replay.training.run import run_training


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


def test_a_checkpoint_flushes_the_files_of_its_steps_once(tmp_path, processes, events):
    """A step does not wait for the disk; what a checkpoint relies on is there before it."""
    run = train_small_run(
        tmp_path / "run", run={"steps": 2}, replay={"warmup_steps": 0},
        checkpoint={"every_steps": 1}, eval={"benchmarks": []},
    ).path  # fmt: skip
    for step in (1, 2):
        done = events.index(("rename", run / "checkpoints" / f"step_{step:06d}"))
        for folder in ("rollouts", "draws"):
            file = run / folder / f"step_{step:06d}.parquet"
            (flushed,) = (i for i, each in enumerate(events) if each == ("flush", file))
            assert events.index(("rename", file)) < flushed < done
            assert ("flush", file.with_name(file.name + ".tmp")) not in events
            assert ("flush", file.parent) in events[flushed:done]
        assert ("flush", run / "metrics.jsonl") in events[:done]


def test_a_failed_write_leaves_only_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    atomic.write_text_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic.write_text_whole(path, "\ud800")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    "number", slow_except([errno.ENOTSUP], [errno.ENOTSUP, errno.ENOSYS, errno.EPERM])
)
def test_a_file_system_without_links_permissions_and_flushing_loses_no_run(
    tmp_path, processes, monkeypatch, number
):
    """What it lacks is said before the first step; a resume goes on there as well."""

    def lacking(*_, **__):
        raise OSError(number, os.strerror(number))

    for name in ("symlink", "chmod", "fsync"):
        monkeypatch.setattr(os, name, lacking)
    sections = {
        "run": {"steps": 2},
        "checkpoint": {"every_steps": 1},
        "replay": {"warmup_steps": 0},
    }
    for resume in (False, True):
        listener = Listener()
        run_training(small_recipe(**sections), tmp_path / "run", resume, listener)
        said = [text for text in listener.at_start if "the file system of" in text]
        assert len(said) == 3, said
        assert "symbolic links" in said[0] and "permissions" in said[1] and "flush" in said[2]
        names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
        assert names == ["step_000001", "step_000002"]
        assert find_model(str(tmp_path / "run")).step == 2


def test_an_old_link_to_the_latest_checkpoint_does_not_stay_where_none_can_be_made(
    tmp_path, monkeypatch
):
    (tmp_path / "latest").symlink_to("step_000001")

    def lacking(*_, **__):
        raise OSError(errno.ENOTSUP, "no")

    monkeypatch.setattr(os, "symlink", lacking)
    point_latest(tmp_path / "step_000002")
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_renames_no_folders_is_refused_when_the_run_begins(
    tmp_path, monkeypatch
):
    def lacking(*_, **__):
        raise OSError(errno.ENOTSUP, "no")

    monkeypatch.setattr(os, "rename", lacking)
    with pytest.raises(OSError, match="no"):
        missing_file_system_features(tmp_path)


def test_a_flush_that_fails_is_no_flush_that_is_missing(tmp_path, monkeypatch):
    def fails(_):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="no"):
        atomic.write_text_whole(tmp_path / "a.txt", "text")


@pytest.mark.parametrize(
    "number, space, other",
    [(errno.ENOSPC, True, False), (errno.EDQUOT, True, False), (errno.EPERM, False, True),
     (errno.EROFS, False, True), (errno.EIO, False, True)],
)  # fmt: skip
def test_free_space_is_asked_for_only_where_there_is_none(tmp_path, number, space, other):
    error = OSError(number, os.strerror(number))
    with (
        pytest.raises(OutputDirectoryError) as raised,
        removed_if_unwritable(tmp_path / "checkpoint"),
    ):
        raise error
    with pytest.raises(OutputDirectoryError) as named, atomic.named_if_unwritable(tmp_path):
        raise error
    for text in (str(raised.value), str(named.value), atomic.describe_write_failure(error)):
        assert ("free " in text, "choose another" in text) == (space, other), text


def test_what_json_has_no_word_for_is_null_at_any_depth():
    nan, inf = float("nan"), float("inf")
    value = {"a": nan, "b": (inf, 1.0, [-inf, 3]), "c": None, "d": "nan"}
    found = atomic.json_values(value)
    assert found == {"a": None, "b": [None, 1.0, [None, 3]], "c": None, "d": "nan"}
