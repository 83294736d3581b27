"""Reward functions of the user, in a worker: loading, the call, and the description of failures.

How a function is called is recognised by the names of its parameters:

    ours    f(completion, answer, row) -> float
    verl    compute_score(data_source, solution_str, ground_truth, extra_info) -> float
    TRL     f(prompts, completions, **columns) -> [float, …]

A function may take fewer of these. One of ours or of verl may also take `truncated`, `prompt` and
`step`. Parameters of other names need a default. `async def` is awaited.
"""

import asyncio
import hashlib
import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from grpo_replay.named_functions import load_function, load_source

LARGEST_SCORE = 3.4e38
"""Scores are stored in float32."""


def open_user_function(function: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The grader of `module:function` or `file.py:function` (`named_functions`).

    Raises whatever the module raises, and TypeError for parameters that no form of a reward
    function has (`caller`).
    """
    call = caller(load_function(function), function.rpartition(":")[2])

    def grade(task: dict[str, Any]) -> dict[str, Any]:
        value = call(task)
        if value is None:
            return {"status": "none", "error": f"{function} returned None"}
        if not hasattr(value, "__float__"):
            raise TypeError(f"{function} returned {value!r:.80}, expected a number")
        if not abs(float(value)) <= LARGEST_SCORE:
            raise ValueError(f"{function} returned {value}, expected a finite float32 number")
        return {"status": "scored", "reward": float(value)}

    return grade


def source_digest(function: str) -> str:
    """SHA-256 of the file of a function, as text; that of nothing for a module without a file."""
    file = getattr(load_source(function), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()


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
"""What a worker gets: `text`, `answer`, `row`, `truncated`, `prompt` and `step`."""

EXTRAS = ("truncated", "prompt", "step")

ALLOWED = (
    "f(completion, answer, row), verl's compute_score(data_source, solution_str, ground_truth, "
    "extra_info), or TRL's f(prompts, completions, **columns); the first two may also take "
    f"{', '.join(EXTRAS)}"
)


@dataclass(frozen=True, slots=True)
class Form:
    """A way to call a function, told by its parameter `mark`. `result` makes a score of what the
    function returns. `names` are what it may ask for; empty: any column of the row."""

    mark: str
    names: tuple[str, ...]
    arguments: Callable[[Task], dict[str, Any]]
    result: Callable[[Any], Any]


def caller(score: Any, name: str) -> Callable[[Task], Any]:
    """Calls `score` in the form that its parameters name, and returns its score as it came: a
    number, None, or anything else.

    Raises TypeError if it is no function, or has a parameter that no form has.
    """
    if not callable(score):
        raise TypeError(f"{name} is a {type(score).__name__}, not a function")
    try:
        parameters = inspect.signature(score).parameters
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} shows no parameters: wrap it in a function, {ALLOWED}") from error
    form = next((each for each in FORMS if each.mark in parameters), None)
    required = [each for each in parameters.values() if _is_required(each)]
    if form is None or any(_is_unknown(each, form) for each in required):
        allowed = () if form is None else form.names
        unknown = [repr(each.name) for each in required if each.name not in allowed]
        raise TypeError(
            f"{name}{inspect.signature(score)} cannot be called: a reward function is {ALLOWED}, "
            f"recognised by the names of its parameters; unknown: {', '.join(unknown) or 'all'}"
        )
    takes_all = not form.names and any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(task: Task) -> Any:
        given = form.arguments(task)
        if absent := [each.name for each in required if each.name not in given]:
            raise TypeError(
                f"{name} asks for {', '.join(absent)}, but the row has {', '.join(task['row'])}"
            )
        if not takes_all:
            given = {key: value for key, value in given.items() if key in parameters}
        value = score(**given)
        if inspect.iscoroutine(value):
            value = _loop().run_until_complete(value)
        return form.result(value)

    return call


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


def _extras(task: Task) -> dict[str, Any]:
    return {name: task[name] for name in EXTRAS}


def _ours(task: Task) -> dict[str, Any]:
    return {
        "completion": task["text"],
        "answer": task["answer"],
        "row": task["row"],
        **_extras(task),
    }


def _verl(task: Task) -> dict[str, Any]:
    return {
        "data_source": task["row"].get("data_source"),
        "solution_str": task["text"],
        "ground_truth": task["answer"],
        "extra_info": task["row"].get("extra_info"),
        **_extras(task),
    }


def _trl(task: Task) -> dict[str, Any]:
    """Lists of one. As in TRL, prompt and completion are messages if the row's `prompt` is."""
    row, text = task["row"], task["text"]
    has_messages = isinstance(row.get("prompt"), list)
    columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
    return {
        **columns,
        "prompts": [row["prompt"] if has_messages else task["prompt"]],
        "completions": [[{"role": "assistant", "content": text}] if has_messages else text],
    }


def _score_of_dict(value: Any) -> Any:
    """verl's functions may return {"score": …} with further values to log."""
    return value["score"] if isinstance(value, Mapping) and "score" in value else value


def _only(value: Any) -> Any:
    if not hasattr(value, "__len__") or isinstance(value, str | Mapping) or len(value) != 1:
        raise TypeError(f"returned {value!r:.80} for 1 completion, expected a list of 1 number")
    return value[0]


FORMS = (
    Form(
        "solution_str",
        ("data_source", "solution_str", "ground_truth", "extra_info", *EXTRAS),
        _verl,
        _score_of_dict,
    ),
    Form("completions", (), _trl, _only),
    Form("completion", ("completion", "answer", "row", *EXTRAS), _ours, lambda value: value),
)
"""The forms, in the order in which they are looked for."""
