"""A checkpoint: who hashes what, and a full disk that loses nothing."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from slow_tests import slow_except
from small_runs.trained import train_small_run

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.storage.checkpoint import (
    find_checkpoint,
    verify_checkpoint,
)
from grpo_replay.training import checkpoint_writer

SHORT = {"run": {"steps": 2}, "checkpoint": {"every_steps": 1}, "replay": {"preset": "grpo"}}


FILES = ["engine/state/mp_rank_00_model_states.pt", "manifest.json.tmp"]


@pytest.mark.parametrize("name", slow_except(FILES[:1], FILES))
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
    comm = SimpleNamespace(rank=rank, world_size=3, all_gather=lambda mine: [mine])
    return checkpoint_writer._gather_file_facts(comm, folder)


def test_every_rank_hashes_its_own_shards_and_rank_0_the_rest(tmp_path):
    names = ["model/model.safetensors", "engine/state/mp_rank_00_model_states.pt"]
    names += [f"engine/state/bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(3)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    shares = [facts_of(rank, tmp_path) for rank in range(3)]
    assert [len(share) for share in shares] == [3, 1, 1]
    assert sorted(name for share in shares for name in share) == sorted(names)
