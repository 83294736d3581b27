"""Attempts of a run forked from a process that has loaded torch and DeepSpeed: a campaign of many
attempts need not wait for their import each time."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from async_parts.windows import Window, arm

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["__main__", "grpo_replay.cli.app", "grpo_replay.training.run", "deepspeed", "pandas"]
)
# The server of the forks finds modules by this variable only (CPython 3.11).
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)


class Forked:
    """One attempt, with the methods of Popen that campaigns use."""

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        window: Window | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`words` are the arguments of `grpo-replay`, `variables` those of a rank. The attempt
        kills itself in the `window`."""
        arguments = (list(words), str(log), window, dict(variables or {}))
        self._process = _context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("grpo-replay", timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _run(words: list[str], log: str, window: Window | None, variables: dict[str, str]) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(variables)
    if window is not None:
        arm(window)
    sys.argv = ["grpo-replay", *words]
    from grpo_replay.cli.app import main

    main()
