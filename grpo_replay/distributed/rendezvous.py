"""Rendezvous of the ranks: torch's process group, and the check that all have the same recipe."""

import datetime
import os
import socket
import sys
import time
from concurrent.futures import wait
from typing import Any

import torch.distributed as dist

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import LAUNCHER_VARIABLE, RankEnvironment
from grpo_replay.distributed.failures import name_ranks, run_collectively, start_in_thread
from grpo_replay.errors import LaunchError, first_line
from grpo_replay.recipe import Recipe
from grpo_replay.version import __version__

POLL_SECONDS = 0.1
QUIET_SECONDS = 10.0
"""Time that a rank waits for others before it prints which ones are missing."""


def form_group(environment: RankEnvironment, backend: str, timeout: datetime.timedelta) -> None:
    """Wait for all ranks, and create torch's default process group, which DeepSpeed adopts; a
    single process needs no port. Raises LaunchError if they do not meet within `timeout`."""
    try:
        # A process alone needs no port: many runs may share a machine.
        is_single = environment.world_size == 1
        store = dist.HashStore() if is_single else _meet(environment, timeout)
        dist.init_process_group(
            backend,
            timeout=timeout,
            rank=environment.rank,
            world_size=environment.world_size,
            store=store,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"rank {environment.rank} of {environment.world_size} on {socket.gethostname()} did "
            f"not meet the others at {environment.master_addr}:{environment.master_port} over "
            f"{backend}: {first_line(error)}; see what the other ranks printed, whether their "
            "machines reach that address, and name the network interface that they share in "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from error


def _meet(environment: RankEnvironment, timeout: datetime.timedelta) -> dist.Store:
    """Waits until all ranks have arrived, and returns their store. Prints once which are missing.
    Unlike torch's wait in C++, signals interrupt it. Raises RuntimeError after `timeout`."""
    started, reported = time.monotonic(), False
    connecting = start_in_thread(lambda: _open_store(environment, timeout))
    missing = list(range(environment.world_size))
    while True:
        connected = connecting.done()
        if connected:
            missing = _missing(connecting.result(), environment.rank, missing)
        if not missing:
            return connecting.result()
        waited = time.monotonic() - started
        missing_ranks = name_ranks(missing if connected else [0])
        if waited > timeout.total_seconds():
            raise RuntimeError(f"{missing_ranks} missing after {waited:.0f} s")
        if waited > QUIET_SECONDS and not reported:
            reported = True
            address = f"{environment.master_addr}:{environment.master_port}"
            print(
                f"rank {environment.rank} of {environment.world_size} waits for {missing_ranks} at "
                f"{address} "
                f"(for {timeout.total_seconds():.0f} s; Ctrl-C ends the wait)",
                file=sys.stderr,
                flush=True,
            )
        wait([connecting], POLL_SECONDS) if not connected else time.sleep(POLL_SECONDS)


def _missing(store: dist.Store, rank: int, candidates: list[int]) -> list[int]:
    """Register this rank in the store, and return the candidates that have not arrived."""
    store.set(f"arrived/{rank}", "")
    return [other for other in candidates if not store.check([f"arrived/{other}"])]


def _open_store(environment: RankEnvironment, timeout: datetime.timedelta) -> dist.Store:
    """Connects to the store that rank 0 serves, or torchrun's agent. Ranks of our launcher meet on
    the loopback interface, where rank 0 listens; torch would listen on every interface."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ours = LAUNCHER_VARIABLE in os.environ
    serves = environment.rank == 0 and (ours or not has_agent)
    address = ("127.0.0.1" if ours else environment.master_addr, environment.master_port)
    listening: dict[str, Any] = {}
    if serves and ours:
        listening["master_listen_fd"] = socket.create_server(address).detach()
    store = dist.TCPStore(
        *address, environment.world_size, is_master=serves, timeout=timeout,
        wait_for_workers=False, **listening,
    )  # fmt: skip
    # An agent that starts its ranks again keeps what the first ones wrote.
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def refuse_disagreement(comm: Comm, recipe: Recipe) -> None:
    """Raises LaunchError on the lowest rank that has another recipe than rank 0, or another version
    of this package, and PeerFailure on the others. Collective."""
    sections = recipe.model_dump(mode="json").items()
    own_facts = {"version of grpo-replay": __version__}
    own_facts |= {name: repr(section) for name, section in sections}
    facts = comm.all_gather(own_facts)

    def compare() -> None:
        """Raises LaunchError on a rank that differs; the message names the keys and all such."""
        differing = [rank for rank, rank_facts in enumerate(facts) if rank_facts != facts[0]]
        if comm.rank in differing:
            keys = ", ".join(key for key, value in facts[0].items() if own_facts.get(key) != value)
            raise LaunchError(
                f"{name_ranks(differing)} and rank 0 differ in: {keys}; give every rank the same "
                "recipe file, --set options and version of grpo-replay"
            )

    run_collectively(comm, compare)


def leave_run() -> None:
    """Wait for the other ranks, then destroy the process group. A launcher ends the remaining ranks
    as soon as one exits with an error code, and the group's threads would abort the interpreter."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
