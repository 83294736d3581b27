"""Checkpoints: complete or refused, newest first, never the last good one lost."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from grpo_replay.errors import CheckpointError
from grpo_replay.storage.checkpoint import (
    MANIFEST,
    MODEL_CARDS,
    RunState,
    begin_checkpoint,
    complete_checkpoint,
    find_checkpoint,
    leftovers,
    list_checkpoints,
    read_state,
    remove_old,
    temporary_folder,
    verify_checkpoint,
)


def make_checkpoint(checkpoints, step, keep=3):
    temporary = temporary_folder(checkpoints, step)
    begin_checkpoint(temporary)
    (temporary / "model").mkdir()
    (temporary / "model" / "weights").write_bytes(b"weights of step %d" % step)
    return complete_checkpoint(temporary, RunState(step=step, policy_version=step), keep)


def test_a_complete_checkpoint_verifies_and_is_latest(tmp_path):
    made = make_checkpoint(tmp_path, 7)
    assert made == tmp_path / "step_000007"
    verify_checkpoint(made)
    assert (tmp_path / "latest").resolve() == made
    assert read_state(made) == RunState(step=7, policy_version=7)
    assert find_checkpoint(tmp_path) == made


def test_whoever_may_read_the_state_may_read_the_weights(tmp_path):
    temporary = temporary_folder(tmp_path, 7)
    begin_checkpoint(temporary)
    weights = temporary / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.touch(mode=0o600)
    made = complete_checkpoint(temporary, RunState(step=7, policy_version=7), keep=2)
    modes = {path.stat().st_mode for path in made.rglob("*") if path.is_file()}
    assert len(modes) == 1


def test_only_the_newest_are_kept_whatever_the_number_of_digits(tmp_path):
    for step in (999_998, 999_999, 1_000_000):
        make_checkpoint(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_999999", "step_1000000"]
    assert (tmp_path / "latest").resolve().name == "step_1000000"


def test_what_is_half_removed_is_no_checkpoint(tmp_path, monkeypatch):
    for step in (5, 10, 15):
        make_checkpoint(tmp_path, step)

    def killed(folder: Path) -> None:
        (folder / "model" / "weights").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        remove_old(tmp_path / "step_000015", keep=2)
    kept = list_checkpoints(tmp_path)
    assert [path.name for path in kept] == ["step_000010", "step_000015"]
    for path in kept:
        verify_checkpoint(path)
    assert leftovers(tmp_path) == [tmp_path / ".tmp-step_000005"]


def test_one_that_somebody_reads_over_nfs_is_left_for_the_next_resume(tmp_path, monkeypatch):
    for step in (5, 10):
        make_checkpoint(tmp_path, step)

    def busy(folder: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        remove_old(tmp_path / "step_000010", keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000010"]
    assert leftovers(tmp_path) == [tmp_path / ".tmp-step_000005"]


def test_a_resume_may_remove_the_old_ones_too(tmp_path):
    for step in (5, 10, 15, 20):
        make_checkpoint(tmp_path, step, keep=4)
    remove_old(tmp_path / "step_000015", keep=2)
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step_000010", "step_000015", "step_000020"]


def test_only_what_was_completed_is_a_checkpoint(tmp_path):
    assert find_checkpoint(tmp_path) is None
    made = make_checkpoint(tmp_path, 5)
    begin_checkpoint(temporary_folder(tmp_path, 10))
    (temporary_folder(tmp_path, 10) / "half").write_text("half")
    assert find_checkpoint(tmp_path) == made


def flip_a_byte(checkpoint):
    path = checkpoint / "model" / "weights"
    path.write_bytes(path.read_bytes()[:-1] + b"X")


def cut_short(checkpoint):
    path = checkpoint / "model" / "weights"
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_file(checkpoint):
    (checkpoint / "model" / "weights").unlink()


def lose_the_manifest(checkpoint):
    (checkpoint / MANIFEST).unlink()


def cut_the_manifest(checkpoint):
    path = checkpoint / MANIFEST
    path.write_text(path.read_text()[:20])


def say_another_step(checkpoint):
    other = make_checkpoint(checkpoint.parent / "elsewhere", 7)
    shutil.rmtree(checkpoint)
    shutil.copytree(other, checkpoint)


DAMAGES = [flip_a_byte, cut_short, lose_a_file, lose_the_manifest, cut_the_manifest,
           say_another_step]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(tmp_path, damage):
    make_checkpoint(tmp_path, 5)
    damage(make_checkpoint(tmp_path, 10))
    with pytest.raises(CheckpointError, match=r"step_000010.*step_000005"):
        find_checkpoint(tmp_path)


def test_the_offered_checkpoint_is_complete(tmp_path):
    make_checkpoint(tmp_path, 5)
    lose_a_file(make_checkpoint(tmp_path, 10))
    flip_a_byte(make_checkpoint(tmp_path, 15))
    with pytest.raises(CheckpointError, match=r"step_000015.*step_000005") as seen:
        find_checkpoint(tmp_path)
    assert "step_000010" not in str(seen.value)


@pytest.mark.parametrize(
    "change", [{"format_version": 99}, {"surprise": 1}], ids=["newer format", "unknown key"]
)
def test_a_state_of_another_version_is_refused(tmp_path, change):
    made = make_checkpoint(tmp_path, 5)
    state = json.loads((made / "state.json").read_text()) | change
    (made / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"state.json: "):
        read_state(made)


def test_the_model_card_may_be_written_again(tmp_path):
    temporary = temporary_folder(tmp_path, 5)
    (temporary / "model").mkdir(parents=True)
    (temporary / MODEL_CARDS[0]).write_text("without results")
    made = complete_checkpoint(temporary, RunState(step=5), keep=2)
    assert list(json.loads((made / MANIFEST).read_text())["files"]) == ["state.json"]
    (made / MODEL_CARDS[0]).write_text("with results")
    (made / f"{MODEL_CARDS[0]}.tmp").write_text("a kill left this")
    verify_checkpoint(made)


def test_folders_with_other_names_are_no_checkpoint(tmp_path):
    made = make_checkpoint(tmp_path, 5)
    backup = shutil.copytree(made, tmp_path / "step_000009.bak")
    assert list_checkpoints(tmp_path) == [made]
    make_checkpoint(tmp_path, 6, keep=2)
    assert backup.is_dir()


def test_a_newer_folder_does_not_cost_the_checkpoint_just_written(tmp_path):
    for step in (500, 600):
        make_checkpoint(tmp_path, step)
    made = make_checkpoint(tmp_path, 100, keep=2)
    assert made in list_checkpoints(tmp_path)


def test_latest_as_a_folder_becomes_a_link_again(tmp_path):
    first = make_checkpoint(tmp_path, 5)
    (tmp_path / "latest").unlink()
    shutil.copytree(first, tmp_path / "latest")  # what tools that follow links leave
    assert find_checkpoint(tmp_path).name == "step_000005"
    made = make_checkpoint(tmp_path, 10)
    assert (tmp_path / "latest").is_symlink() and (tmp_path / "latest").resolve() == made
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"latest", "step_000005", "step_000010"}
