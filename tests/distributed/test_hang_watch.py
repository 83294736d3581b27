"""What ranks say of where they are (test_train_command.py has a run that really hangs)."""

import logging
import threading
import time

import pytest
import torch.distributed as dist

from grpo_replay.distributed.comm import Comm, Place, Position
from grpo_replay.distributed.failures import (
    RankFailure,
    leave_positions,
    lost_contact,
    read_positions,
)
from grpo_replay.distributed.hang_watch import HangWatch, Sighting, describe_sightings
from grpo_replay.distributed.launch import _conclude
from grpo_replay.errors import LaunchError
from grpo_replay.storage.run_directory import RunDirectory

TINY = {
    "prompts": {
        "source": "builtin:tiny", "id_field": "problem_id", "template": "plain",
        "user_template": "{problem}=", "max_prompt_length": 16,
    }
}  # fmt: skip


def test_a_position_says_step_stage_part_and_collective():
    position, seen = Position(), []

    def look():
        seen.append(str(position.read()[0]))

    look()
    position.begin_step(12)
    with position.stage("training"):
        for _ in position.each("update", range(2), 2):
            for _ in position.each("micro-batch", "ab", 2):
                look()
            position.note("optimizer step")
            with position.waiting("barrier"), position.waiting("all_gather"):
                look()
    look()
    assert seen == [
        "step 0, start",
        "step 12, training, update 1 of 2, micro-batch 1 of 2",
        "step 12, training, update 1 of 2, micro-batch 2 of 2",
        "step 12, training, update 1 of 2, optimizer step, in barrier",
        "step 12, training, update 2 of 2, micro-batch 1 of 2",
        "step 12, training, update 2 of 2, micro-batch 2 of 2",
        "step 12, training, update 2 of 2, optimizer step, in barrier",
        "step 12, between stages",
    ]


def test_a_position_says_which_item_is_waited_for_and_keeps_the_place_of_an_error():
    position, asked = Position(), []

    def completions():
        for _ in range(2):
            asked.append(position.read()[0].part)
            yield
        asked.append("exhausted")

    assert len(list(position.each("completion", completions()))) == 2
    assert asked == ["completion 1", "completion 2", "exhausted"]
    assert position.read()[0].part == ""
    comm = Comm()
    with pytest.raises(AssertionError), comm.position.stage("sync"):
        comm.broadcast(None)
    assert str(comm.position.read()[0]) == "step 0, sync, in broadcast"
    with comm.position.stage("checkpoint"):
        assert str(comm.position.read()[0]) == "step 0, checkpoint"


def test_ranks_of_one_place_are_named_together():
    training = Place(2, "training", "micro-batch 3 of 8", "gather")
    sightings = [
        Sighting(0, training, 59.6),
        Sighting(1, Place(2, "sync"), 1.0),
        Sighting(2, training, 61.4),
        Sighting(3, training, 70.0, silent_seconds=40.0),
    ]
    assert describe_sightings(sightings, silent_after_seconds=16.0) == (
        "ranks 0, 2 at step 2, training, micro-batch 3 of 8, in gather for 61 s; "
        "rank 1 at step 2, sync for 1 s; "
        "rank 3 at step 2, training, micro-batch 3 of 8, in gather for 70 s "
        "(no sign of life for 40 s)"
    )


class PairComm(Comm):
    """One of two ranks that are threads of this process."""

    both = threading.Barrier(2, timeout=20)

    def barrier(self):
        self.both.wait()


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hang watch"]


@pytest.mark.slow
def test_a_wait_is_reported_once_by_every_rank_and_again_at_twice_the_time(caplog):
    """Rank 0 waits for 3.4 s, rank 1 moves all the while; reports are due after 1 and 2 s."""
    caplog.set_level(logging.INFO, "grpo_replay")
    store, ends = dist.HashStore(), time.monotonic() + 3.4

    def rank(index):
        comm = PairComm(index, 2)
        with HangWatch(comm, store, report_seconds=1.0):
            comm.position.begin_step(7 + index)
            while time.monotonic() < ends:
                if index == 1:
                    comm.position.note("busy")
                time.sleep(0.02)
            comm.position.begin_step(9)
            time.sleep(0.5)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    said = [record.getMessage() for record in caplog.records]
    for index in range(2):
        stacks = [text for text in said if f"Stack of rank {index}:" in text]
        assert len(stacks) == 2
        assert all("rank 0 at step 7, between stages for" in text for text in stacks)
        assert all("rank 1 at step 8, between stages, busy for 0 s" in text for text in stacks)
        assert all(", in rank\n" in text for text in stacks)
    assert "rank 0 goes on: step 9, between stages" in said
    assert watches() == []


