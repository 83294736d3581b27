"""Functions that a recipe names by an import path: `module:function` or `file.py:function`.

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
    """Returns whether a module or package can be imported. A folder without a module in it, such as
    the `wandb/` that wandb leaves in the working directory, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def is_import_path(text: str) -> bool:
    """Returns True for the forms `module:function` and `file.py:function`."""
    source, separator, name = text.rpartition(":")
    if not separator:
        return False
    is_source = source.endswith(".py") or all(map(str.isidentifier, source.split(".")))
    return is_source and all(map(str.isidentifier, name.split(".")))


def refuse_missing_file(import_path: str) -> None:
    """Raises FileNotFoundError if it is `file.py:function` and there is no such file."""
    path = Path(import_path.rpartition(":")[0])
    if path.suffix == ".py" and not path.is_file():
        raise FileNotFoundError(
            f"no file {path}; a relative path in a recipe file starts at the folder of that file, "
            "one given with --set at the working directory"
        )


def source_text(import_path: str) -> str:
    """Returns the text of the file that `module:function` or `file.py:function` names, read without
    importing it; empty if there is none, and for a package."""
    source = import_path.rpartition(":")[0]
    name = source if source.endswith(".py") else f"{source.replace('.', '/')}.py"
    candidates = (Path(folder, name) for folder in (*sys.path, _working_directory()))
    file = next((path for path in candidates if path.is_file()), None)
    return "" if file is None else file.read_text(encoding="utf-8", errors="replace")


def load_function(import_path: str) -> Any:
    """Import what `module:function` or `file.py:function` names. Raises what the import raises."""
    loaded = load_source(import_path)
    for attribute in import_path.rpartition(":")[2].split("."):
        loaded = getattr(loaded, attribute)
    return loaded


def load_source(import_path: str) -> Any:
    """Import the module of `module:function` or `file.py:function`. The working directory, and the
    folder of a file, come last in the search path: a `types.py` there does not shadow Python's.
    Raises whatever the import raises."""
    refuse_missing_file(import_path)
    source = import_path.rpartition(":")[0]
    return _load_file(Path(source)) if source.endswith(".py") else _load_module(source)


def _load_module(name: str) -> Any:
    if (here := _working_directory()) not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


def _working_directory() -> str:
    """Returns the working directory; an empty path if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _is_taken(path: Path) -> bool:
    """Returns whether another module, loaded or not, has the name of this file."""
    name = path.stem
    if name in sys.modules or name in sys.stdlib_module_names:
        return True
    other = importlib.machinery.PathFinder.find_spec(name)
    return other is not None and other.origin != str(path)


class _UncachedLoader(SourceFileLoader):
    """Compiles a file as it is on disk: Python's cache misses edits that keep size and time."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _load_file(path: Path) -> Any:
    """Imports a Python file as a module, once per process, with its folder on sys.path. If its name
    is that of another module, the module is called `user_file_NAME`."""
    path = path.resolve()
    name = f"user_file_{path.stem}" if _is_taken(path) else path.stem
    for loaded in (path.stem, name):
        if getattr(sys.modules.get(loaded), "__file__", None) == str(path):
            return sys.modules[loaded]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(
        name, path, loader=_UncachedLoader(name, str(path))
    )
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by its name
    spec.loader.exec_module(module)
    return module
