"""Real vLLM servers for tests: started, frozen, killed, and looked for afterwards."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tiny_policy import Policy, tiny_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.server.routes import VllmServer
from grpo_replay.sampling.server.sampler import VllmServerSampler
from grpo_replay.sampling.server.server_process import (
    LaunchedServer,
    launch_servers,
    wait_until_healthy,
)
from grpo_replay.sampling.vllm_requests import engine_arguments

START_SECONDS = 240


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on; the first `count` of a free stretch."""
    for base in range(8300 + os.getpid() % 400 * 20, 60000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return list(range(base, base + count))
    raise AssertionError("no free ports")


def launch(folder: Path, logs: Path, count: int) -> list[LaunchedServer]:
    """Servers of the model in `folder`, ready."""
    recipe = tiny_recipe(
        folder,
        backend="vllm_server",
        servers={"launch": count, "address": f"127.0.0.1:{free_ports(count)[0]}"},
    )
    arguments = engine_arguments(
        recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=False
    )
    servers = launch_servers(recipe.sampling, arguments, on_gpu=False, log_folder=logs)
    clients = [VllmServer(server.url, "tests") for server in servers]
    try:
        wait_until_healthy(servers, clients, START_SECONDS)
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


@contextlib.contextmanager
def http_sampler(
    policy: Policy, servers: Sequence[LaunchedServer], **settings: Any
) -> Iterator[VllmServerSampler]:
    """A sampler on the URLs of running servers, closed afterwards; the servers go on."""
    section = {"urls": [server.url for server in servers], **settings}
    recipe = tiny_recipe(policy.folder, backend="vllm_server", servers=section)
    sampler = VllmServerSampler.open(SamplerOpening.of(recipe, str(policy.folder), Comm()))
    try:
        yield sampler
    finally:
        sampler.close()


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _, found = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(found) == group and state != "Z":
            members.append(int(entry.name))
    return members


def kill_server(server: LaunchedServer) -> None:
    """SIGKILL to the server's main process, the guard's child: what an operator or the kernel's
    memory killer does."""
    kill_child_of(server.guard.pid)


def kill_child_of(guard: int) -> None:
    children = Path(f"/proc/{guard}/task/{guard}/children").read_text()
    os.kill(int(children.split()[0]), signal.SIGKILL)


@contextlib.contextmanager
def frozen(server: LaunchedServer) -> Iterator[None]:
    """The server hangs: its processes are stopped, its connections stay open."""
    members = [pid for pid in group_members(server.guard.pid) if pid != server.guard.pid]
    for pid in members:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in members:
            os.kill(pid, signal.SIGCONT)


def wait_for(condition: Any, seconds: float) -> bool:
    """Whether the condition holds within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())
