"""A checkpoint needs room: checked before, said at the start, and a full disk loses nothing."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from slow_tests import slow_except
from small_runs.trained import train_small_run

from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
from grpo_replay.errors import OutputDirectoryError
from grpo_replay.storage.checkpoint import (
    checkpoint_bytes,
    find_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)
from grpo_replay.training import resuming

SHORT = {"run": {"steps": 2}, "checkpoint": {"every_steps": 1}, "replay": {"preset": "grpo"}}


def say_free(monkeypatch, *sizes: int) -> None:
    """Make the disk have so much room, one size a question, the last for ever."""
    left = list(sizes)
    monkeypatch.setattr(resuming, "free_bytes", lambda _: left.pop(0) if len(left) > 1 else left[0])


PLENTY, LITTLE = 10**12, 1000


@pytest.mark.parametrize(
    "stage, dtype, size",
    slow_except(
        [(3, "bfloat16", 2)],
        [(0, "float32", 4), (1, "bfloat16", 2), (2, "float32", 4), (3, "bfloat16", 2)],
    ),
)
def test_the_expected_size_is_that_of_a_real_checkpoint(tmp_path, processes, stage, dtype, size):
    run = train_small_run(
        tmp_path / "run", run={"steps": 1}, engine={"zero_stage": stage}, model={"dtype": dtype},
        replay={"preset": "grpo", "drop_zero_variance": False},  # an update, whatever is sampled
    )  # fmt: skip
    parameters = sum(tensor.numel() for tensor in run.weights().values())
    expected = checkpoint_bytes(parameters, size, stage)
    (checkpoint,) = list_checkpoints(run.path / "checkpoints")
    found = resuming.checkpoint_bytes_on_disk(checkpoint)
    assert expected < found < expected + 0.6 * parameters  # the tokenizer and DeepSpeed's scripts


def test_a_run_without_room_for_one_checkpoint_does_not_begin(tmp_path, processes, monkeypatch):
    say_free(monkeypatch, LITTLE)
    with pytest.raises(OutputDirectoryError, match=r"a checkpoint of this run needs 0\.\d+ GiB"):
        train_small_run(tmp_path / "run", **SHORT)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_start_says_that_not_all_will_fit(tmp_path, monkeypatch):
    say_free(monkeypatch, 35)
    (notice,) = resuming.notices_of_room(tmp_path, 3, 10)
    assert "4 more checkpoints" in notice and "checkpoint.keep 3" in notice
    say_free(monkeypatch, 40)
    assert resuming.notices_of_room(tmp_path, 3, 10) == []


def test_the_refusal_says_what_is_left(tmp_path, monkeypatch):
    say_free(monkeypatch, 10, 9)
    resuming.refuse_full_disk(tmp_path, "a checkpoint", 10)
    with pytest.raises(OutputDirectoryError, match="There is no earlier checkpoint: free"):
        resuming.refuse_full_disk(tmp_path, "a checkpoint", 10)


def test_a_disk_too_full_for_the_next_checkpoint_stops_the_run_and_keeps_the_last(
    tmp_path, processes, monkeypatch
):
    say_free(monkeypatch, PLENTY, PLENTY, PLENTY, LITTLE)  # twice at the start, then step 1
    with pytest.raises(OutputDirectoryError, match=r"checkpoint of step 2 needs.*step_000001 is"):
        train_small_run(tmp_path / "run", **SHORT)
    monkeypatch.undo()
    checkpoints = tmp_path / "run" / "checkpoints"
    assert find_checkpoint(checkpoints).name == "step_000001"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000001"]
    run = train_small_run(tmp_path / "run", resume=True, **SHORT)
    assert [line["step"] for line in run.metrics] == [1, 2]


PLACES = {
    "engine's state": "engine/state/mp_rank_00_model_states.pt",
    "tokenizer": "model/tokenizer.json",
    "buffer": "buffer.parquet.tmp",
    "manifest": "manifest.json.tmp",
}


@pytest.mark.parametrize("name", slow_except(["engine's state", "manifest"], PLACES))
def test_a_disk_that_runs_full_meanwhile_loses_only_the_checkpoint_being_written(
    tmp_path, processes, monkeypatch, name
):
    """The kernel itself refuses the write: the file is a link to /dev/full."""
    begin = resuming.begin_checkpoint

    def with_a_full_disk(temporary: Path) -> None:
        begin(temporary)
        if temporary.name.endswith("2"):
            place = temporary / PLACES[name]
            place.parent.mkdir(parents=True, exist_ok=True)
            os.symlink("/dev/full", place)

    monkeypatch.setattr(resuming, "begin_checkpoint", with_a_full_disk)
    with pytest.raises(OutputDirectoryError, match=r"tmp-step_000002.*step_000001 is com") as seen:
        train_small_run(tmp_path / "run", **SHORT, engine={"zero_stage": 2})
    assert seen.value.exit_code == 3
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000001"]
    verify_checkpoint(checkpoints / "latest")


def test_an_error_that_is_not_the_disks_is_left_as_it_is(tmp_path, processes, monkeypatch):
    def surprise(*_) -> None:
        raise RuntimeError("a collective failed")

    monkeypatch.setattr(DeepSpeedEngine, "save", surprise)
    with pytest.raises(RuntimeError, match="a collective failed"):
        train_small_run(tmp_path / "run", **SHORT)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_hashes_its_own_shards_and_rank_0_the_rest(tmp_path, ranks):
    names = ["model/model.safetensors", "engine/state/mp_rank_00_model_states.pt"]
    names += [f"engine/state/bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(3)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    shares = []
    for rank in range(ranks):
        comm = SimpleNamespace(
            rank=rank, world_size=ranks, is_main=rank == 0, barrier=lambda: None,
            broadcast_json=lambda value: value if value is not None else names,
            all_gather_json=lambda value: [shares.append(value) or value],
        )  # fmt: skip
        resuming._facts_of_all(comm, tmp_path)
    found = [name for share in shares for name in share]
    assert sorted(found) == sorted(names)
    if ranks == 3:
        assert [len(share) for share in shares] == [3, 1, 1]
