"""Functions that a recipe names by their place: `module:function` or `file.py:function`.

Standard library alone: verifier processes load it.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any


def has_module(name: str) -> bool:
    """Whether a module or package can be imported. A folder without a module in it, such as the
    `wandb/` that wandb leaves in the working directory, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def is_place(text: str) -> bool:
    """True for the forms `module:function` and `file.py:function`."""
    place, separator, name = text.rpartition(":")
    if not separator:
        return False
    place_is_named = place.endswith(".py") or all(map(str.isidentifier, place.split(".")))
    return place_is_named and all(map(str.isidentifier, name.split(".")))


def refuse_missing_file(place: str) -> None:
    """Raises FileNotFoundError if `place` is `file.py:function` and there is no such file."""
    path = Path(place.rpartition(":")[0])
    if path.suffix == ".py" and not path.is_file():
        raise FileNotFoundError(
            f"no file {path}; a relative path in a recipe file starts at the folder of that file, "
            "one given with --set at the working directory"
        )


def source_text(place: str) -> str:
    """The text of the file of `module:function` or `file.py:function`, which is not imported; empty
    if there is none."""
    source = place.rpartition(":")[0]
    name = source if source.endswith(".py") else f"{source.replace('.', '/')}.py"
    found = (Path(folder, name) for folder in (*sys.path, _working_directory()))
    file = next((path for path in found if path.is_file()), None)
    return "" if file is None else file.read_text(encoding="utf-8", errors="replace")


def load_function(place: str) -> Any:
    """What `module:function` or `file.py:function` names. Raises whatever the import raises."""
    found = load_source(place)
    for attribute in place.rpartition(":")[2].split("."):
        found = getattr(found, attribute)
    return found


def load_source(place: str) -> Any:
    """The module of `module:function` or `file.py:function`. Modules are found in the environment
    and then in the working directory; a file may import modules of its own folder, which comes last
    as well: a `types.py` there is nobody else's. Raises whatever the import raises."""
    refuse_missing_file(place)
    source = place.rpartition(":")[0]
    return _load_file(Path(source)) if source.endswith(".py") else _load_module(source)


def _load_module(name: str) -> Any:
    if (here := _working_directory()) not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


def _working_directory() -> str:
    """The working directory; where it was removed, the name by which Python finds none."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _is_taken(path: Path) -> bool:
    """Whether the name of a file is that of another module, loaded or not."""
    name = path.stem
    if name in sys.modules or name in sys.stdlib_module_names:
        return True
    other = importlib.machinery.PathFinder.find_spec(name)
    return other is not None and other.origin != str(path)


class _AsWritten(SourceFileLoader):
    """Compiles a file as it is on disk: Python's own cache knows a file by its size and time."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _load_file(path: Path) -> Any:
    path = path.resolve()
    name = f"user_file_{path.stem}" if _is_taken(path) else path.stem
    for known in (path.stem, name):
        if getattr(sys.modules.get(known), "__file__", None) == str(path):
            return sys.modules[known]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsWritten(name, str(path)))
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by its name
    spec.loader.exec_module(module)
    return module
