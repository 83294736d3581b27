"""Small runs that several test files read, made once per session. Tests may not change them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from small_runs.synthetic import PRESETS, write_synthetic_run

if TYPE_CHECKING:
    from fake_policy_server import FakePolicyServer

    from small_runs.trained import FinishedRun

# The trainer is imported where it is used: torch and DeepSpeed take seconds to load.


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[str, Path]:
    """One synthetic run of 24 steps for each preset."""
    folder = tmp_path_factory.mktemp("runs")
    return {preset: write_synthetic_run(folder / preset, preset).folder for preset in PRESETS}


@pytest.fixture(scope="session")
def processes():
    """(Comm, device) of this process, a run of one rank; DeepSpeed is initialised once."""
    import torch
    from core_engine import engine_recipe

    from grpo_replay.distributed.processes import initialize_processes

    torch.set_num_threads(1)
    return initialize_processes(engine_recipe())


@pytest.fixture(scope="module")
def fake_server() -> "Iterator[FakePolicyServer]":
    """A fake vLLM server that takes weights and answers within 30 ms."""
    import torch
    from fake_policy_server import FakePolicyServer

    torch.set_num_threads(1)
    server = FakePolicyServer(seconds=0.03)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def one_update_run(tmp_path_factory, processes) -> "FinishedRun":
    """Our method with one mini-batch per step and a checkpoint after every step."""
    return _train(
        tmp_path_factory.mktemp("one_update") / "run",
        batch={"updates_per_step": 1},
        run={"steps": 12},
        checkpoint={"every_steps": 1, "keep": 100},
    )


@pytest.fixture(scope="session")
def ours_run(tmp_path_factory, processes) -> "FinishedRun":
    """Our method as it comes, two mini-batches per step."""
    return _train(
        tmp_path_factory.mktemp("ours") / "run",
        run={"steps": 12},
        checkpoint={"every_steps": 3, "keep": 100},
    )


@pytest.fixture(scope="session")
def pool_run(tmp_path_factory, processes) -> "FinishedRun":
    return _train(
        tmp_path_factory.mktemp("pool") / "run",
        replay={"composition": "pool"},
        run={"steps": 12},
        checkpoint={"every_steps": 4, "keep": 100},
    )


@pytest.fixture(scope="session")
def fifo_run(tmp_path_factory, processes) -> "FinishedRun":
    """Paper B's preset, with a buffer small enough to be full and a step without survivors."""
    return _train(
        tmp_path_factory.mktemp("fifo") / "run",
        replay={
            "preset": "fifo", "ratio": 0.75, "capacity_rollouts": 30, "warmup_steps": 0,
            "max_age_steps": None,
        },
        run={"steps": 12},
        checkpoint={"every_steps": 4, "keep": 100},
    )  # fmt: skip


def _train(path: Path, **sections) -> "FinishedRun":
    from small_runs.trained import train_small_run

    return train_small_run(path, **sections)
