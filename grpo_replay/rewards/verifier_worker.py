"""A verifier worker: grades the tasks that come over a socket, each a list of completions of one
prompt. For each it writes the answers of every function, in order, so that the pool knows which of
them a time limit or a crash ended.

Started by `grpo_replay.rewards.pool`, which kills it at the time limit; the kernel kills it when
its parent ends. What a reward function prints goes to the log.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from grpo_replay.rewards.user_function import (
    describe_failure,
    failure,
    open_user_function,
    source_digest,
)

Grader = tuple[Callable[[Any], Any], bool]
"""Grades a completion; a list of them if the second is true."""


def main() -> None:
    names, memory_limit_mib, parent, descriptor = (json.loads(word) for word in sys.argv[1:])
    _die_with(parent)
    # Only the trainer may end its workers, also when a scheduler sends SIGINT to every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)  # else a program that a function starts would hold it
    with socket.socket(fileno=descriptor) as link:
        tasks, replies = link.makefile("rb"), link.makefile("wb")
        try:
            graders = [_open_grader(function) for function in names]
            sources = {name: source_digest(name) for name in names if name not in BUILTINS}
        except BaseException as error:  # a module of the user may even call sys.exit
            _write(replies, {"failed": describe_failure(error)})
            return
        # Imported modules are never freed: keep the garbage collector from scanning them.
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        _limit_memory_growth(memory_limit_mib)
        _write(replies, {"sources": sources, "takes_many": any(many for _, many in graders)})
        for completions in map(json.loads, tasks):
            for grader in graders:
                _write(replies, _graded(grader, completions))


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl took effect
        os._exit(0)


def _limit_memory_growth(limit_mib: int) -> None:
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * resource.getpagesize() + limit_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _write(replies: BinaryIO, message: Any) -> None:
    replies.write(json.dumps(message).encode("ascii") + b"\n")
    replies.flush()


def _graded(grader: Grader, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    grade, takes_many = grader
    if not takes_many:
        return [_tried(grade, task) for task in tasks]
    answers = _tried(grade, tasks)
    return answers if isinstance(answers, list) else [answers] * len(tasks)


def _tried(grade: Callable[[Any], Any], given: Any) -> Any:
    try:
        return grade(given)
    except BaseException as error:  # of the user's code, sys.exit too, or of a library
        return failure(error)


def _open_grader(function: str) -> Grader:
    if function in BUILTINS:
        return BUILTINS[function](), False
    return open_user_function(function)


def _symbolic(boxed: bool) -> Callable[[Any], Any]:
    from grpo_replay.rewards.math_verify import SymbolicGrader

    grader = SymbolicGrader(boxed)

    def grade(task: dict[str, Any]) -> dict[str, Any]:
        status, gold_parsed = grader.grade(task["text"], task["answer"])
        return {"status": status, "gold_parsed": gold_parsed}

    return grade


def _minerva(task: dict[str, Any]) -> dict[str, Any]:
    from grpo_replay.rewards.minerva import grade

    return {"status": grade(task["text"], task["answer"])}


BUILTINS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "math_verify_boxed": lambda: _symbolic(boxed=True),
    "math_verify": lambda: _symbolic(boxed=False),
    "minerva": lambda: _minerva,
}
"""Opens the grader of each of `recipe.BUILTIN_VERIFIERS`."""


if __name__ == "__main__":
    main()
