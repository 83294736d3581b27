"""The first difference between what two commits wrote: by content, so that a lighter layout of
files is no difference, but a missing row, column, tensor or file is one."""

import json
import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

OF_THE_HOST = re.compile(
    r"step_time|cost/mu|cost/gamma|async/(trainer|sampler)_idle|.*_seconds|.*memory.*|.*_gib"
    r"|mu|compute_share|shadow_time_share|advice"
    r"|versions|environment|command|platform|git_commit|(.*_)?path"
)
"""Names of metrics and JSON keys that a clock, the machine, a package or a folder decides. This is
the one list of what is not compared in the files that are."""

FIRST = ("rollouts", "draws", "metrics.jsonl", "buffer", "eval", "summary.json")
"""The order in which a difference is looked for; then weights and whatever else there is."""

NOT_COMPARED = re.compile(
    r"(^|/)(log|tensorboard|journal|engine|\w+\.generations)/|(^|/)\.|checkpoints/latest/|(^|/)README\.md$"
    r"|(files|manifest|environment|state|config|generation_config|tokenizer\w*)\.json$"
)
"""Logs, optimizer states (the next weights show them), caches, digests, and what packages write. Of
a journal the run's repetition is compared."""

NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8"}
KINDS = (".jsonl", ".parquet", ".safetensors", ".json", ".md", ".html", ".txt")


def first_difference(one: Path, other: Path, new: Collection[str] = ()) -> str | None:
    """Where two folders differ first, with both values and the number of further differences; None
    if they are equal. Columns and keys of the names `new` may be missing in one of them."""
    mine, yours = contents(one), contents(other)
    found = []
    for name in sorted(mine.keys() | yours.keys(), key=_order):
        if name not in mine or name not in yours:
            found.append(f"{name}: only in {'A' if name in mine else 'B'}")
        elif where := _difference(_read(mine[name]), _read(yours[name]), new):
            found.append(f"{name}{where}")
    if not mine and not yours:
        return "nothing to compare in either"
    if not found:
        return None
    others = f" (and {len(found) - 1} more)" if found[1:] else ""
    return found[0] + others


def contents(folder: Path) -> dict[str, list[Path]]:
    """The files with something to compare, by what they hold: all Parquet files of a folder
    together, all weights of a folder together, any other file alone."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*"), key=_natural):
        name = path.relative_to(folder).as_posix()
        if path.suffix not in KINDS or NOT_COMPARED.search(name) or not path.is_file():
            continue
        together = path.suffix in (".parquet", ".safetensors") and "buffer" not in path.name
        key = f"{path.parent.relative_to(folder).as_posix()}/*{path.suffix}" if together else name
        found.setdefault(key, []).append(path)
    return found


def _natural(path: Path) -> list[Any]:
    """Step 10 after step 9, also without zeros."""
    return [
        (0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", str(path))
    ]


def _order(name: str) -> tuple[int, str]:
    places = [place for place, part in enumerate(FIRST) if f"/{part}" in f"/{name}"]
    return min(places, default=len(FIRST)), name


def _read(paths: list[Path]) -> Any:
    """The content, without what the host decides."""
    suffix = paths[0].suffix
    if suffix == ".parquet":
        return [row for path in paths for row in pq.read_table(path).to_pylist()]
    if suffix == ".safetensors":
        return {name: tensor for path in paths for name, tensor in _tensors(path).items()}
    text = paths[0].read_text()
    if suffix == ".jsonl":
        return [_timeless(json.loads(line)) for line in text.splitlines()]
    if suffix == ".json":
        return _timeless(json.loads(text))
    return text.splitlines()


def _tensors(path: Path) -> dict[str, Any]:
    """Type, shape and values of every tensor of a safetensors file; those of a type that numpy
    lacks as whole numbers, by their bits."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    facts = json.loads(content[8:start])
    facts.pop("__metadata__", None)
    for tensor in facts.values():
        first, last = tensor.pop("data_offsets")
        kind = NUMPY_TYPES.get(tensor["dtype"], "<u1")
        tensor["values"] = np.frombuffer(content[start + first : start + last], kind).tolist()
    return dict(sorted(facts.items()))


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if not OF_THE_HOST.fullmatch(str(k))}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def _difference(one: Any, other: Any, new: Collection[str] = ()) -> str | None:
    """The path to the first difference, and the two values; None without one."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in one or key not in other:
                if key in new:
                    continue
                return f", {key}: only in {'A' if key in one else 'B'}"
            if where := _difference(one[key], other[key], new):
                return f", {key}{where}"
        return None
    if isinstance(one, list) and isinstance(other, list):
        for index, (mine, yours) in enumerate(zip(one, other, strict=False)):
            if where := _difference(mine, yours, new):
                return f" [{_name(mine, index)}]{where}"
        both = f": {len(one)} in A, {len(other)} in B"
        return None if len(one) == len(other) else both
    return None if _same(one, other) else f": {_short(one)} in A, {_short(other)} in B"


def _name(row: Any, index: int) -> str:
    """A row by its step, a request by its route."""
    for key in ("step", "birth_step", "route") if isinstance(row, dict) else ():
        if key in row:
            return f"row {index}, {key.removeprefix('birth_')} {row[key]}"
    return str(index)


def _same(one: Any, other: Any) -> bool:
    """Equal bit for bit: a NaN is itself, and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return bool(one == other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 90 else f"{text[:60]}…{text[-25:]}"
