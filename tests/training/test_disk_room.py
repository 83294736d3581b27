"""The room that checkpoints need on the disk."""

import pytest
from small_runs.trained import train_small_run

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.recipe import CheckpointSection
from grpo_replay.storage.checkpoint import (
    checkpoint_bytes_on_disk,
    list_checkpoints,
    temporary_folder,
)
from grpo_replay.training import disk_room
from grpo_replay.training.disk_room import CheckpointSize, checkpoint_size, notices_of_room


def say_free(monkeypatch, size: int) -> None:
    """Make the disk have so much room."""
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: size)


def test_the_expected_size_is_that_of_a_real_checkpoint(tmp_path, processes):
    run = train_small_run(
        tmp_path / "run", run={"steps": 1}, engine={"zero_stage": 3}, model={"dtype": "bfloat16"},
        replay={"preset": "grpo", "drop_zero_variance": False},  # an update, whatever is sampled
    )  # fmt: skip
    parameters = sum(tensor.numel() for tensor in run.weights().values())
    expected, _ = checkpoint_size(parameters, 2, 3)
    (checkpoint,) = list_checkpoints(run.path / "checkpoints")
    found = checkpoint_bytes_on_disk(checkpoint)
    assert expected < found < expected + 0.6 * parameters  # the tokenizer and DeepSpeed's scripts


def test_with_adapters_only_those_are_trained_and_the_whole_model_is_merged():
    """Of ten bf16 adapters below ZeRO-3: twice the parameters, two moments, a master each."""
    adapters = 10 * (2 * 2 + 8 + 4)
    assert checkpoint_size(1000, 2, 1, adapters=10) == CheckpointSize(adapters, merged=4 * 1000)
    assert checkpoint_size(10, 2, 1) == CheckpointSize(adapters, merged=0)


def test_the_start_says_that_not_all_will_fit_and_refuses_if_none_does(tmp_path, monkeypatch):
    section = CheckpointSection(keep=3)

    def notices(free: int, **changes: str) -> list[str]:
        say_free(monkeypatch, free)
        size, chosen = CheckpointSize(10, merged=5), section.model_copy(update=changes)
        return notices_of_room(tmp_path, chosen, size)

    assert notices(45) == [] == notices(60, merged="all")
    (notice,) = notices(44)
    assert "4 more checkpoints" in notice and "checkpoint.keep 3" in notice
    assert len(notices(59, merged="all")) == 1
    with pytest.raises(OutputDirectoryError):
        notices(14)


def test_what_a_resume_removes_counts_as_free(tmp_path, monkeypatch):
    """A kill while the checkpoint after the last that fits was written left half of it."""
    half = temporary_folder(tmp_path, 4) / "engine" / "shard.pt"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"12345678")
    say_free(monkeypatch, 2)
    section = CheckpointSection(keep=2)
    (notice,) = notices_of_room(tmp_path, section, CheckpointSize(10))
    assert "3 more checkpoints" in notice
    half.unlink()
    with pytest.raises(OutputDirectoryError, match="a checkpoint of this run needs"):
        notices_of_room(tmp_path, section, CheckpointSize(10))
