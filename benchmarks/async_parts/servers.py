"""Real vLLM servers that outlive the runs which use them."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from grpo_replay.recipe import load_recipe
from grpo_replay.sampling.server.routes import Refused, Unreachable, VllmServer, block_on
from grpo_replay.sampling.server.server_process import LaunchedServer, launch_servers
from grpo_replay.sampling.vllm_requests import engine_arguments

START_SECONDS = 600.0
PROBE_SECONDS = 5.0


class Server:
    """One vLLM server at an address that stays the same when it is started again."""

    def __init__(self, recipe: str, folder: Path) -> None:
        self._recipe, self._folder = recipe, folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = VllmServer(self.url, "campaign")
        self._process: LaunchedServer | None = None

    def launch(self) -> None:
        """Start it, without waiting for it; what is left of an earlier one must have ended."""
        if self._process is not None:
            self._process.guard.wait(60)
        servers = ["sampling.servers.launch=1", f"sampling.servers.address=127.0.0.1:{self.port}"]
        recipe = load_recipe(self._recipe, servers)
        arguments = engine_arguments(
            recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=False
        )
        (self._process,) = launch_servers(
            recipe.sampling, arguments, on_gpu=False, log_folder=self._folder
        )

    def wait_until_healthy(self) -> float:
        """The seconds that it took."""
        started = time.monotonic()
        assert self._process is not None
        while not self.is_healthy():
            if self._process.exited() or time.monotonic() - started > START_SECONDS:
                raise SystemExit(f"{self.url} did not start:\n{self._process.log_tail()}")
            time.sleep(0.1)
        return time.monotonic() - started

    def is_healthy(self) -> bool:
        try:
            block_on(self.client.check_health(PROBE_SECONDS))
        except (Refused, Unreachable):
            return False
        return True

    def generated_tokens(self) -> float:
        """Since it started; 0 if it does not answer."""
        try:
            return block_on(self.client.generated_tokens(PROBE_SECONDS)) or 0.0
        except (Refused, Unreachable):
            return 0.0

    def processes(self) -> list[psutil.Process]:
        """Those of vLLM, its main process first; without the guard."""
        assert self._process is not None
        return psutil.Process(self._process.guard.pid).children(recursive=True)

    def kill(self) -> None:
        """SIGKILL to the main process."""
        self.processes()[0].kill()

    def signal_all(self, number: signal.Signals) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(process.pid, number)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


@contextlib.contextmanager
def servers(recipe: str, folder: Path, count: int, running: int | None = None) -> Iterator[list]:
    """`count` servers, of which the first `running` (all, if None) are launched and ready."""
    made = [Server(recipe, folder / "servers") for _ in range(count)]
    try:
        for server in made[:running]:
            server.launch()
        for server in made[:running]:
            server.wait_until_healthy()
        yield made
    finally:
        for server in made:
            server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], object], seconds: float) -> float | None:
    """The seconds until the condition holds, None if it does not in this time."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        if condition():
            return time.monotonic() - started
        time.sleep(0.1)
    return None
