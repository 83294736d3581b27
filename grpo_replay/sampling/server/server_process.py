"""Launches vLLM servers on the machine of a run, and stops them when it ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_replay.distributed.environment import (
    GPUS_VARIABLE,
    PYTHON_MODULE,
    import_path,
    named_gpus,
    rank_environment,
)
from grpo_replay.errors import RecipeError, SamplerError
from grpo_replay.recipe import SamplingSection, ServersSection
from grpo_replay.sampling.server import guard as server_guard
from grpo_replay.sampling.server.routes import (
    CONTROL_SECONDS,
    Refused,
    Unreachable,
    VllmServer,
    block_on,
)
from grpo_replay.sampling.vllm_requests import set_environment

MODEL_NAME = "policy"
ON_BY_DEFAULT = ("enable_prefix_caching", "async_scheduling", "enable_chunked_prefill")
"""EngineArgs that vLLM turns on by default: `false` needs an explicit `--no-` option."""
LOG_LINES = 15
POLL_SECONDS = 0.3
STOP_SECONDS = 20.0
PORT_SECONDS = 8.0
"""Maximum wait for a port, which the server of a killed run keeps until `guard` ends it."""
START_SECONDS = 1800.0
"""Maximum time until a launched server is ready: with a large model it reads weights, compiles and
captures graphs. A server that ends earlier is noticed at once."""

TRAINER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CONFIGURE_LOGGING",
)  # fmt: skip
"""Variables of the trainer's processes that a server must not inherit."""


@dataclass(frozen=True, slots=True)
class LaunchedServer:
    url: str
    log: Path
    guard: subprocess.Popen

    def exited(self) -> bool:
        return self.guard.poll() is not None

    def stop(self) -> None:
        """End the server and everything it started. May be called twice."""
        if not self.exited():
            self.guard.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.guard.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # the guard has ended the group
            os.killpg(self.guard.pid, signal.SIGKILL)
        self.guard.wait()


def log_tail(log: Path) -> str:
    """Returns the path and the last lines of a log, for messages."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = text.splitlines()
    return "\n".join([f"its log is {log}:", *lines[-LOG_LINES:]])


def launch_servers(
    sampling: SamplingSection, arguments: Mapping[str, Any], on_gpu: bool, log_folder: Path | None
) -> list[LaunchedServer]:
    """Start `sampling.servers.launch` servers on consecutive ports, without waiting for them.
    Raises the errors of `refuse_ranks_elsewhere` and `devices_of_servers`."""
    settings, environment = sampling.servers, rank_environment()
    ranks_here = environment.local_world_size
    refuse_ranks_elsewhere(settings.launch, ranks_here, environment.world_size)
    devices = devices_of_servers(sampling, ranks_here, on_gpu)
    folder = log_folder or Path(tempfile.mkdtemp(prefix="grpo-replay-servers-"))
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _launch(
            server_command(arguments, settings.host, port),
            _server_environment(device, on_gpu),
            settings.host,
            port,
            folder,
        )
        for port, device in zip(_ports(settings), devices, strict=True)
    ]


def server_command(arguments: Mapping[str, Any], host: str, port: int) -> list[str]:
    """Return the command line of a server with the EngineArgs `arguments` as options."""
    command = [sys.executable, *PYTHON_MODULE, "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is True:
            command.append(f"--{option}")
        elif value is False:
            if name in ON_BY_DEFAULT:
                command.append(f"--no-{option}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, Mapping | list) else str(value)
            command += [f"--{option}", text]
    command += ["--host", host, "--port", str(port), "--served-model-name", MODEL_NAME]
    # Enables /inference/v1/generate: token ids in, token ids and weight versions out.
    return [*command, "--enable-scale-out", "--uvicorn-log-level", "warning"]


def devices_of_servers(
    sampling: SamplingSection, ranks_here: int, on_gpu: bool
) -> Sequence[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each server on this machine (`server_devices`); None on a CPU.
    Raises SamplerError if a port is taken, RecipeError without enough GPUs besides the ranks'."""
    launch, size = sampling.servers.launch, sampling.vllm.tensor_parallel_size
    for port in _ports(sampling.servers):
        _refuse_taken_port(sampling.servers.host, port)
    if not on_gpu:
        return [None] * launch
    return server_devices(_visible_devices(), ranks_here, launch, size)


