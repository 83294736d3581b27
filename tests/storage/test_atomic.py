"""What a power cut may not lose: every file, folder and name is flushed, in this order."""

import errno
import os
from pathlib import Path

import pytest
from small_runs.trained import train_small_run

from grpo_replay.storage import atomic
from grpo_replay.storage.checkpoint import (
    RunState,
    begin_checkpoint,
    complete_checkpoint,
    temporary_folder,
)


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


def test_file_systems_that_cannot_flush_folders_are_supported(tmp_path, monkeypatch):
    real, number = os.fsync, errno.EINVAL

    def fsync(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(number, "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    atomic.write_text_whole(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").read_text() == "text"
    number = errno.EIO
    with pytest.raises(OSError, match="no"):
        atomic.write_text_whole(tmp_path / "a.txt", "text")


def test_what_json_has_no_word_for_is_null_at_any_depth():
    nan, inf = float("nan"), float("inf")
    value = {"a": nan, "b": (inf, 1.0, [-inf, 3]), "c": None, "d": "nan"}
    found = atomic.json_values(value)
    assert found == {"a": None, "b": [None, 1.0, [None, 3]], "c": None, "d": "nan"}
