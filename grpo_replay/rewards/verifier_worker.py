"""A verifier worker: grades the tasks that come over a socket, each a list of completions of one
prompt. For each it writes the answers of every function, in order, so that the pool knows which of
them a time limit or a crash ended.

Started by `grpo_replay.rewards.pool`, which kills it at the time limit; the kernel kills it when
its parent ends. What a reward function prints goes to the log.

How a function of the user's is called is recognised by the names of its parameters. It may take any
of `ONE`, which are ours and verl's, for one completion and return a number (verl: or a mapping with
`score`):

    f(completion, answer, row) -> float
    compute_score(data_source, solution_str, ground_truth, extra_info) -> float

One that takes `completions` gets lists, of the completions of one prompt, and returns a list: of
what it names of `completions`, `prompts`, `answers`, `rows` and `EXTRAS`, and TRL's columns of the
row, by name or as `**columns`:

    f(completions, answers, rows) -> [float, …]
    f(prompts, completions, **columns) -> [float, …]

Parameters of other names need a default. `async def` is awaited, for all completions of a prompt at
once.
"""

import asyncio
import ctypes
import gc
import hashlib
import importlib
import inspect
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from grpo_replay.named_functions import load_function, load_source

LARGEST_SCORE = 3.4e38
"""Scores are stored in float32."""


def open_user_function(function: str) -> tuple["Grader", bool]:
    """The grader of `module:function` or `file.py:function` (`named_functions`), and whether it
    needs the completions of a prompt together.

    Raises whatever the module raises, and TypeError for parameters that no reward function has
    (`Caller`).
    """
    call = Caller(load_function(function), function.rpartition(":")[2])

    def answer(value: Any) -> dict[str, Any]:
        if isinstance(value, BaseException):
            return failure(value)
        if value is None:
            return {"status": "none", "error": f"{function} returned None"}
        if not hasattr(value, "__float__") or not abs(float(value)) <= LARGEST_SCORE:
            raise TypeError(f"{function} returned {value!r:.80}, expected a finite float32 number")
        return {"status": "scored", "reward": float(value)}

    each_alone = _each_alone(answer)
    return lambda tasks: each_alone(call(tasks)), call.takes_many


