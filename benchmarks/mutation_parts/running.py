"""Runs tests in forks of one process that has the libraries loaded, each in its own copy of the
repository, so that processes started by a test see the same package."""

import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mutation_parts.lines import LINES_VARIABLE
from mutation_parts.lines import __file__ as LINES_FILE

NOT_COPIED = (".git", ".venv", "runs", "build", "dist", "__pycache__", ".*_cache")
POLL_SECONDS = 0.02
FAILED = 70
"""Exit code of a fork whose own work failed: it says nothing about a mutant."""
HEAVY = (
    "torch", "transformers", "deepspeed", "datasets", "pyarrow.parquet", "scipy.stats", "typer",
    "tokenizers", "tensorboard", "msgspec", "zmq.asyncio", "hypothesis", "peft",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """`work(copy)` runs in a fork, in the folder `copy`, and returns its exit code. `changed` is a
    file to overwrite before, and its text. `log` gets what the fork prints."""

    name: str
    work: Callable[[Path], int]
    limit_seconds: float
    log: Path
    changed: tuple[str, str] | None = None


@dataclass(frozen=True)
class Outcome:
    """`code` is None if the time limit ended the fork."""

    task: Task
    code: int | None
    seconds: float


def load_libraries() -> None:
    """Load what tests need, so that forks need not."""
    for name in HEAVY:
        try:
            __import__(name)
        except ImportError:
            print(f"not installed: {name}", file=sys.stderr)


def make_copies(root: Path, folder: Path, count: int) -> list[Path]:
    """Copies of the repository. Their byte code is checked by its source, not by its time: a
    changed file may have the size and the second of the file before it."""
    copies = []
    for number in range(count):
        copy = (folder / f"copy{number}").resolve()
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        shutil.copy(LINES_FILE, copy / "sitecustomize.py")
        compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
        os.spawnv(os.P_WAIT, sys.executable, [*compiled, str(copy / "grpo_replay")])
        copies.append(copy)
    return copies


def run_tasks(tasks: Iterable[Task], copies: list[Path]) -> Iterator[Outcome]:
    """Run as many tasks at once as there are copies. Yields outcomes as they come."""
    waiting, free = iter(tasks), list(copies)
    running: dict[int, tuple[Task, Path, float]] = {}
    while True:
        while free and (task := next(waiting, None)):
            copy = free.pop()
            running[_fork(task, copy)] = (task, copy, time.monotonic())
        if not running:
            return
        for pid, code in _ended(running):
            task, copy, started = running.pop(pid)
            end_group(pid)  # what its tests started
            if task.changed:
                write(copy / task.changed[0], (copy / f"{task.changed[0]}.kept").read_text())
            free.append(copy)
            yield Outcome(task, code, time.monotonic() - started)
        time.sleep(POLL_SECONDS)


def _ended(running: dict[int, tuple[Task, Path, float]]) -> list[tuple[int, int | None]]:
    ended: list[tuple[int, int | None]] = []
    for pid, (task, _, started) in running.items():
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended.append((pid, os.waitstatus_to_exitcode(status)))
        elif time.monotonic() - started > task.limit_seconds:
            end_group(pid)
            os.waitpid(pid, 0)
            ended.append((pid, None))
    return ended


def end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _fork(task: Task, copy: Path) -> int:
    if task.changed:
        path, text = task.changed
        shutil.copy(copy / path, copy / f"{path}.kept")
        write(copy / path, text)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        os.setsid()
        output = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ.update(PYTHONPATH=str(copy), OMP_NUM_THREADS="1")
        os.environ.pop(LINES_VARIABLE, None)
        code = task.work(copy)
        sys.stdout.flush()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
