"""Ranks that wait for each other: they say for whom, and hear signals."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from server_helpers import free_ports

from grpo_replay.distributed import rendezvous
from grpo_replay.distributed.environment import RankEnvironment
from grpo_replay.stop import StopToken


def place_of(rank: int, port: int) -> RankEnvironment:
    return RankEnvironment(rank, rank, 2, 2, "127.0.0.1", port, True)


@pytest.fixture
def unlaunched(monkeypatch):
    for name in ("GRPO_REPLAY_LAUNCHER", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("rank", "whom"), [(0, "rank 1"), (1, "rank 0")])
def test_a_rank_says_for_whom_it_waits_and_gives_up_in_time(
    unlaunched, monkeypatch, capsys, rank, whom
):
    monkeypatch.setattr(rendezvous, "QUIET_SECONDS", 0.3)
    (port,) = free_ports(1)
    with pytest.raises(RuntimeError, match=f"{whom} missing after 1 s"):
        rendezvous._meet(place_of(rank, port), timedelta(seconds=1))
    said = capsys.readouterr().err
    assert said.count("waits for") == 1
    assert f"rank {rank} of 2 waits for {whom} at 127.0.0.1:{port} (for 1 s" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_ends_the_wait_for_other_ranks(unlaunched, rank):
    started = time.monotonic()
    with StopToken().on_signals():
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            rendezvous._meet(place_of(rank, free_ports(1)[0]), timedelta(seconds=60))
    assert time.monotonic() - started < 30


def test_ranks_that_come_one_after_the_other_share_a_store_and_say_nothing(unlaunched, capsys):
    (port,) = free_ports(1)
    with ThreadPoolExecutor(2) as threads:
        late = threads.submit(rendezvous._meet, place_of(1, port), timedelta(seconds=60))
        time.sleep(0.3)
        first = threads.submit(rendezvous._meet, place_of(0, port), timedelta(seconds=60))
        first.result().set("word", "said")
        assert late.result().get("word") == b"said"
    assert capsys.readouterr().err == ""
