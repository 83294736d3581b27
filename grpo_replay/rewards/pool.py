"""A pool of verifier processes, each driven by its own thread.

Tasks with the same reference answer are queued for the same worker, which has already parsed it; an
idle worker takes a task from the longest queue. A worker has one task at a time, so a quick task
never waits behind a slow one while another worker is free. A worker that exceeds the time limit or
ends is replaced, and only its task fails. A task that runs out of memory or crashes in a worker
that had answered before is retried once in a fresh worker, so a verdict never depends on earlier
tasks.

No library's process pool is used: none (concurrent.futures, pebble, loky) ends the programs that a
task has started, or distinguishes a task that was killed from one that crashed.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from grpo_replay.distributed.environment import PYTHON_MODULE, import_path
from grpo_replay.errors import GrpoReplayError, RecipeError
from grpo_replay.terminal.console import printable

START_TIMEOUT_SECONDS = 120.0
LOGGED_LINES = 200
"""Maximum lines of a worker's output that are logged."""
LONGEST_LINE = 1_000
"""Maximum bytes of a line of output that are logged as one line."""

Task = tuple[list[Any], bytes]
"""The caller's identifiers of the completions of one prompt, and the completions as JSON."""
Answers = list[list[dict[str, Any]]]
"""The answers of each function to a task, in order. Shorter than the functions if the time limit or
a crash ended the last function in it."""
OnAnswers = Callable[[list[Any], Answers], None]

logger = logging.getLogger(__name__)


