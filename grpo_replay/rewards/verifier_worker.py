"""A verifier worker: grades the tasks that come over a socket, each a list of completions of one
prompt. For each it writes the answers of every function, in order, so that the pool knows which of
them a time limit or a crash ended.

Started by `grpo_replay.rewards.pool`, which kills it at the time limit; the kernel kills it when
its parent ends. What a reward function prints goes to the log.

How a function of the user's is called is recognised by the names of its parameters:

    ours    f(completion, answer, row) -> float
    verl    compute_score(data_source, solution_str, ground_truth, extra_info) -> float
    batch   f(completions, answers, rows) -> [float, …]
    TRL     f(prompts, completions, **columns) -> [float, …]

A function may take fewer of these. All but TRL's may also take `EXTRAS`. A batch has the
completions of one prompt, and every argument is a list. Parameters of other names need a default.
`async def` is awaited, for all completions of a prompt at once.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from grpo_replay.named_functions import load_function, load_source

LARGEST_SCORE = 3.4e38
"""Scores are stored in float32."""


def open_user_function(function: str) -> tuple[Callable[[Any], Any], bool]:
    """The grader of `module:function` or `file.py:function` (`named_functions`), and whether it
    takes a list of tasks and returns a list of answers.

    Raises whatever the module raises, and TypeError for parameters that no form of a reward
    function has (`Caller`).
    """
    call = Caller(load_function(function), function.rpartition(":")[2])

    def answer(value: Any) -> dict[str, Any]:
        if isinstance(value, BaseException):
            return failure(value)
        if value is None:
            return {"status": "none", "error": f"{function} returned None"}
        if not hasattr(value, "__float__"):
            raise TypeError(f"{function} returned {value!r:.80}, expected a number")
        if not abs(float(value)) <= LARGEST_SCORE:
            raise ValueError(f"{function} returned {value}, expected a finite float32 number")
        return {"status": "scored", "reward": float(value)}

    def each_alone(value: Any) -> dict[str, Any]:
        try:
            return answer(value)
        except Exception as error:  # the other completions of the prompt have their rewards
            return failure(error)

    if call.takes_many:
        return lambda tasks: [each_alone(value) for value in call(tasks)], True
    return lambda task: answer(call([task])[0]), False


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

EXTRAS = ("truncated", "prompt", "messages", "step", "group")

ALLOWED = (
    "f(completion, answer, row), a batch's f(completions, answers, rows), verl's "
    "compute_score(data_source, solution_str, ground_truth, extra_info), or TRL's f(prompts, "
    f"completions, **columns); all but TRL's may also take {', '.join(EXTRAS)}"
)


@dataclass(frozen=True, slots=True)
class Form:
    """A way to call a function, told by any of its parameters `marks`. `result` makes a score of
    what the function returns. `names` are what it may ask for; empty: any column of the row. If it
    `is_batch`, `arguments` takes a list of tasks, and the function returns a list."""

    marks: tuple[str, ...]
    names: tuple[str, ...]
    arguments: Callable[[Any], dict[str, Any]]
    result: Callable[[Any], Any] = lambda value: value
    is_batch: bool = False


class Caller:
    """Calls a function for completions of one prompt, in the form that its parameters name, and
    returns its scores as they came: numbers, None, errors of single ones, or anything else.

    Raises TypeError if it is no function, or has a parameter that no form has.
    """

    def __init__(self, score: Any, name: str) -> None:
        if not callable(score):
            raise TypeError(f"{name} is a {type(score).__name__}, not a function")
        try:
            parameters = inspect.signature(score).parameters
        except (TypeError, ValueError) as error:
            text = f"{name} shows no parameters: wrap it in a function, {ALLOWED}"
            raise TypeError(text) from error
        form = next((each for each in FORMS if not parameters.keys().isdisjoint(each.marks)), None)
        required = [each for each in parameters.values() if _is_required(each)]
        if form is None or any(_is_unknown(each, form) for each in required):
            allowed = () if form is None else form.names
            unknown = [repr(each.name) for each in required if each.name not in allowed]
            raise TypeError(
                f"{name}{inspect.signature(score)} cannot be called: a reward function is "
                f"{ALLOWED}, recognised by the names of its parameters; unknown: "
                f"{', '.join(unknown) or 'all'}"
            )
        self._score, self._name, self._form, self._parameters = score, name, form, parameters
        self._required = [each.name for each in required]
        collects = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self._takes_all = not form.names and collects
        self._is_async = inspect.iscoroutinefunction(score)
        self.takes_many = form.is_batch or self._is_async
        """Whether the completions of a prompt are given to it together."""

    def __call__(self, tasks: Sequence[Task]) -> list[Any]:
        if self._form.is_batch:
            values = self._form.result(_awaited([self._called(tasks, tasks[0])])[0])
            return _one_each(values, len(tasks))
        found = _awaited([self._called(task, task) for task in tasks])
        if not self.takes_many:
            return [self._form.result(_raised(each)) for each in found]
        failed = BaseException
        return [each if isinstance(each, failed) else self._form.result(each) for each in found]

    def _called(self, given: Any, first: Task) -> Any:
        arguments = self._form.arguments(given)
        if absent := [name for name in self._required if name not in arguments]:
            raise TypeError(
                f"{self._name} asks for {', '.join(absent)}, but the row has "
                f"{', '.join(first['row'])}"
            )
        if not self._takes_all:
            arguments = {k: v for k, v in arguments.items() if k in self._parameters}
        return self._score(**arguments)


def _is_required(parameter: inspect.Parameter) -> bool:
    collects = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not collects


def _is_unknown(parameter: inspect.Parameter, form: Form) -> bool:
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return True
    return bool(form.names) and parameter.name not in form.names


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


def _ours(task: Task) -> dict[str, Any]:
    own = {"completion": task["text"], "answer": task["answer"], "row": task["row"]}
    return own | {name: task[name] for name in EXTRAS}


def _batch(tasks: Sequence[Task]) -> dict[str, Any]:
    names = {"completions": "text", "answers": "answer", "rows": "row", "prompts": "prompt"}
    names |= {name: name for name in EXTRAS}
    return {name: [task[key] for task in tasks] for name, key in names.items()}


def _verl(task: Task) -> dict[str, Any]:
    return {
        "data_source": task["row"].get("data_source"),
        "solution_str": task["text"],
        "ground_truth": task["answer"],
        "extra_info": task["row"].get("extra_info"),
        **{name: task[name] for name in EXTRAS},
    }


def _trl(tasks: Sequence[Task]) -> dict[str, Any]:
    """As in TRL, prompts and completions are messages if the row's `prompt` is."""
    row, texts = tasks[0]["row"], [task["text"] for task in tasks]
    has_messages = isinstance(row.get("prompt"), list)
    columns = {
        name: [task["row"].get(name) for task in tasks]
        for name in row
        if name not in ("prompt", "completion")
    }
    prompts = [task["row"]["prompt"] if has_messages else task["prompt"] for task in tasks]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    return {**columns, "prompts": prompts, "completions": chats if has_messages else texts}