@pytest.fixture
def two_ranks(monkeypatch):
    """This process says that it is rank 0 of two."""
    place = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    for name, value in place.items():
        monkeypatch.setenv(name, value)


class AloneComm(Comm):
    """Rank 0 of two; the other one is there only in the store."""

    def barrier(self):
        pass


def test_a_lost_peer_is_named_with_its_last_place(two_ranks):
    store, comm = dist.HashStore(), AloneComm(0, 2)
    store.set("hang/position/1", '[[4, "sync", "tensor 2", ""], 1.0, 2.0]')
    timed_out = RuntimeError("Timed out waiting 1800000ms for recv operation to complete")
    with pytest.raises(RuntimeError) as caught, HangWatch(comm, store, 60.0):
        comm.position.begin_step(4)
        raise timed_out
    message = str(lost_contact(caught.value))
    assert "Last seen: rank 0 at step 4, between stages for 0 s; rank 1 at step 4, sync" in message
    with pytest.raises(RuntimeError) as caught, HangWatch(comm, store, 60.0):
        raise RuntimeError("CUDA out of memory")
    assert not hasattr(caught.value, "__notes__")


def test_a_store_that_is_gone_ends_the_watch_and_not_the_run(two_ranks, caplog):
    caplog.set_level(logging.INFO, "grpo_replay")

    class Gone(dist.HashStore):
        def get(self, key):
            raise RuntimeError("Broken pipe")

    with pytest.raises(RuntimeError, match="Connection reset") as caught:  # noqa: SIM117
        with HangWatch(AloneComm(0, 2), Gone(), 0.1):
            deadline = time.monotonic() + 20
            while watches():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise RuntimeError("Connection reset by peer")
    assert "the hang watch ends: the ranks' store is out of reach (Broken pipe)" in caplog.text
    assert "Last seen" not in str(lost_contact(caught.value))


def test_a_rank_that_is_killed_while_it_waits_is_reported_with_its_place(monkeypatch, tmp_path):
    """NCCL aborts the process when a collective takes too long."""
    assert read_positions(tmp_path) == ""
    monkeypatch.setenv("GRPO_REPLAY_LAUNCH_FOLDER", str(tmp_path))
    leave_positions(0, "rank 0 at step 3, training for 60 s")
    with pytest.raises(LaunchError) as caught:
        _conclude({0: -6}, [], False, read_positions(tmp_path))
    assert str(caught.value).startswith(
        "rank 0 was killed by SIGABRT. They were waiting: rank 0 at step 3, training for 60 s."
    )
    with pytest.raises(LaunchError, match=r"SIGKILL; so ends a rank for which the others waited"):
        _conclude({0: -9}, [], False, read_positions(tmp_path))
    leave_positions(0, None)
    assert read_positions(tmp_path) == ""
    with pytest.raises(LaunchError, match=r"SIGKILL; the kernel does that when host memory runs"):
        _conclude({0: -9}, [], False, read_positions(tmp_path))


def test_the_rank_that_timed_out_is_heard_and_not_the_one_that_was_stopped_after_it():
    timed_out = RankFailure(1, "LostContact", "rank 1 lost contact", 4, echo=True, when=1.0)
    with pytest.raises(LaunchError, match="rank 1 lost contact"):
        _conclude({0: -15, 1: 4}, [timed_out], False)
    with pytest.raises(LaunchError, match="rank 0 was killed by SIGKILL"):
        _conclude({0: -9, 1: 4}, [timed_out], False)


def test_logs_of_other_ranks_are_not_counted_as_attempts(tmp_path):
    run_dir = RunDirectory(tmp_path)
    assert run_dir.next_attempt() == 1
    paths = [run_dir.open_log(1, rank) for rank in range(3)]
    assert [path.name for path in paths] == [
        "attempt_001.log", "attempt_001.rank_1.log", "attempt_001.rank_2.log",
    ]  # fmt: skip
    assert run_dir.next_attempt() == 2