def server_devices(
    visible: Sequence[str], ranks_here: int, servers: int, tensor_parallel_size: int
) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each server: the GPUs after those of the ranks here, in order.
    Raises RecipeError if there are too few.

    With GPUs 0 to 3, two ranks and two servers of one GPU: ["2", "3"].
    """
    needed = servers * tensor_parallel_size
    free = list(visible[ranks_here:])
    if len(free) < needed:
        raise RecipeError(
            f"sampling.servers.launch {servers} with sampling.vllm.tensor_parallel_size "
            f"{tensor_parallel_size} needs {needed} GPUs in addition to the {ranks_here} of the "
            f"ranks on this machine, but {len(free)} of {len(visible)} are left: lower one of "
            "them, start fewer ranks, set sampling.servers.urls, or share GPUs with "
            "sampling.backend vllm"
        )
    size = tensor_parallel_size
    return [",".join(free[i * size : (i + 1) * size]) for i in range(servers)]


def wait_until_healthy(
    launched: Sequence[LaunchedServer], clients: Sequence[VllmServer], limit: float = START_SECONDS
) -> None:
    """Wait until the servers are healthy; `clients` are in the same order. Raises SamplerError with
    the end of the log if a server exits, or after `limit` seconds."""
    deadline = time.monotonic() + limit
    for server, client in zip(launched, clients, strict=True):
        while not _is_healthy(client):
            if server.exited() or time.monotonic() > deadline:
                reason = "ended before" if server.exited() else f"took more than {limit:g} s until"
                raise SamplerError(
                    f"the vLLM server at {server.url} {reason} it was ready; {log_tail(server.log)}"
                )
            time.sleep(POLL_SECONDS)


def _is_healthy(client: VllmServer) -> bool:
    try:
        block_on(client.check_health(CONTROL_SECONDS))
    except (Refused, Unreachable):
        return False
    return True


def _launch(
    command: list[str], environment: dict[str, str], host: str, port: int, folder: Path
) -> LaunchedServer:
    """Starts one server under a `guard`, which ends it with this process; its output is appended to
    a log. The address is one that clients here can reach."""
    log = folder / f"vllm-server-{port}.log"
    guarded = [sys.executable, "-P", server_guard.__file__, str(os.getpid()), *command]
    with log.open("ab") as output:
        guard = subprocess.Popen(
            guarded,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    reachable = f"[{reachable}]" if ":" in reachable else reachable
    return LaunchedServer(f"http://{reachable}:{port}", log, guard)


def _server_environment(device: str | None, on_gpu: bool) -> dict[str, str]:
    """Returns a server's environment: ours without what makes this process a rank, with vLLM's
    routes for weights and adapters turned on, and the server's GPUs."""
    environment = {k: v for k, v in os.environ.items() if k not in TRAINER_VARIABLES}
    environment |= import_path()
    set_environment(environment, on_gpu)
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # the routes that update weights
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # and adapters
    if device is not None:
        environment[GPUS_VARIABLE] = device
    return environment


def _visible_devices() -> list[str]:
    import torch

    named = named_gpus()
    if named is not None:
        return named
    return [str(index) for index in range(torch.cuda.device_count())]


def refuse_ranks_elsewhere(launch: int, ranks_here: int, ranks: int) -> None:
    """Raises RecipeError if not all ranks are on the machine that launches the servers."""
    if ranks_here < ranks:
        raise RecipeError(
            f"sampling.servers.launch {launch}: {ranks_here} of the {ranks} ranks are on this "
            "machine, and the others could not reach servers launched here: start the servers "
            "yourself and set sampling.servers.urls to addresses that all machines can reach"
        )


def _ports(settings: ServersSection) -> range:
    return range(settings.base_port, settings.base_port + settings.launch)


def _refuse_taken_port(host: str, port: int) -> None:
    """Raises SamplerError if the port is still taken after `PORT_SECONDS`."""
    deadline = time.monotonic() + PORT_SECONDS
    while problem := _bind_problem(host, port):
        if time.monotonic() > deadline:
            raise SamplerError(
                f"cannot launch a vLLM server on {host}:{port}: {problem}; set "
                "sampling.servers.address to a free port, or stop the program that uses it"
            )
        time.sleep(POLL_SECONDS)


def _bind_problem(host: str, port: int) -> str | None:
    """Returns why the port cannot be bound; None if it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror
    return None
