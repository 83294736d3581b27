"""How ranks find each other: torch's store, a roll call that names missing ranks, and torchrun's
agent for the ranks of one node."""

import datetime
import functools
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from grpo_replay import __version__
from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import RankEnvironment, rank_environment, threads_per_rank
from grpo_replay.distributed.failures import (
    PeerFailure,
    describe_disagreement,
    name_ranks,
)
from grpo_replay.errors import LaunchError
from grpo_replay.recipe import EngineSection, Recipe
from grpo_replay.terminal.quiet import loading_libraries


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
    torch.set_num_threads(threads_per_rank(settings.threads_per_process, ranks_here))
    backend = "nccl" if device.type == "cuda" else "gloo"
    if environment.world_size == 1:
        # torch would keep its last 2,000 collectives with their stacks, for ranks that hang: 5 MB.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
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
    return join_run(environment, facts, recipe.engine.timeout_seconds)


_LINGER_SECONDS = 10.0
_CLAIM_SECONDS = 5.0
_CLOSE_SECONDS = 30.0
_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 30
_LOOPBACK = ("127.0.0.1", "localhost")

_joined: tuple[RankEnvironment, dist.Store] | None = None


def join_run(
    environment: RankEnvironment, facts: Mapping[str, Any], timeout_seconds: float
) -> dist.Store:
    """The store that the ranks share, once every rank has arrived and agrees with rank 0.

    `facts` are JSON values that must be equal everywhere (the resolved recipe, versions). Within
    `timeout_seconds` every rank returns or raises: LaunchError on one rank, and PeerFailure on the
    others. Ranks that reach nobody each raise LaunchError.
    """
    global _joined
    store = _open_store(environment, timeout_seconds)
    _joined = (environment, store)
    # `default` because a recipe may hold paths; they only have to compare equal.
    store.set(f"arrived/{environment.rank}", json.dumps(dict(facts), default=str))
    store.add("arrivals", 1)
    try:
        _refuse_disagreement(environment, _roll_call(environment, store, timeout_seconds))
    except LaunchError:
        _linger(environment, store)
        raise
    return store


def _open_store(environment: RankEnvironment, timeout_seconds: float) -> dist.Store:
    if environment.world_size == 1:
        return dist.HashStore()  # no port: several single runs may share a machine
    # Under torchrun the agent of the first node hosts the store; else rank 0 does.
    hosts = environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    place = f"{environment.master_addr}:{environment.master_port}"
    here = socket.gethostname()
    try:
        if not hosts:
            _wait_until_reachable(environment, timeout_seconds)
        store = _tcp_store(
            environment.master_addr,
            environment.master_port,
            is_master=hosts,
            timeout=datetime.timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError, OSError) as error:
        text = str(error).splitlines()[0]
        if hosts:
            raise LaunchError(
                f"rank 0 cannot listen on {place}: {text}; set MASTER_ADDR to an address of "
                f"this machine ({here}) and MASTER_PORT to a free port"
            ) from error
        raise LaunchError(
            f"rank {environment.rank} on {here} cannot reach rank 0 at {place} within "
            f"{timeout_seconds:.0f} s: {text}; is rank 0 running there, and does a firewall let "
            "the port through?"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"grpo_replay/{attempt}", store)


def _tcp_store(host: str, port: int, is_master: bool, **settings: Any) -> dist.TCPStore:
    """As torch's TCPStore. One that it hosts at a loopback address listens only there; torch's own
    would listen on every interface."""
    if not is_master or host not in _LOOPBACK:
        return dist.TCPStore(host, port, is_master=is_master, **settings)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    port = listener.getsockname()[1]
    # The store owns the socket from here on.
    given = {**settings, "master_listen_fd": listener.detach(), "multi_tenant": False}
    return dist.TCPStore("127.0.0.1", port, is_master=True, **given)


