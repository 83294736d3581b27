"""A pool of verifier processes, each driven by its own thread.

Tasks with the same reference answer are queued for the same worker, which has already parsed it;
an idle worker takes tasks from the longest queue. Tasks are sent in chunks, and each has its own
time limit. A worker that is late or has ended is replaced, and only its current task fails. A
task that runs out of memory or crashes in a worker that had answered before is retried once in a
fresh worker, so a verdict never depends on what the worker did earlier.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from grpo_replay.errors import GrpoReplayError, RecipeError
from grpo_replay.rewards.verifier_process import VerifierProcess, WorkerGone, WorkerLate

LARGEST_CHUNK = 32
FAILED_STARTS_ALLOWED = 3

Task = tuple[Any, bytes]  # the caller's identifier, and the task as JSON
Answers = list[dict[str, Any]]
"""The answers to one task, in the order of the functions. Fewer than there are functions if the
time limit or a crash ended the last of them."""
OnAnswers = Callable[[Any, Answers], None]


class VerifierPool:
    """`workers` processes that grade with all of `functions`.

    Its threads call `on_answers(task, answers)` once per task, and `on_failure(error)` if a worker
    cannot be started.
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
            for queue in self._queues:
                queue.clear()
            self._wake.notify_all()
            for process in self._processes.values():
                process.kill()
        for thread in self._threads:
            thread.join()

    def _drive(self, index: int) -> None:
        try:
            while (process := self._start(index)) is not None:
                try:
                    self._serve(process, index)
                finally:
                    process.reap()
        except Exception as error:
            self._on_failure(error)
            self._ready.set()

    def _start(self, index: int) -> VerifierProcess | None:
        for _ in range(FAILED_STARTS_ALLOWED):
            with self._wake:
                if self._closing:
                    return None
                process = VerifierProcess(self._functions, self._memory_limit_mib)
                self._processes[index] = process
            try:
                self._note_sources(process.wait_ready())
                self._ready.set()
                return process
            except ImportError as error:
                process.reap()
                raise RecipeError(
                    f"reward.function {', '.join(map(repr, self._functions))} cannot be loaded: "
                    f"{error}; expected module:function importable from the current folder or the "
                    "environment, or file.py:function"
                ) from error
            except RecipeError:
                process.reap()
                raise
            except (WorkerGone, WorkerLate):
                process.reap()
        if self._closing:
            return None
        raise GrpoReplayError(
            f"verifier worker {index} ended {FAILED_STARTS_ALLOWED} times before it was ready: "
            "see its message on stderr; the usual cause is too little memory"
        )

    def _note_sources(self, found: dict[str, str]) -> None:
        """Raises RecipeError if a worker loaded another source than the first one."""
        with self._wake:
            self.sources = self.sources or found
        edited = [name for name, digest in found.items() if digest != self.sources[name]]
        if edited:
            raise RecipeError(
                f"the source file of reward.function {', '.join(edited)} was edited while the run "
                "uses it: a new worker would grade by another reward. Restore the file, and resume"
            )

    def _serve(self, process: VerifierProcess, index: int) -> None:
        """Send tasks until the pool closes or the worker must be replaced."""
        while chunk := self._take(index):
            remaining = deque(chunk)
            answers: Answers = []
            try:
                process.send([body for _, body in chunk], self._time_limit)
                while remaining:
                    answers = []
                    self._receive(process, answers)
                    out_of_memory = any(answer["status"] == "memory" for answer in answers)
                    if out_of_memory and self._deserves_retry(process):
                        return self._put_back(remaining, index)
                    process.answered += 1
                    self._on_answers(remaining.popleft()[0], answers)
                    if out_of_memory:
                        return self._put_back(remaining, index)
            except WorkerLate:
                self._on_answers(remaining.popleft()[0], [*answers, {"status": "timeout"}])
                return self._put_back(remaining, index)
            except WorkerGone:
                if not self._closing and not self._deserves_retry(process):
                    answer = {"status": "crash", "error": f"its process {process.exit_reason()}"}
                    self._on_answers(remaining.popleft()[0], [*answers, answer])
                return self._put_back(remaining, index)

    def _receive(self, process: VerifierProcess, answers: Answers) -> None:
        """Append the answers to one task as they come. Raises WorkerGone or WorkerLate."""
        deadline = time.monotonic() + self._time_limit
        for _ in self._functions:
            answers.append(process.receive(max(0.0, deadline - time.monotonic())))

    def _deserves_retry(self, process: VerifierProcess) -> bool:
        return process.answered > 0

    def _take(self, index: int) -> list[Task]:
        with self._wake:
            while not self._closing and not any(self._queues):
                self._wake.wait()
            if self._closing:
                return []
            queue = self._queues[index] or max(self._queues, key=len)
            share = -(-len(queue) // 4)  # small chunks, so that all workers finish together
            return [queue.popleft() for _ in range(min(share, LARGEST_CHUNK))]

    def _put_back(self, tasks: deque[Task], index: int) -> None:
        with self._wake:
            if not self._closing:
                self._queues[index].extendleft(reversed(tasks))
                self._wake.notify_all()
