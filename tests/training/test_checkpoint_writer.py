"""A checkpoint: the room that it needs, who hashes what, and a full disk that loses nothing."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_runs.trained import train_small_run

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.recipe import CheckpointSection
from grpo_replay.storage.checkpoint import (
    CheckpointSize,
    checkpoint_size,
    find_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)
from grpo_replay.training import checkpoint_writer

SHORT = {"run": {"steps": 2}, "checkpoint": {"every_steps": 1}, "replay": {"preset": "grpo"}}


def say_free(monkeypatch, size: int) -> None:
    """Make the disk have so much room."""
    monkeypatch.setattr(checkpoint_writer, "free_bytes", lambda _: size)


def test_the_expected_size_is_that_of_a_real_checkpoint(tmp_path, processes):
    run = train_small_run(
        tmp_path / "run", run={"steps": 1}, engine={"zero_stage": 3}, model={"dtype": "bfloat16"},
        replay={"preset": "grpo", "drop_zero_variance": False},  # an update, whatever is sampled
    )  # fmt: skip
    parameters = sum(tensor.numel() for tensor in run.weights().values())
    expected, _ = checkpoint_size(parameters, 2, 3)
    (checkpoint,) = list_checkpoints(run.path / "checkpoints")
    found = checkpoint_writer.checkpoint_bytes_on_disk(checkpoint)
    assert expected < found < expected + 0.6 * parameters  # the tokenizer and DeepSpeed's scripts


def test_the_start_says_that_not_all_will_fit_and_refuses_if_none_does(tmp_path, monkeypatch):
    section = CheckpointSection(keep=3)

    def notices(free: int, **changes: str) -> list[str]:
        say_free(monkeypatch, free)
        size, chosen = CheckpointSize(10, merged=5), section.model_copy(update=changes)
        return checkpoint_writer.notices_of_room(tmp_path, chosen, size)

    assert notices(45) == [] == notices(60, merged="all")
    (notice,) = notices(44)
    assert "4 more checkpoints" in notice and "checkpoint.keep 3" in notice
    assert len(notices(59, merged="all")) == 1
    with pytest.raises(OutputDirectoryError):
        notices(14)


def test_what_a_resume_removes_counts_as_free(tmp_path, monkeypatch):
    """A kill while the checkpoint after the last that fits was written left half of it."""
    half = checkpoint_writer.temporary_folder(tmp_path, 4) / "engine" / "shard.pt"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"12345678")
    say_free(monkeypatch, 2)
    section = CheckpointSection(keep=2)
    (notice,) = checkpoint_writer.notices_of_room(tmp_path, section, CheckpointSize(10))
    assert "3 more checkpoints" in notice
    half.unlink()
    with pytest.raises(OutputDirectoryError, match="a checkpoint of this run needs"):
        checkpoint_writer.notices_of_room(tmp_path, section, CheckpointSize(10))


@pytest.mark.parametrize("name", ["engine/state/mp_rank_00_model_states.pt", "manifest.json.tmp"])
def test_a_disk_that_runs_full_meanwhile_loses_only_the_checkpoint_being_written(
    tmp_path, processes, monkeypatch, name
):
    """The kernel itself refuses the write: the file is a link to /dev/full."""
    begin = checkpoint_writer.begin_checkpoint

    def with_a_full_disk(temporary: Path) -> None:
        begin(temporary)
        if temporary.name.endswith("2"):
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            os.symlink("/dev/full", temporary / name)

    monkeypatch.setattr(checkpoint_writer, "begin_checkpoint", with_a_full_disk)
    with pytest.raises(OutputDirectoryError, match="step_000002"):
        train_small_run(tmp_path / "run", **SHORT, engine={"zero_stage": 2})
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000001"]
    verify_checkpoint(find_checkpoint(checkpoints))


def facts_of(rank: int, folder: Path) -> dict:
    """What a rank of three adds to the facts."""
    comm = SimpleNamespace(rank=rank, world_size=3, all_gather_json=lambda mine: [mine])
    return checkpoint_writer._facts_of_all(comm, folder)


def test_every_rank_hashes_its_own_shards_and_rank_0_the_rest(tmp_path):
    names = ["model/model.safetensors", "engine/state/mp_rank_00_model_states.pt"]
    names += [f"engine/state/bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(3)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    shares = [facts_of(rank, tmp_path) for rank in range(3)]
    assert [len(share) for share in shares] == [3, 1, 1]
    assert sorted(name for share in shares for name in share) == sorted(names)
