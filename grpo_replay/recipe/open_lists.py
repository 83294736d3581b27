"""Lists of functions that a recipe chooses from by name, and that anyone can extend.

A name stands for a place, `module:function`. A recipe may give a place instead of a name, or
`file.py:function`; then nothing has to be registered. What ships with the package is registered at
the end of this file, and loaded in the same way.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_replay.errors import RecipeError


class OpenList:
    """The functions that the recipe key `key` may name."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._places: dict[str, str] = {}
        self._loaded: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, place: str) -> None:
        """Let recipes say `name` for `place`, which is `module:function`. Nothing is imported."""
        self._places[name] = place

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def check(self, value: str) -> str:
        """`value`, if it is a registered name or has the form of a place; otherwise ValueError."""
        if value not in self._places and not is_place(value):
            raise ValueError(
                f"{value!r} is not known: use {', '.join(self.names)}, or your own function as "
                "module:function or file.py:function"
            )
        return value

    def load(self, value: str) -> Callable[..., Any]:
        """The function that `value` names, imported once. Raises RecipeError."""
        if value not in self._loaded:
            place = self._places.get(value, value)
            try:
                function = load_function(place)
            except Exception as error:
                raise RecipeError(
                    f"{self.key} {value}: {type(error).__name__}: {error}; name a function that "
                    "can be imported, or a file with its path"
                ) from error
            if not callable(function):
                raise RecipeError(
                    f"{self.key} {value} is a {type(function).__name__}: name a function"
                )
            self._loaded[value] = function
        return self._loaded[value]


def is_place(text: str) -> bool:
    """True for the forms `module:function` and `file.py:function`."""
    place, separator, name = text.rpartition(":")
    if not separator:
        return False
    place_is_named = place.endswith(".py") or all(map(str.isidentifier, place.split(".")))
    return place_is_named and all(map(str.isidentifier, name.split(".")))


def load_function(place: str) -> Any:
    """What `module:function` or `file.py:function` names. Modules are found from the working
    directory and in the environment; a file may import modules of its own folder. Raises whatever
    the import raises."""
    source, _, name = place.rpartition(":")
    found = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    for attribute in name.split("."):
        found = getattr(found, attribute)
    return found


def _load_module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path}; a relative path in a recipe file starts at the folder of that file, "
            "one given with --set at the working directory"
        )
    path = path.resolve()
    name = path.stem if path.stem not in sys.modules else f"user_file_{path.stem}"
    for known in (path.stem, name):
        if getattr(sys.modules.get(known), "__file__", None) == str(path):
            return sys.modules[known]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by its name
    spec.loader.exec_module(module)
    return module


PRIORITIES = OpenList("replay.priority")
for _name in ("abs_advantage", "uniform", "group_std"):
    PRIORITIES.register(_name, f"grpo_replay.replay.priorities:{_name}")

ADVANTAGES = OpenList("advantage.estimator")
ADVANTAGES.register("group_relative", "grpo_replay.replay.estimators:group_relative")

LOSSES = OpenList("loss.kind")
LOSSES.register("clipped", "grpo_replay.replay.loss:clipped_surrogate")
LOSSES.register("asymre", "grpo_replay.replay.loss:asymmetric_reinforce")
