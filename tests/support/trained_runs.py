"""Whole runs of the real trainer, made once per session: `pytest_plugins = "trained_runs"`."""

import pytest
import torch
from core_engine import engine_recipe
from core_run import FinishedRun, run_small

from grpo_replay.distributed.processes import initialize_processes


@pytest.fixture(scope="session")
def processes():
    """(Comm, device) of this process, a run of one rank; DeepSpeed is initialised once."""
    torch.set_num_threads(1)
    return initialize_processes(engine_recipe())


@pytest.fixture(scope="session")
def one_update_run(tmp_path_factory, processes) -> FinishedRun:
    """Our method with one mini-batch per step and a checkpoint after every step."""
    return run_small(
        tmp_path_factory.mktemp("one_update") / "run",
        batch={"updates_per_step": 1},
        run={"steps": 12},
        checkpoint={"every_steps": 1, "keep": 100},
    )


@pytest.fixture(scope="session")
def ours_run(tmp_path_factory, processes) -> FinishedRun:
    """Our method as it comes, two mini-batches per step."""
    return run_small(
        tmp_path_factory.mktemp("ours") / "run",
        run={"steps": 12},
        checkpoint={"every_steps": 3, "keep": 100},
    )


@pytest.fixture(scope="session")
def pool_run(tmp_path_factory, processes) -> FinishedRun:
    return run_small(
        tmp_path_factory.mktemp("pool") / "run",
        replay={"composition": "pool"},
        run={"steps": 12},
        checkpoint={"every_steps": 4, "keep": 100},
    )


@pytest.fixture(scope="session")
def fifo_run(tmp_path_factory, processes) -> FinishedRun:
    """Paper B's preset, with a buffer small enough to be full and a step without survivors."""
    return run_small(
        tmp_path_factory.mktemp("fifo") / "run",
        replay={
            "preset": "fifo", "ratio": 0.75, "capacity_rollouts": 30, "warmup_steps": 0,
            "max_age_steps": None,
        },
        run={"steps": 12},
        checkpoint={"every_steps": 4, "keep": 100},
    )  # fmt: skip
