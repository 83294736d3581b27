"""Relative paths in a recipe file start at the folder of the file, those of `--set` at the working
directory.

So a recipe works from every working directory. Both become absolute, so that the recipe that a run
saves, in a folder of its own, names the same files.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA_SUFFIXES = tuple(
    kind + packed
    for kind in (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
    for packed in ("", ".gz", ".bz2", ".xz", ".zst")
)
"""Files of prompts and benchmarks."""


def anchor_paths(layer: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of a recipe layer absolute, in place.

    These are files of prompts and benchmarks, `eval.data_folder`, `file.py:function`, and models
    and tokenizers that begin with a dot: `owner/name` is a hub id. Values of a wrong type are left
    for the validation.
    """

    def absolute(path: str) -> str:
        if path.startswith("~"):
            return path
        return os.path.abspath(folder / path)

    def of_data(path: str) -> str:
        return absolute(path) if path.endswith(DATA_SUFFIXES) or path.startswith(".") else path

    def of_model(path: str) -> str:
        return absolute(path) if path.startswith(".") else path

    def of_function(function: str) -> str:
        place, separator, name = function.rpartition(":")
        return f"{absolute(place)}:{name}" if separator and place.endswith(".py") else function

    _change(layer, "prompts", "source", of_data)
    for each in _listed(layer, "prompts", "source"):
        _change({"prompts": each}, "prompts", "source", of_data)
    _change(layer, "model", "path", of_model)
    _change(layer, "model", "tokenizer", of_model)
    _change(layer, "reward", "function", of_function)
    own = ("advantage", "estimator"), ("replay", "priority"), ("loss", "kind")
    for section, key in (*own, ("sampling", "backend")):
        _change(layer, section, key, of_function)
    _change(layer, "eval", "reward", of_function)
    for each in _listed(layer, "reward", "function"):
        _change({"reward": each}, "reward", "function", of_function)
    _change(layer, "eval", "benchmarks", of_data)
    _change(layer, "eval", "data_folder", absolute)


def short_path(path: str) -> str:
    """`path` as messages show it: relative if it is below the working directory."""
    inside = os.path.isabs(path) and Path(path).is_relative_to(Path.cwd())
    return os.path.relpath(path) if inside else path


def is_on_hub(source: str) -> bool:
    """True if a model or data source is a hub id, not a builtin or a local path."""
    return not source.startswith(("builtin:", "/", ".", "~")) and not Path(source).exists()


def _listed(layer: dict[str, Any], section: str, key: str) -> list[Any]:
    """The entries of a key that has a list."""
    values = layer.get(section)
    entries = values.get(key) if isinstance(values, dict) else None
    return entries if isinstance(entries, list) else []


def _change(layer: dict[str, Any], section: str, key: str, change: Callable[[str], str]) -> None:
    values = layer.get(section)
    if not isinstance(values, dict) or key not in values:
        return
    value = values[key]
    if isinstance(value, str):
        values[key] = change(value)
    elif isinstance(value, list):
        values[key] = [change(each) if isinstance(each, str) else each for each in value]
