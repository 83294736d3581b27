"""vLLM servers for tests: real ones are started, frozen, killed, and looked for afterwards; a fake
one is updated while it samples."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_policy_server import EOS, FakePolicyServer
from tiny_policy import Policy, make_requests, tiny_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.recipe import LoraSection, Recipe, ServersSection
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.server.dispatcher import Dispatcher, Job, Servers
from grpo_replay.sampling.server.routes import VllmServer
from grpo_replay.sampling.server.sampler import ADAPTERS_KEPT, VllmServerSampler
from grpo_replay.sampling.server.server_process import (
    LaunchedServer,
    launch_servers,
    wait_until_healthy,
)
from grpo_replay.sampling.vllm_requests import engine_arguments
from grpo_replay.types import Completion, Span

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


def launch(
    folder: Path, logs: Path, count: int, lora: LoraSection | None = None, **sampling: Any
) -> list[LaunchedServer]:
    """Servers of the model in `folder`, ready, with `lora` for adapters and the recipe's `sampling`
    settings."""
    recipe = tiny_recipe(
        folder,
        backend="vllm_server",
        servers={"launch": count, "address": f"127.0.0.1:{free_ports(count)[0]}"},
        **sampling,
    )
    model = recipe.model.model_copy(update={"lora": lora or LoraSection()})
    arguments = engine_arguments(
        recipe.sampling, model, recipe.longest_sequence, on_gpu=False, adapters=ADAPTERS_KEPT
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
    sampler = VllmServerSampler.open(SamplerOpening.from_recipe(recipe, str(policy.folder), Comm()))
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


def open_sampler(recipe: Recipe) -> VllmServerSampler:
    """The sampler of a run of one rank, for the recipe's own model."""
    return VllmServerSampler.open(SamplerOpening.from_recipe(recipe, recipe.model.path, Comm()))


def wait_for(condition: Any, seconds: float) -> bool:
    """Whether the condition holds within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())


def sampled_during(
    update: Callable[[], None],
    server: FakePolicyServer,
    run: str,
    version: int,
    with_adapters: bool = False,
) -> tuple[Completion, tuple[Span, ...], int]:
    """A completion that was in flight during the update, its spans, and how often it was sent
    again."""
    found: list[tuple[Completion, tuple[Span, ...], int]] = []

    async def play() -> None:
        section = ServersSection(max_in_flight=1, request_timeout_seconds=30.0)
        client = VllmServer(server.url, run, with_adapters=with_adapters)
        servers = Servers([client], section)
        done = asyncio.Event()
        dispatcher: Dispatcher[Job] = Dispatcher(
            servers,
            (EOS,),
            tuple,
            lambda job, *answer: found.append((*answer, job.tries)) or done.set(),
            lambda job, reason: pytest.fail(reason),
            version,
        )
        dispatcher.waiting.append(Job(replace(make_requests(count=1)[0], seed=3)))
        dispatcher.fill()
        assert await asyncio.to_thread(server.holding.wait, 10)
        await asyncio.to_thread(update)
        await asyncio.wait_for(done.wait(), 10)
        await dispatcher.close()

    asyncio.run(play())
    return found[0]
