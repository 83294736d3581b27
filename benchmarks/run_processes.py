"""Training runs as processes of their own, for the campaigns that kill them or look at them."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from kill_windows import Window, arm

from grpo_replay.distributed import launch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["__main__", "grpo_replay.cli.app", "grpo_replay.training.run", "deepspeed", "pandas"]
)
# The server of the forks finds modules by this variable only (CPython 3.11).
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
_WINDOW = "KILL_WINDOW"


class Forked:
    """One attempt of a run, forked from a process that has loaded torch and DeepSpeed: a campaign
    of many attempts need not wait for their import each time."""

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        window: Window,
        variables: Mapping[str, str] = {},
        launches: bool = False,
    ) -> None:
        """`words` are the arguments of `grpo-replay`, `variables` those of a rank. The attempt, or
        rank 0 of those that it `launches`, kills in the `window`."""
        arguments = (list(words), str(log), window, dict(variables), launches)
        self._process = _context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("grpo-replay", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(
    words: list[str], log: str, window: Window, variables: dict[str, str], launches: bool
) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(variables)
    if launches:
        os.environ[_WINDOW] = json.dumps(asdict(window))
        launch.launch_ranks = partial(launch.launch_ranks, program=[__file__])
    else:
        arm(window)
    sys.argv = ["grpo-replay", *words]
    from grpo_replay.cli.app import main

    main()


def _run_rank() -> None:
    """A rank that a launcher of `_run` started, with the arguments of this process."""
    if os.environ["RANK"] == "0":
        arm(Window(**json.loads(os.environ[_WINDOW])))
    from grpo_replay.cli.app import main

    main()


@dataclass(frozen=True)
class RunProcess:
    """A run directory, and the command that trains in it."""

    recipe: str
    folder: Path
    overrides: Sequence[str]

    def words(self) -> list[str]:
        """The command line, which resumes a run that is there. Makes the folder for its log."""
        words = ["train", self.recipe, "--output-dir", str(self.folder)]
        if (self.folder / "recipe.yaml").exists():
            words.append("--resume")
        for override in self.overrides:
            words += ["--set", override]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return words

    @property
    def log(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps_since(self, moment: float) -> int:
        """The steps in metrics.jsonl if it was written after `moment` (`time.time()`), else 0: an
        attempt that resumes first cuts the file down to its checkpoint."""
        path = self.folder / "metrics.jsonl"
        written = path.exists() and path.stat().st_mtime > moment
        return len(self.metrics()) if written else 0


def living(members: Sequence[psutil.Process]) -> list[psutil.Process]:
    found = []
    for member in members:
        try:
            if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                found.append(member)
        except psutil.NoSuchProcess:
            continue
    return found


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


if __name__ == "__main__":
    _run_rank()
