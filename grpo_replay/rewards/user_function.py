"""Reward functions of the user, in a worker: loading, the call, and the description of failures."""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_replay.rewards.signature import caller

LARGEST_SCORE = 3.4e38
"""Scores are stored in float32."""


def open_user_function(function: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The grader of `module:function` or `file.py:function`.

    Modules are found from the working directory and in the environment; a file may import modules
    of its own folder. Raises whatever the module raises, and TypeError for parameters that no form
    of a reward function has (`rewards.signature`).
    """
    score, name = load_source(function), function.rpartition(":")[2]
    for attribute in name.split("."):
        score = getattr(score, attribute)
    call = caller(score, name)

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


def load_source(function: str) -> Any:
    """The module of `module:function` or `file.py:function`. Raises whatever it raises."""
    place = function.rpartition(":")[0]
    return _load_file(Path(place)) if place.endswith(".py") else _load_module(place)


def source_digest(function: str) -> str:
    """SHA-256 of the file of a function, as text; that of nothing for a module without a file."""
    file = getattr(load_source(function), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()


def _load_module(name: str) -> Any:
    sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path}; a relative path in a recipe file starts at the folder of that file, "
            "one given with --set at the working directory"
        )
    path = path.resolve()
    name = path.stem if path.stem not in sys.modules else f"reward_file_{path.stem}"
    for known in (path.stem, name):
        if getattr(sys.modules.get(known), "__file__", None) == str(path):
            return sys.modules[known]
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by its name
    spec.loader.exec_module(module)
    return module


def describe_failure(error: BaseException) -> str:
    """The error, and the line of the user's code that raised it."""
    own = os.path.dirname(os.path.abspath(__file__))
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