def _wait_until_reachable(environment: RankEnvironment, timeout_seconds: float) -> None:
    """Raises OSError if nothing listens there in time. torch's client would print stack traces."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            address = (environment.master_addr, environment.master_port)
            socket.create_connection(address, timeout=left).close()
            return
        except OSError:
            if time.monotonic() + _POLL_SECONDS >= deadline:
                raise
        time.sleep(_POLL_SECONDS)


def _roll_call(
    environment: RankEnvironment, store: dist.Store, timeout_seconds: float
) -> list[dict[str, Any]]:
    """The facts of every rank, once all have arrived."""
    keys = [f"arrived/{rank}" for rank in range(environment.world_size)]
    deadline = time.monotonic() + timeout_seconds
    while store.add("arrivals", 0) < environment.world_size:
        if time.monotonic() > deadline:
            _report_missing(environment, [bool(store.check([key])) for key in keys])
        time.sleep(_POLL_SECONDS)
    return [json.loads(store.get(key)) for key in keys]


def _report_missing(environment: RankEnvironment, arrived: Sequence[bool]) -> None:
    """Raises LaunchError on the lowest rank that arrived, PeerFailure on the others."""
    if arrived.index(True) != environment.rank:
        raise PeerFailure("ranks are missing; the lowest rank that arrived reports it", 4)
    missing = [rank for rank, there in enumerate(arrived) if not there]
    raise LaunchError(
        f"{name_ranks(missing)} of {environment.world_size} did not arrive at "
        f"{environment.master_addr}:{environment.master_port}: see what those ranks printed, and "
        "whether their machines reach this address"
    )


def _refuse_disagreement(environment: RankEnvironment, facts: Sequence[Mapping[str, Any]]) -> None:
    lines = describe_disagreement(facts)
    if lines is None:
        return
    message = (
        f"the ranks disagree on the run, so none of them started:\n{lines}\n"
        "give every rank the same recipe file, --set options and version of grpo-replay"
    )
    raise LaunchError(message) if environment.rank == 0 else PeerFailure(message, 4)


def _linger(environment: RankEnvironment, store: dist.Store) -> None:
    """Rank 0 may host the store, so it leaves last: the others still read the failure there."""
    try:
        count = store.add("left", 1)
        deadline = time.monotonic() + _LINGER_SECONDS
        while environment.rank == 0 and time.monotonic() < deadline:
            if count >= store.add("arrivals", 0):
                return
            time.sleep(_POLL_SECONDS)
            count = store.add("left", 0)
    except RuntimeError:
        return


def form_process_group(
    environment: RankEnvironment, store: dist.Store, backend: str, timeout_seconds: float
) -> None:
    """Make torch's default process group over the store of `join_run`; DeepSpeed adopts it.

    Raises LaunchError if the ranks cannot connect to each other.
    """
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:
        raise LaunchError(
            f"rank {environment.rank} on {socket.gethostname()} found the other ranks but cannot "
            f"connect to them ({backend}): {str(error).splitlines()[0]}; name the network "
            "interface that they share in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from error


def has_joined() -> bool:
    """Whether this rank shares a store with the others, which `claim_report` needs."""
    return _joined is not None


def own_connection(timeout_seconds: float) -> dist.Store:
    """The store of `join_run` over a connection of its own, for a thread. On the shared connection
    the thread would have to wait while the main thread waits."""
    assert _joined is not None
    store: dist.Store = _joined[1].clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    store.set_timeout(datetime.timedelta(seconds=timeout_seconds))
    return store


def claim_report() -> bool:
    """Whether this rank should report its failure: it is the first one, or cannot know.

    If the store is gone, every rank reports: its host may have been killed without a word, and a
    message on every rank is better than none.
    """
    assert _joined is not None
    environment, store = _joined
    try:
        store.set_timeout(datetime.timedelta(seconds=_CLAIM_SECONDS))
        holder = store.compare_set("reported", "", str(environment.rank))
    except RuntimeError:
        return True
    return holder.decode() == str(environment.rank)


def wait_for_rank_0() -> None:
    """Return when rank 0 is here too, or after 30 s."""
    if _joined is None:
        return
    environment, store = _joined
    try:
        if environment.rank == 0:
            store.set("closed", "")
        else:
            store.wait(["closed"], datetime.timedelta(seconds=_CLOSE_SECONDS))
    except RuntimeError:  # rank 0 and its store are gone, or it takes too long
        return
    _linger(environment, store)


def leave_run() -> None:
    """Destroy the process group, once every rank is done with it.

    Otherwise its threads abort the interpreter at exit ("terminate called without an active
    exception"). Rank 0 waits for the others, because it may host their store.
    """
    global _joined
    if _joined is not None:
        _linger(*_joined)
        _joined = None
    if dist.is_initialized():
        dist.destroy_process_group()


def run_agent(command: Sequence[str], num_processes: int) -> dict[int, int]:
    """{rank: exit code} of the ranks that failed, empty when all succeeded.

    torchrun's own agent, in this process: when one rank fails the others get SIGTERM, and SIGKILL
    30 s later. Ranks run in sessions of their own; a negative exit code is a signal.
    """
    import torch.distributed.elastic.multiprocessing.api
    import torch.distributed.run  # noqa: F401  (creates the loggers to quieten)
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

    # The two stores of an agent. No other node is to reach them.
    own_store = partial(_tcp_store, is_master=True, timeout=datetime.timedelta(minutes=5))
    handler = dynamic_rendezvous.DynamicRendezvousHandler
    handler._create_tcp_store_server = lambda _, *place: own_store(*place)  # type: ignore[method-assign]
    c10d_rendezvous_backend.TCPStore = _tcp_store  # type: ignore[assignment,misc]

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"grpo-replay-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        # The launcher passes signals on itself: the agent would kill ranks that are still
        # writing their checkpoint.
        signals_to_handle="SIGUSR2",
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}
