"""Reward functions of the user, in a worker: loading, the call, and the description of failures."""

import hashlib
import importlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_replay.named_functions import load_function, load_source
from grpo_replay.rewards.signature import caller

LARGEST_SCORE = 3.4e38
"""Scores are stored in float32."""


def open_user_function(function: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The grader of `module:function` or `file.py:function` (`named_functions`).

    Raises whatever the module raises, and TypeError for parameters that no form of a reward
    function has (`rewards.signature`).
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
