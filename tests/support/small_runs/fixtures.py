"""Small runs that several test files read, made once for all workers. Tests may not change them."""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from small_runs.synthetic import PRESETS, write_synthetic_run

if TYPE_CHECKING:
    from fake_policy_server import FakePolicyServer

    from small_runs.trained import FinishedRun

# The trainer is imported where it is used: torch and DeepSpeed take seconds to load.


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory, worker_id) -> Path:
    """A folder of this session that all of its workers see."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def made_once(folder: Path, make: Callable[[], Any]) -> None:
    """Let the first worker that gets here make `folder`, and the others wait for it."""
    made = folder.with_name(f"{folder.name}.made")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            make()
            made.touch()


@pytest.fixture(scope="session")
def runs(shared_folder) -> dict[str, Path]:
    """One synthetic run of 24 steps for each preset."""
    folders = {preset: shared_folder / "synthetic" / preset for preset in PRESETS}

    def make() -> None:
        for preset, folder in folders.items():
            write_synthetic_run(folder, preset)

    made_once(shared_folder / "synthetic", make)
    return folders


@pytest.fixture(scope="session")
def processes():
    """(Comm, device) of this process, a run of one rank; DeepSpeed is initialised once."""
    import torch
    from core_engine import engine_recipe

    from grpo_replay.engine.processes import initialize_processes

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
def one_update_run(shared_folder, processes) -> "FinishedRun":
    """Our method with one mini-batch per step and a checkpoint after every step."""
    return _train(
        shared_folder / "one_update",
        batch={"updates_per_step": 1},
        run={"steps": 12},
        checkpoint={"every_steps": 1, "keep": 100},
    )


@pytest.fixture(scope="session")
def ours_run(shared_folder, processes) -> "FinishedRun":
    """Our method as it comes, two mini-batches per step."""
    return _train(
        shared_folder / "ours",
        run={"steps": 12},
        checkpoint={"every_steps": 3, "keep": 100},
    )


@pytest.fixture(scope="session")
def pool_run(shared_folder, processes) -> "FinishedRun":
    return _train(
        shared_folder / "pool",
        replay={"composition": "pool"},
        run={"steps": 12},
        checkpoint={"every_steps": 4, "keep": 100},
    )


@pytest.fixture(scope="session")
def fifo_run(shared_folder, processes) -> "FinishedRun":
    """Paper B's preset, with a buffer small enough to be full and a step without survivors."""
    return _train(
        shared_folder / "fifo",
        replay={
            "preset": "fifo", "ratio": 0.75, "capacity_rollouts": 30, "warmup_steps": 0,
            "max_age_steps": None,
        },
        run={"steps": 12},
        checkpoint={"every_steps": 4, "keep": 100},
    )  # fmt: skip


def _train(path: Path, **sections) -> "FinishedRun":
    from small_runs.trained import FinishedRun, small_recipe, train_small_run

    made_once(path, lambda: train_small_run(path, **sections))
    return FinishedRun(path, small_recipe(**sections))