class VerifierPool:
    """`workers` processes, each of which grades with all `functions`.

    Its threads call `on_answers(task, answers)` per task, `on_failure(error)` if a start fails.
    """

    def __init__(
        self,
        functions: Sequence[str],
        workers: int,
        time_limit_seconds: float,
        memory_limit_mib: int,
        on_answers: OnAnswers,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Starts a thread for each worker, which starts its process; limits are per completion
        (seconds) and per process (MiB)."""
        self._functions = functions
        self._time_limit = time_limit_seconds
        self._memory_limit_mib = memory_limit_mib
        self._on_answers = on_answers
        self._on_failure = on_failure
        self._queues: list[deque[Task]] = [deque() for _ in range(workers)]
        self._wake = threading.Condition()
        self._closing = False
        self._ready = threading.Event()
        self.sources: dict[str, str] = {}
        """SHA-256 of the source file of each function of the user, once a worker is ready."""
        self.needs_whole_group = False
        """Whether a function gets all completions of a prompt together, once a worker is ready."""
        self._processes: dict[int, VerifierProcess] = {}
        self._threads = [
            threading.Thread(
                target=self._drive, args=(index,), daemon=True, name=f"verifier-{index}"
            )
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: Task, affinity: int) -> None:
        """Queue a task; tasks of equal `affinity` prefer the same worker."""
        with self._wake:
            self._queues[affinity % len(self._queues)].append(task)
            self._wake.notify_all()

    def wait_ready(self) -> None:
        """Wait until a worker is ready or cannot be started."""
        self._ready.wait()

    def close(self) -> None:
        """Kill the workers and wait for their threads. May be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
            for process in self._processes.values():
                process.kill()
        for thread in self._threads:
            thread.join()

    def _drive(self, index: int) -> None:
        """Thread of worker `index`: starts a process, and a new one whenever it must be replaced,
        until the pool closes. An error ends the thread: `on_failure` gets it, `wait_ready`
        returns."""
        try:
            while (process := self._start(index)) is not None:
                try:
                    self._serve(process, index)
                finally:
                    process.reap()
        except Exception as error:
            self._on_failure(error)
            self._ready.set()

    def _start(self, index: int) -> "VerifierProcess | None":
        """Start a worker and wait until it is ready; None if the pool closes. Raises RecipeError if
        a function does not load in time, GrpoReplayError if the process ends before."""
        with self._wake:
            if self._closing:
                return None
            process = self._processes[index] = VerifierProcess(
                self._functions, self._memory_limit_mib
            )
        try:
            self._note_sources(process.wait_ready())
        except BaseException as error:
            process.reap()
            if not isinstance(error, OSError):
                raise
            if self._closing:
                return None
            if isinstance(error, TimeoutError):
                raise RecipeError(
                    f"reward.function {', '.join(self._functions)}: not loaded after "
                    f"{START_TIMEOUT_SECONDS:.0f} s; find out what its file waits for when it is "
                    "imported"
                ) from error
            raise GrpoReplayError(
                f"verifier worker {index} ended before it was ready; the usual cause is too little "
                f"memory. It printed: {process.last_printed() or 'nothing'}"
            ) from error
        self._ready.set()
        return process

    def _note_sources(self, ready: dict[str, Any]) -> None:
        """Store what a ready worker reports: digests of the functions' source files, and whether
        one needs whole groups. Raises RecipeError if an earlier worker had other sources."""
        sources, self.needs_whole_group = ready["sources"], ready["needs_whole_group"]
        with self._wake:
            self.sources = self.sources or sources
        edited = [name for name, digest in sources.items() if digest != self.sources[name]]
        if edited:
            raise RecipeError(
                f"the source file of reward.function {', '.join(edited)} was edited while the run "
                "uses it: a new worker would grade by another reward. Restore the file, and resume"
            )

    def _serve(self, process: "VerifierProcess", index: int) -> None:
        """Send tasks to the worker until the pool closes or the worker must be replaced. A worker
        that had answered before and then crashes leaves its task to a fresh one."""
        while (task := self._take(index)) is not None:
            answers, failure = process.ask(task, self._time_limit * len(task[0]))
            if self._closing:
                return
            if failure in ("memory", "crash") and process.answered > 0:
                with self._wake:
                    self._queues[index].appendleft(task)  # for a fresh worker
                return
            self._on_answers(task[0], answers)
            if failure:
                return
            process.answered += 1

    def _take(self, index: int) -> Task | None:
        with self._wake:
            while not self._closing and not any(self._queues):
                self._wake.wait()
            if self._closing:
                return None
            return (self._queues[index] or max(self._queues, key=len)).popleft()


class VerifierProcess:
    """A child process that runs `grpo_replay.rewards.verifier_worker`, and this end of its socket.
    Messages are ASCII JSON, one per line.

    The thread that starts it must outlive it: Linux kills the child when that thread ends.
    """

    def __init__(self, functions: Sequence[str], memory_limit_mib: int) -> None:
        """Starts the process in a session of its own, and a thread that logs its output."""
        self.answered = 0
        self._functions = functions
        self._received = b""
        self._printed: deque[str] = deque(maxlen=5)
        self._socket, child_socket = socket.socketpair()
        with child_socket:
            names = json.dumps(list(functions))
            arguments = [names, memory_limit_mib, os.getpid(), child_socket.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-u", *PYTHON_MODULE, "grpo_replay.rewards.verifier_worker"]
                + [str(argument) for argument in arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[child_socket.fileno()],
                env=_environment(),
                start_new_session=True,  # a group, so that programs it starts are killed too
            )
        threading.Thread(target=self._log_output, daemon=True, name="verifier output").start()

    def wait_ready(self) -> dict[str, Any]:
        """Wait until all functions are loaded. Returns `sources`, the SHA-256 of the source file of
        each function of the user, and `needs_whole_group`. Raises OSError if the process ends or
        takes too long, RecipeError if a function cannot be loaded."""
        message = self._receive(time.monotonic() + START_TIMEOUT_SECONDS)
        if "failed" in message:
            raise RecipeError(
                f"reward.function {', '.join(map(repr, self._functions))} cannot be loaded: "
                f"{message['failed']}; expected module:function importable from the current folder "
                "or the environment, or file.py:function"
            )
        return message

    def ask(self, task: Task, limit_seconds: float) -> tuple[Answers, str]:
        """Return the answers of all functions to a task, and why the process cannot be used again:
        "timeout", "crash" or "memory"; "" if it can."""
        answers: Answers = []
        deadline = time.monotonic() + limit_seconds
        try:
            self._socket.settimeout(limit_seconds)  # a stopped process does not read
            self._socket.sendall(task[1] + b"\n")
            for _ in self._functions:
                answers.append(self._receive(deadline))
        except TimeoutError:
            return [*answers, [{"status": "timeout"}] * len(task[0])], "timeout"
        except OSError:
            reason = f"its process {self._exit_reason()}"
            return [*answers, [{"status": "crash", "error": reason}] * len(task[0])], "crash"
        statuses = {answer["status"] for function in answers for answer in function}
        return answers, "memory" if "memory" in statuses else ""

    def _receive(self, deadline: float) -> Any:
        """Receives the next message, JSON in one line. Raises TimeoutError after the `deadline`
        (`time.monotonic`), another OSError if the process is gone."""
        while b"\n" not in self._received:
            # Read even after the deadline: this thread may not have been scheduled meanwhile.
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise BrokenPipeError
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _exit_reason(self) -> str:
        """Returns how the process ended, for messages, and kills what it has started."""
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        self._kill_group()
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def last_printed(self) -> str:
        """Returns the last lines that the process printed."""
        return " / ".join(self._printed)

    def _log_output(self) -> None:
        """Log the output of the process, at most `LOGGED_LINES` lines of it."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for number, line in enumerate(iter(lambda: output.readline(LONGEST_LINE), b"")):
                text = printable(line.decode("utf-8", "replace").rstrip())
                if number < LOGGED_LINES:
                    self._printed.append(text)
                    logger.info("a reward function printed: %s", text)
                elif number == LOGGED_LINES:
                    logger.info("a reward function printed more, which is not logged")

    def kill(self) -> None:
        """Kill the process and its group. May be called twice, and from another thread."""
        if self._process.returncode is None:  # else another group may have its id
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Kill the process and its group, wait for it and close the socket."""
        self.kill()
        self._process.wait()
        self._socket.close()


def _environment() -> dict[str, str]:
    """Returns a worker's environment: the same packages, one thread, and no GPU, for a reward
    function must not use the trainer's GPU memory."""
    return {
        **os.environ,
        **import_path(),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
