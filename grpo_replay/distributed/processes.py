"""Joining the run as one of its ranks: device, threads, process group."""

import datetime
import functools
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch

from grpo_replay import __version__
from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import available_cores, rank_environment
from grpo_replay.distributed.rendezvous import form_process_group, join_run
from grpo_replay.errors import LaunchError
from grpo_replay.recipe import EngineSection, Recipe
from grpo_replay.terminal.loading import loading_libraries


def choose_device(settings: EngineSection, local_rank: int) -> torch.device:
    """The device of this rank. Raises LaunchError if it should be a GPU that torch does not see."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if settings.device == "cpu" or (settings.device == "auto" and not found):
        return torch.device("cpu")
    if local_rank >= found:
        cuda = torch.version.cuda
        built = "built without CUDA" if cuda is None else f"built for CUDA {cuda}"
        raise LaunchError(
            f"engine.device {settings.device}: local rank {local_rank} needs GPU {local_rank}, and "
            f"torch {torch.__version__} ({built}) sees {found}: start "
            "fewer ranks, set engine.device cpu, or look at nvidia-smi (a build for CUDA 13 needs "
            "driver 580 or newer) and CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", local_rank)


def initialize_processes(recipe: Recipe) -> tuple[Comm, torch.device]:
    """Join the run that the environment describes, and choose this rank's device.

    A process that no launcher started becomes a group of one. Raises LaunchError, on one rank, if
    ranks are missing, cannot reach each other, or have different recipes, and on each rank that
    has no GPU of its own.
    """
    settings, environment = recipe.engine, rank_environment()
    # DeepSpeed asks for it even in one process. WORLD_SIZE would say that a launcher started us.
    os.environ.setdefault("LOCAL_RANK", str(environment.local_rank))
    device = choose_device(settings, environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with nullcontext() if "deepspeed" in sys.modules else loading_libraries():
        import deepspeed

    ranks_here = environment.local_world_size
    torch.set_num_threads(settings.threads_per_process or max(1, available_cores() // ranks_here))
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not torch.distributed.is_initialized():
        form_process_group(environment, _join(recipe), backend, settings.timeout_seconds)
    if device.type == "cpu":
        # DeepSpeed would compile a shared-memory operator for CPU ranks, which needs a C++
        # compiler and a minute; gloo does without. On a GPU nothing asks for this table, and
        # filling it prints a warning to stdout for every operator that lacks a CUDA toolkit.
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    timeout = datetime.timedelta(seconds=settings.timeout_seconds)
    _set_group_timeout(deepspeed.comm.comm.cdb, timeout)
    group = None
    if environment.world_size > 1:
        group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    return Comm(environment.rank, environment.world_size, group), device


def _set_group_timeout(backend: Any, timeout: datetime.timedelta) -> None:
    """Set the time-out of the groups that DeepSpeed forms, such as the copy of the world group on
    which it trains. DeepSpeed passes none, and torch's default is ten minutes over NCCL."""
    backend.new_group = functools.partial(torch.distributed.new_group, timeout=timeout)


def _join(recipe: Recipe) -> torch.distributed.Store:
    environment = rank_environment()
    if not environment.is_launched:
        return torch.distributed.HashStore()  # no port: many runs may share a machine
    facts = {"recipe": recipe.model_dump(mode="json"), "grpo-replay": __version__}
    return join_run(environment, facts, None, recipe.engine.timeout_seconds)