def source_digest(function: str) -> str:
    """SHA-256 of the file of a function, as text; that of nothing for a module without a file."""
    file = getattr(load_source(function), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()


def failure(error: BaseException) -> dict[str, Any]:
    """The answer for a call that raised."""
    if isinstance(error, MemoryError):
        return {"status": "memory"}
    return {"status": "crash", "error": describe_failure(error)[:500]}


def describe_failure(error: BaseException) -> str:
    """The error, and the line of the user's code that raised it."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", own, importlib.__file__))
    ]
    # Where their file was last, even if a library that it called raised the error.
    lines = [line for name, line in files if name == files[0][0]]
    place = f" ({files[0][0]}:{lines[-1]})" if files else ""
    what = "it called sys.exit" if isinstance(error, SystemExit) else str(error)
    return f"{type(error).__name__}: {what}{place}"


Task = Mapping[str, Any]
"""What a worker gets for a completion: `text`, `answer`, `row` and `EXTRAS`."""

EXTRAS = ("truncated", "completion_ids", "prompt", "messages", "step", "group")
ONE = (
    *("completion", "answer", "row", "data_source", "solution_str", "ground_truth", "extra_info"),
    *EXTRAS,
)

ALLOWED = (
    "f(completion, answer, row), verl's compute_score(data_source, solution_str, ground_truth, "
    "extra_info), or for lists f(completions, answers, rows) or TRL's f(prompts, completions, "
    f"**columns); all may also take {', '.join(EXTRAS)}"
)


class Caller:
    """Calls a function for completions of one prompt and returns its scores as they came, one for
    each: numbers, None, what was raised, or anything else.

    Raises TypeError if it is no function, or has a parameter that no reward function has.
    """

    def __init__(self, score: Any, name: str) -> None:
        parameters = inspect.signature(score).parameters
        self._takes_lists = "completions" in parameters
        required = [each for each in parameters.values() if _is_required(each)]
        unknown = [repr(each.name) for each in required if each.name not in ONE]
        is_one = not {"completion", "solution_str"}.isdisjoint(parameters) and not unknown
        if not (self._takes_lists or is_one):
            raise TypeError(
                f"{name}{inspect.signature(score)} cannot be called: a reward function is "
                f"{ALLOWED}, recognised by the names of its parameters; unknown: "
                f"{', '.join(unknown) or 'all'}"
            )
        self._score, self._name, self._names = score, name, set(parameters)
        self._required = [each.name for each in required]
        self._takes_columns = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self.takes_many = self._takes_lists or inspect.iscoroutinefunction(score)
        """Whether the completions of a prompt are given to it together."""

    def __call__(self, tasks: Sequence[Task]) -> list[Any]:
        if not self._takes_lists:
            given = [{k: v for k, v in _named(t).items() if k in self._names} for t in tasks]
            found = _awaited([self._called(*each) for each in zip(given, tasks, strict=True)])
            return [each.get("score", each) if isinstance(each, dict) else each for each in found]
        (found,) = _awaited([self._called(self._lists(tasks), tasks[0])])
        return [found] * len(tasks) if isinstance(found, BaseException) else _one_each(found, tasks)

    def _called(self, given: Mapping[str, Any], first: Task) -> Any:
        if absent := [name for name in self._required if name not in given]:
            has = ", ".join(first["row"])
            return TypeError(f"{self._name} asks for {', '.join(absent)}, but the row has {has}")
        try:
            return self._score(**given)
        except BaseException as error:  # sys.exit of the user's code too
            return error

    def _lists(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """What the function gets of the lists that there are."""
        row = tasks[0]["row"]
        of_trl = [name for name in row if name not in ("prompt", "completion")]
        found: dict[str, Any] = {name: [each[name] for each in tasks] for name in EXTRAS}
        found |= {"answers": [t["answer"] for t in tasks], "rows": [t["row"] for t in tasks]}
        found |= {name: [each["row"].get(name) for each in tasks] for name in of_trl}
        found |= {
            "prompts": [t["prompt"] for t in tasks],
            "completions": [t["text"] for t in tasks],
        }
        if isinstance(row.get("prompt"), list) and self._names.isdisjoint({"answers", "rows"}):
            found["prompts"] = [each["row"]["prompt"] for each in tasks]
            chats = [[{"role": "assistant", "content": text}] for text in found["completions"]]
            found["completions"] = chats
        wanted = self._names
        if self._takes_columns:
            wanted = wanted | {"prompts", "completions", *of_trl}
        return {name: each for name, each in found.items() if name in wanted}


def _named(task: Task) -> dict[str, Any]:
    """What a function of one completion may name. Those of verl are None where the row has none."""
    text, answer, row = task["text"], task["answer"], task["row"]
    ours = {"completion": text, "answer": answer, "row": row, **{n: task[n] for n in EXTRAS}}
    verl = {"solution_str": text, "ground_truth": answer}
    return {**ours, **verl, **{name: row.get(name) for name in ("data_source", "extra_info")}}


def _is_required(parameter: inspect.Parameter) -> bool:
    collects = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not collects


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls: clients that a module keeps belong to the loop of their first use."""
    return asyncio.new_event_loop()


def _awaited(values: Sequence[Any]) -> list[Any]:
    """The values; of coroutines, what they return or raise, all awaited at once."""
    if not any(inspect.iscoroutine(each) for each in values):
        return list(values)

    async def gathered() -> list[Any]:
        return await asyncio.gather(*values, return_exceptions=True)

    return _loop().run_until_complete(gathered())


def _one_each(values: Any, tasks: Sequence[Task]) -> list[Any]:
    count = len(tasks)
    if (
        hasattr(values, "__len__")
        and not isinstance(values, str | Mapping)
        and len(values) == count
    ):
        return list(values)
    error = TypeError(f"returned {values!r:.80} for {count} completions, expected as many numbers")
    return [error] * count


Grader = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
"""Answers to the completions of a prompt."""


def _each_alone(answer: Callable[[Any], dict[str, Any]]) -> Callable[[list[Any]], list[Any]]:
    """The answers of a list; one that raises is a failure, and the others have theirs."""

    def tried(given: Any) -> dict[str, Any]:
        try:
            return answer(given)
        except BaseException as error:  # of the user's code, sys.exit too, or of a library
            return failure(error)

    return lambda values: [tried(each) for each in values]


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
            sources = {name: source_digest(name) for name in names if ":" in name}
        except BaseException as error:  # a module of the user may even call sys.exit
            _write(replies, {"failed": describe_failure(error)})
            return
        # Imported modules are never freed: keep the garbage collector from scanning them.
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        _limit_memory_growth(memory_limit_mib)
        _write(replies, {"sources": sources, "takes_many": any(many for _, many in graders)})
        for completions in map(json.loads, tasks):
            for grade, _ in graders:
                _write(replies, _graded(grade, completions))


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


def _graded(grade: Grader, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    try:
        return grade(tasks)
    except BaseException as error:  # such as sys.exit of a function of lists
        return [failure(error)] * len(tasks)


def _open_grader(function: str) -> tuple[Grader, bool]:
    if ":" not in function:  # built in
        return _each_alone(_builtin(function)), False
    return open_user_function(function)


def _builtin(name: str) -> Callable[[Any], dict[str, Any]]:
    """Grades one completion by one of `recipe.BUILTIN_VERIFIERS`."""
    if name == "minerva":
        from grpo_replay.rewards.minerva import grade

        return lambda task: {"status": grade(task["text"], task["answer"])}
    if name == "boxed":
        from grpo_replay.rewards.boxed import BoxedGrader

        grader: Any = BoxedGrader()
    else:
        from grpo_replay.rewards.math_verify import SymbolicGrader

        grader = SymbolicGrader(boxed=name == "math_verify_boxed")

    def symbolic(task: dict[str, Any]) -> dict[str, Any]:
        status, gold_parsed = grader.grade(task["text"], task["answer"])
        return {"status": status, "gold_parsed": gold_parsed}

    return symbolic


if __name__ == "__main__":
    main()
