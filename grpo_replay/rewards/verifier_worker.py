"""A verifier worker: grades tasks from a socket, each a list of completions of one prompt. It
writes the answers of one function after the other, so that the pool knows which function a time
limit or a crash ended.

`grpo_replay.rewards.pool` starts it, and kills it at the time limit; the kernel kills it when its
parent ends. Output of reward functions goes to the log.

The names of its parameters decide how a function of the user is called. A function of one
completion takes any of `SINGLE_PARAMETERS`, which are ours and verl's, and returns a number (in
verl also a mapping with `score`):

    f(completion, answer, row) -> float
    compute_score(data_source, solution_str, ground_truth, extra_info) -> float

A function that takes `completions` gets lists with one element for each completion of a prompt, and
returns a list. It may take `completions`, `prompts`, `answers`, `rows`, `EXTRA_FIELDS` and, as in
TRL, columns of the row, by name or as `**columns`:

    f(completions, answers, rows) -> [float, …]
    f(prompts, completions, **columns) -> [float, …]

Parameters with other names need a default. Calls of an `async def` are awaited together, for all
completions of a prompt.
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

MAX_SCORE = 3.4e38
"""Maximum absolute score: scores are stored in float32."""


def open_user_function(function: str) -> tuple["Grader", bool]:
    """Load the grader of `module:function` or `file.py:function` (`named_functions`). Returns it,
    and whether it needs all completions of a prompt together.

    Raises what the module raises, and TypeError for parameters that `Caller` does not know.
    """
    call = Caller(load_function(function), function.rpartition(":")[2])

    def answer(value: Any) -> dict[str, Any]:
        """Turns what the function returned for one completion into an answer."""
        if isinstance(value, BaseException):
            return failure(value)
        if value is None:
            return {"status": "none", "error": f"{function} returned None"}
        if not hasattr(value, "__float__") or not abs(float(value)) <= MAX_SCORE:
            raise TypeError(f"{function} returned {value!r:.80}, expected a finite float32 number")
        return {"status": "scored", "reward": float(value)}

    answer_all = _answer_separately(answer)
    return lambda tasks: answer_all(call(tasks)), call.needs_whole_group


def source_digest(function: str) -> str:
    """Hexadecimal SHA-256 of a function's file; that of no bytes for a module without file."""
    file = getattr(load_source(function), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()


def failure(error: BaseException) -> dict[str, Any]:
    """Returns the answer for a call that raised."""
    if isinstance(error, MemoryError):
        return {"status": "memory"}
    return {"status": "crash", "error": describe_failure(error)[:500]}


def describe_failure(error: BaseException) -> str:
    """Describe an error, with the line of the user's code that raised it."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", package, importlib.__file__))
    ]
    # The last line in the user's file, even if a library that it called raised the error.
    lines = [line for name, line in files if name == files[0][0]]
    location = f" ({files[0][0]}:{lines[-1]})" if files else ""
    message = "it called sys.exit" if isinstance(error, SystemExit) else str(error)
    return f"{type(error).__name__}: {message}{location}"


Task = Mapping[str, Any]
"""A completion to grade: `text`, `answer`, `row` and `EXTRA_FIELDS`."""

EXTRA_FIELDS = ("truncated", "completion_ids", "prompt", "messages", "step", "group")
SINGLE_PARAMETERS = (
    *("completion", "answer", "row", "data_source", "solution_str", "ground_truth", "extra_info"),
    *EXTRA_FIELDS,
)

ACCEPTED_FORMS = (
    "f(completion, answer, row), verl's compute_score(data_source, solution_str, ground_truth, "
    "extra_info), or for lists f(completions, answers, rows) or TRL's f(prompts, completions, "
    f"**columns); all may also take {', '.join(EXTRA_FIELDS)}"
)


class Caller:
    """Calls a function for the completions of one prompt, and returns one unchecked result for
    each: a number, None, an exception, or anything else.

    Raises TypeError if it is not a function, or has a parameter that no reward function may have.
    """

    def __init__(self, score: Any, name: str) -> None:
        """Reads the names of the parameters of `score`, which decide how it is called. Raises
        TypeError if they fit no form of a reward function."""
        parameters = inspect.signature(score).parameters
        self._takes_lists = "completions" in parameters
        required = [p.name for p in parameters.values() if _is_required(p)]
        unknown = [repr(name) for name in required if name not in SINGLE_PARAMETERS]
        takes_one = not {"completion", "solution_str"}.isdisjoint(parameters) and not unknown
        if not (self._takes_lists or takes_one):
            raise TypeError(
                f"{name}{inspect.signature(score)} cannot be called: a reward function is "
                f"{ACCEPTED_FORMS}, recognised by the names of its parameters; unknown: "
                f"{', '.join(unknown) or 'all'}"
            )
        self._score, self._name, self._names = score, name, set(parameters)
        self._required = required
        self._takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.needs_whole_group = self._takes_lists or inspect.iscoroutinefunction(score)
        """Whether it gets all completions of a prompt together."""

    def __call__(self, tasks: Sequence[Task]) -> list[Any]:
        """Calls the function once with lists, or once per completion, where a returned dict stands
        for its `score`. An error of a call with lists is the result of every task."""
        if not self._takes_lists:
            results = _await_all([self._call(self._one_by_name(task), task) for task in tasks])
            return [r.get("score", r) if isinstance(r, dict) else r for r in results]
        (result,) = _await_all([self._call(self._lists_by_name(tasks), tasks[0])])
        if isinstance(result, BaseException):
            return [result] * len(tasks)
        return _to_list(result, tasks)

    def _call(self, arguments: Mapping[str, Any], first: Task) -> Any:
        """Call the function; returns what it returns or raises, or a TypeError for a missing
        column."""
        if missing := [name for name in self._required if name not in arguments]:
            columns = ", ".join(first["row"])
            return TypeError(
                f"{self._name} asks for {', '.join(missing)}, but the row has {columns}"
            )
        try:
            return self._score(**arguments)
        except BaseException as error:  # including sys.exit in the user's code
            return error

    def _lists_by_name(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """Returns the arguments of a function of lists: the lists that it has parameters for. A row
        with a chat as `prompt` gives TRL's form, in which completions are chats too."""
        row = tasks[0]["row"]
        columns = [name for name in row if name not in ("prompt", "completion")]
        lists: dict[str, Any] = {name: [t[name] for t in tasks] for name in EXTRA_FIELDS}
        lists |= {"answers": [t["answer"] for t in tasks], "rows": [t["row"] for t in tasks]}
        lists |= {name: [t["row"].get(name) for t in tasks] for name in columns}
        lists |= {
            "prompts": [t["prompt"] for t in tasks],
            "completions": [t["text"] for t in tasks],
        }
        if isinstance(row.get("prompt"), list) and self._names.isdisjoint({"answers", "rows"}):
            lists["prompts"] = [t["row"]["prompt"] for t in tasks]
            chats = [[{"role": "assistant", "content": text}] for text in lists["completions"]]
            lists["completions"] = chats
        names = self._names
        if self._takes_columns:
            names = names | {"prompts", "completions", *columns}
        return {name: values for name, values in lists.items() if name in names}

    def _one_by_name(self, task: Task) -> dict[str, Any]:
        """Returns the arguments of a function of one completion, by the names of its parameters.
        Those of verl are None if the row has no such column."""
        text, answer, row = task["text"], task["answer"], task["row"]
        arguments = {"completion": text, "answer": answer, "row": row}
        arguments |= {name: task[name] for name in EXTRA_FIELDS}
        arguments |= {"solution_str": text, "ground_truth": answer}
        arguments |= {name: row.get(name) for name in ("data_source", "extra_info")}
        return {name: value for name, value in arguments.items() if name in self._names}


def _is_required(parameter: inspect.Parameter) -> bool:
    collects = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not collects


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all calls: clients kept by a module belong to their first loop."""
    return asyncio.new_event_loop()


def _await_all(values: Sequence[Any]) -> list[Any]:
    """Return the values; coroutines, awaited together, give what they return or raise."""
    if not any(map(inspect.iscoroutine, values)):
        return list(values)

    async def gathered() -> list[Any]:
        return await asyncio.gather(*values, return_exceptions=True)

    return _loop().run_until_complete(gathered())


def _to_list(values: Any, tasks: Sequence[Task]) -> list[Any]:
    """Returns the returned values, one for each task; TypeErrors if they are not as many."""
    count = len(tasks)
    is_sequence = hasattr(values, "__len__") and not isinstance(values, str | Mapping)
    if is_sequence and len(values) == count:
        return list(values)
    error = TypeError(f"returned {values!r:.80} for {count} completions, expected as many numbers")
    return [error] * count


Grader = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
"""Grades the completions of a prompt: tasks to answers."""


def _answer_separately(answer: Callable[[Any], dict[str, Any]]) -> Callable[[list[Any]], list[Any]]:
    """Apply `answer` to each element of a list; an error for one is only its failure."""

    def answer_or_failure(value: Any) -> dict[str, Any]:
        try:
            return answer(value)
        except BaseException as error:  # of the user's code (also sys.exit) or of a library
            return failure(error)

    return lambda values: [answer_or_failure(value) for value in values]


def main() -> None:
    """Loads the graders, reports to the pool, and grades tasks until the socket closes. `argv`, in
    JSON: functions, memory limit, the trainer's process id, the socket's descriptor."""
    names, memory_limit_mib, parent, descriptor = (json.loads(word) for word in sys.argv[1:])
    _end_with_parent(parent)
    # Only the trainer ends its workers, even if a scheduler sends SIGINT to every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(
        descriptor, False
    )  # else a program that a function starts would keep it open
    with socket.socket(fileno=descriptor) as link:
        tasks, replies = link.makefile("rb"), link.makefile("wb")
        try:
            graders = [_open_grader(function) for function in names]
            sources = {name: source_digest(name) for name in names if ":" in name}
        except BaseException as error:  # a user's module may call sys.exit
            _write(replies, {"failed": describe_failure(error)})
            return
        # Imported modules are never freed: keep the garbage collector from scanning them.
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        _limit_memory_growth(memory_limit_mib)
        _write(
            replies,
            {
                "sources": sources,
                "needs_whole_group": any(needs_group for _, needs_group in graders),
            },
        )
        for completions in map(json.loads, tasks):
            for grade, _ in graders:
                _write(replies, _graded(grade, completions))


def _end_with_parent(parent: int) -> None:
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
    except BaseException as error:  # for example sys.exit in a function of lists
        return [failure(error)] * len(tasks)


def _open_grader(function: str) -> tuple[Grader, bool]:
    if ":" not in function:  # built in
        return _answer_separately(_builtin(function)), False
    return open_user_function(function)


def _builtin(name: str) -> Callable[[Any], dict[str, Any]]:
    """Returns the grader of one completion by a verifier of `recipe.BUILTIN_VERIFIERS`."""
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
