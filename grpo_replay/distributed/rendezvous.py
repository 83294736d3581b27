"""How ranks find each other: torch's process group, and agreement on the recipe."""

import datetime
import os
import socket
from typing import Any

import torch.distributed as dist

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import LAUNCHER_VARIABLE, RankEnvironment
from grpo_replay.distributed.failures import name_ranks, run_collectively
from grpo_replay.errors import LaunchError, first_line
from grpo_replay.recipe import Recipe
from grpo_replay.version import __version__


def form_group(environment: RankEnvironment, backend: str, timeout: datetime.timedelta) -> None:
    """Make torch's default process group, which DeepSpeed adopts."""
    place: dict[str, Any] = {"rank": environment.rank, "world_size": environment.world_size}
    try:
        if not environment.is_launched:
            place["store"] = dist.HashStore()  # no port: many runs may share a machine
        elif LAUNCHER_VARIABLE in os.environ:
            place["store"] = _loopback_store(environment, timeout)
        dist.init_process_group(backend, timeout=timeout, **place)
    except (RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"rank {environment.rank} of {environment.world_size} on {socket.gethostname()} did "
            f"not meet the others at {environment.master_addr}:{environment.master_port} over "
            f"{backend}: {first_line(error)}; see what the other ranks printed, whether their "
            "machines reach that address, and name the network interface that they share in "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from error


def _loopback_store(environment: RankEnvironment, timeout: datetime.timedelta) -> dist.Store:
    """The store of ranks on one machine. Rank 0 listens on the loopback interface, where torch
    would listen on every one."""
    address, is_main = ("127.0.0.1", environment.master_port), environment.rank == 0
    listening: dict[str, Any] = {}
    if is_main:
        listening["master_listen_fd"] = socket.create_server(address).detach()
    return dist.TCPStore(
        *address, environment.world_size, is_master=is_main, timeout=timeout, **listening
    )


def refuse_disagreement(comm: Comm, recipe: Recipe) -> None:
    """Raises LaunchError on the lowest rank that has another recipe than rank 0, or another version
    of this package, and PeerFailure on the others. Collective."""
    sections = recipe.model_dump(mode="json").items()
    mine = {"version of grpo-replay": __version__, **{name: repr(each) for name, each in sections}}
    facts = comm.all_gather_json(mine)

    def compare() -> None:
        others = [rank for rank, theirs in enumerate(facts) if theirs != facts[0]]
        if comm.rank in others:
            keys = ", ".join(key for key, value in facts[0].items() if mine.get(key) != value)
            raise LaunchError(
                f"{name_ranks(others)} and rank 0 differ in: {keys}; give every rank the same "
                "recipe file, --set options and version of grpo-replay"
            )

    run_collectively(comm, compare)


def leave_run() -> None:
    """Wait for the other ranks, then destroy the process group. A launcher ends the remaining ranks
    as soon as one exits with an error code, and the group's threads would abort the interpreter."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
