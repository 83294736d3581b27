"""Cells that run at the same time share cores and GPUs in equal parts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_replay.distributed.environment import available_cores
from grpo_replay.errors import LaunchError, OutputDirectoryError, UsageError
from grpo_replay.lab.sweep import local
from grpo_replay.lab.sweep.cells import CellState, locked_log, note_start
from grpo_replay.lab.sweep.grid import Cell


def cell(ranks: int, device: str = "auto") -> Cell:
    overrides = (f"engine.num_processes={ranks}", f"engine.device={device}")
    return Cell(Path("out"), "", "ours", 3, "tiny", overrides)


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")


def test_cores_are_divided_and_a_run_counts_on_its_share(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    assert local.share_of_cores(2) == {"GRPO_REPLAY_CORES": "4", "OMP_NUM_THREADS": "4"}
    assert local.share_of_cores(20)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("GRPO_REPLAY_CORES", "4")
    assert available_cores() == 4
    monkeypatch.setenv("GRPO_REPLAY_CORES", "40")
    assert available_cores() == 9
    monkeypatch.setenv("GRPO_REPLAY_CORES", "0")
    with pytest.raises(LaunchError, match="GRPO_REPLAY_CORES is 0"):
        available_cores()


def test_gpus_are_divided_and_a_share_is_given_to_one_cell_at_a_time(eight_gpus, monkeypatch):
    given = []

    class Process:
        pid, ended = 1, None

        def poll(self):
            return self.ended

    def start(cell, state, environment, entry):
        given.append(environment["CUDA_VISIBLE_DEVICES"])
        return Process()

    monkeypatch.setattr(local, "start_process", start)
    launcher = local.LocalLauncher(2)
    first, _ = (launcher.start(cell(4), CellState.NEW) for _ in range(2))
    first._process.ended = 0
    launcher.start(cell(4), CellState.NEW)
    assert given == ["0,1,2,3", "4,5,6,7", "0,1,2,3"]


@contextmanager
def left_running(out: Path, number: int, gpus: str | None) -> Iterator[Cell]:
    """A cell whose log is held, as by a process that outlived its sweep."""
    left = Cell(out, "", f"arm-{number}", 3, "tiny", ())
    with locked_log(left) as log:
        note_start(log, os.getpid(), left, CellState.NEW, gpus)
        yield left


def test_what_an_earlier_sweep_left_running_keeps_its_gpus(eight_gpus, monkeypatch, tmp_path):
    given = []

    def start(cell, state, environment, entry):
        given.append(environment["CUDA_VISIBLE_DEVICES"])
        return SimpleNamespace(poll=lambda: None)

    monkeypatch.setattr(local, "start_process", start)
    launcher = local.LocalLauncher(2)
    with left_running(tmp_path, 1, "0,1,2,3") as left:
        assert launcher.find(left).describe() == f"process {os.getpid()}"
        launcher.start(cell(4), CellState.NEW)
    launcher.start(cell(4), CellState.NEW)  # it has ended
    assert given == ["4,5,6,7", "0,1,2,3"]
    smaller = local.LocalLauncher(2)
    with left_running(tmp_path, 2, "4,5") as left, left_running(tmp_path, 3, "6,7") as other:
        smaller.find(left), smaller.find(other)
        smaller.start(cell(4), CellState.NEW)
    assert given[2:] == ["0,1,2,3"]


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (None, "on GPUs that its log does not name: wait for it or stop it$"),
        ("0,1,2,3,4,5,6,7", "on GPUs of several cells of this one: .* give --jobs as then"),
    ],
)
def test_a_leftover_on_the_gpus_of_several_cells_is_refused(eight_gpus, tmp_path, gpus, message):
    with left_running(tmp_path, 1, gpus) as left:
        with pytest.raises(OutputDirectoryError, match=rf"arm-1/seed-3 was left .* {message}"):
            local.LocalLauncher(2).find(left)
        assert local.LocalLauncher(1).find(left)


def test_one_cell_at_a_time_sees_all_gpus_and_nothing_is_set_without_gpus(eight_gpus, monkeypatch):
    assert local.shares_of_gpus(1) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local.shares_of_gpus(4) == []


def test_more_ranks_than_gpus_in_a_share_are_refused(eight_gpus):
    local.LocalLauncher(2).check([cell(4)])
    local.LocalLauncher(1).check([cell(8)])
    local.LocalLauncher(2).check([cell(8, "cpu")])
    with pytest.raises(UsageError, match=r"8 GPUs are 2 for each of 4 cells, .* lower --jobs to 2"):
        local.LocalLauncher(4).check([cell(4)])
