"""Joining the run as one of its ranks: device, threads, process group."""

import datetime
import os

import torch

from grpo_replay import __version__
from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import available_cores, rank_environment
from grpo_replay.distributed.rendezvous import form_process_group, join_run
from grpo_replay.recipe import EngineSection, Recipe


def choose_device(settings: EngineSection, local_rank: int) -> torch.device:
    """The device of this rank."""
    wanted = settings.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", local_rank) if wanted == "cuda" else torch.device("cpu")


def initialize_processes(recipe: Recipe) -> tuple[Comm, torch.device]:
    """Join the run that the environment describes, and choose this rank's device.

    A process that no launcher started becomes a group of one. Raises LaunchError, on one rank, if
    ranks are missing, cannot reach each other, or were given different recipes.
    """
    settings, environment = recipe.engine, rank_environment()
    # DeepSpeed asks for it even in one process. WORLD_SIZE would say that a launcher started us.
    os.environ.setdefault("LOCAL_RANK", str(environment.local_rank))
    device = choose_device(settings, environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    ranks_here = environment.local_world_size
    torch.set_num_threads(settings.threads_per_process or max(1, available_cores() // ranks_here))
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not torch.distributed.is_initialized():
        form_process_group(environment, _join(recipe), backend, settings.timeout_seconds)
    # DeepSpeed would compile a shared-memory operator for CPU ranks, which needs a C++ compiler
    # and a minute; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    group = None
    if environment.world_size > 1:
        timeout = datetime.timedelta(seconds=settings.timeout_seconds)
        group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    return Comm(environment.rank, environment.world_size, group), device


def _join(recipe: Recipe) -> torch.distributed.Store:
    environment = rank_environment()
    if not environment.is_launched:
        return torch.distributed.HashStore()  # no port: many runs may share a machine
    facts = {"recipe": recipe.model_dump(mode="json"), "grpo-replay": __version__}
    return join_run(environment, facts, None, recipe.engine.timeout_seconds)