def _score_of_dict(value: Any) -> Any:
    """verl's functions may return {"score": …} with further values to log."""
    return value["score"] if isinstance(value, Mapping) and "score" in value else value


def _raised(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


def _one_each(values: Any, count: int) -> list[Any]:
    if not hasattr(values, "__len__") or isinstance(values, str | Mapping) or len(values) != count:
        raise TypeError(
            f"returned {values!r:.80} for {count} completion{'s' * (count > 1)}, expected a list "
            f"of {count} number{'s' * (count > 1)}"
        )
    return list(values)


FORMS = (
    Form(
        ("solution_str",),
        ("data_source", "solution_str", "ground_truth", "extra_info", *EXTRAS),
        _verl,
        _score_of_dict,
    ),
    Form(
        ("answers", "rows"),
        ("completions", "answers", "rows", "prompts", *EXTRAS),
        _batch,
        _raised,
        is_batch=True,
    ),
    Form(("completions",), (), _trl, _raised, is_batch=True),
    Form(("completion",), ("completion", "answer", "row", *EXTRAS), _ours),
)
"""The forms, in the order in which they are looked for."""


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


def _boxed() -> Callable[[Any], Any]:
    from grpo_replay.rewards.boxed import BoxedGrader

    return _symbolic(BoxedGrader())


def _math_verify(boxed: bool) -> Callable[[Any], Any]:
    from grpo_replay.rewards.math_verify import SymbolicGrader

    return _symbolic(SymbolicGrader(boxed))


def _symbolic(grader: Any) -> Callable[[Any], Any]:
    def grade(task: dict[str, Any]) -> dict[str, Any]:
        status, gold_parsed = grader.grade(task["text"], task["answer"])
        return {"status": status, "gold_parsed": gold_parsed}

    return grade


def _minerva(task: dict[str, Any]) -> dict[str, Any]:
    from grpo_replay.rewards.minerva import grade

    return {"status": grade(task["text"], task["answer"])}


BUILTINS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "boxed": _boxed,
    "math_verify_boxed": lambda: _math_verify(boxed=True),
    "math_verify": lambda: _math_verify(boxed=False),
    "minerva": lambda: _minerva,
}
"""Opens the grader of each of `recipe.BUILTIN_VERIFIERS`."""


if __name__ == "__main__":
    main()
