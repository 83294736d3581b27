"""Cells that run at the same time share cores and GPUs in equal parts."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_replay.distributed.environment import available_cores, threads_per_rank
from grpo_replay.errors import LaunchError
from grpo_replay.lab.sweep import cell_processes as processes
from grpo_replay.lab.sweep.cells import Cell, CellState


def cell(ranks: int, device: str = "auto") -> Cell:
    overrides = (f"engine.num_processes={ranks}", f"engine.device={device}")
    return Cell(Path("out"), "ours", 3, "tiny", overrides)


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")


def test_cores_are_divided_and_a_run_counts_on_its_share(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    assert processes.share_of_cores(2) == {"GRPO_REPLAY_CORES": "4", "OMP_NUM_THREADS": "4"}
    assert processes.share_of_cores(20)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("GRPO_REPLAY_CORES", "4")
    assert available_cores() == 4
    monkeypatch.setenv("GRPO_REPLAY_CORES", "40")
    assert available_cores() == 9
    monkeypatch.setenv("GRPO_REPLAY_CORES", "0")
    with pytest.raises(LaunchError, match="GRPO_REPLAY_CORES is 0"):
        available_cores()


def test_a_rank_has_its_share_of_cores_and_at_most_the_threads_that_are_set(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [threads_per_rank(None, ranks) for ranks in (1, 2, 20)] == [9, 4, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert (threads_per_rank(None, 2), threads_per_rank(6, 2)) == (1, 6)


@pytest.fixture
def started(monkeypatch):
    """The processes that are started, instead of starting them."""
    found = []

    def start(words, env, **_):
        process = SimpleNamespace(
            pid=1, ended=None, gpus=env["CUDA_VISIBLE_DEVICES"], name=env["WANDB_NAME"]
        )
        process.poll = lambda: process.ended
        found.append(process)
        return process

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    return found


def test_gpus_are_divided_and_a_share_is_given_to_one_cell_at_a_time(
    eight_gpus, started, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    launcher = processes.Launcher(2)
    for place in range(2):
        assert launcher.free_slot() == place
        launcher.start(cell(4), CellState.NEW, place)
    assert launcher.free_slot() is None
    started[0].ended = 0
    launcher.start(cell(4), CellState.NEW, launcher.free_slot())
    assert [process.gpus for process in started] == ["0,1,2,3", "4,5,6,7", "0,1,2,3"]
    assert {process.name for process in started} == {"out/ours/seed-3"}


def test_more_cells_than_gpus_take_the_gpus_by_turns(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert processes.shares_of_gpus(5) == ["0", "1", "0", "1", "0"]
    assert processes.shares_of_gpus(1) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 3,-1,2")
    assert processes.shares_of_gpus(2) == ["0", "3"]
