"""Sets up this rank: its device, and the process groups that DeepSpeed uses."""

import datetime
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import rank_environment, threads_per_rank
from grpo_replay.distributed.rendezvous import form_group, refuse_disagreement
from grpo_replay.engine.deepspeed_quirks import set_group_timeout, without_shared_memory_operator
from grpo_replay.errors import LaunchError
from grpo_replay.recipe import EngineSection, Recipe
from grpo_replay.terminal.quiet import loading_libraries


def choose_device(settings: EngineSection, local_rank: int) -> torch.device:
    """Return the device of this rank: the GPU of its local rank, or the CPU (`engine.device`;
    `auto` without GPUs). Raises LaunchError if it should be a GPU that torch does not see."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if settings.device == "cpu" or (settings.device == "auto" and not gpus):
        return torch.device("cpu")
    if local_rank >= gpus:
        cuda = torch.version.cuda
        built = "built without CUDA" if cuda is None else f"built for CUDA {cuda}"
        raise LaunchError(
            f"engine.device {settings.device}: local rank {local_rank} needs GPU {local_rank}, and "
            f"torch {torch.__version__} ({built}) sees {gpus}: start "
            "fewer ranks, set engine.device cpu, or look at nvidia-smi (a build for CUDA 13 needs "
            "driver 580 or newer) and CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", local_rank)


def memory_of_gpu(device: torch.device) -> int | None:
    """Memory of a GPU in bytes; None for a CPU."""
    if device.type == "cpu":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def initialize_processes(recipe: Recipe) -> tuple[Comm, torch.device]:
    """Join the run that the environment describes, and choose this rank's device.

    A process that no launcher started becomes a group of one. Raises LaunchError if ranks do not
    meet within `engine.timeout_seconds` or have different recipes or versions of this package, and
    on each rank that has no GPU of its own.
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
    torch.set_num_threads(threads_per_rank(settings.threads_per_process, ranks_here))
    backend = "nccl" if device.type == "cuda" else "gloo"
    if environment.world_size == 1:
        # torch would keep its last 2,000 collectives with their stacks, for ranks that hang: 5 MB.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    timeout = datetime.timedelta(seconds=settings.timeout_seconds)
    if not dist.is_initialized():
        form_group(environment, backend, timeout)
    if device.type == "cpu":
        without_shared_memory_operator()
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    set_group_timeout(timeout)
    group = None
    if environment.world_size > 1:
        group = dist.new_group(backend="gloo", timeout=timeout)
    comm = Comm(environment.rank, environment.world_size, group)
    refuse_disagreement(comm, recipe)
    return comm, device
