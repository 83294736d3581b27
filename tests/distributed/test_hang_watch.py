"""What ranks say of where they are (test_train_command.py has a run that really hangs)."""

import pytest
import torch.distributed as dist

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import lost_contact
from grpo_replay.distributed.hang_watch import HangWatch
from grpo_replay.storage.run_directory import RunDirectory


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


def test_logs_of_other_ranks_are_not_counted_as_attempts(tmp_path):
    run_dir = RunDirectory(tmp_path)
    assert run_dir.next_attempt() == 1
    paths = [run_dir.open_log(1, rank) for rank in range(3)]
    assert [path.name for path in paths] == [
        "attempt_001.log", "attempt_001.rank_1.log", "attempt_001.rank_2.log",
    ]  # fmt: skip
    assert run_dir.next_attempt() == 2
