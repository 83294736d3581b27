"""RUN/files.json: size and SHA-256 of what a run has written, for `inspect-buffer --verify`.

Written before each checkpoint and at the end. What a file gains later (metrics.jsonl, journal/) is
not covered until the next time. Checkpoints have a manifest of their own; here is the digest of
that manifest, from the next checkpoint on. A resume cuts the list back to its step.
"""

import fnmatch
import hashlib
import heapq
import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from grpo_replay.errors import SnapshotError
from grpo_replay.storage.atomic import written_whole
from grpo_replay.storage.checkpoint import MANIFEST, list_checkpoints

SEAL = "files.json"
_WRITTEN_ONCE = (
    *("recipe.yaml", "recipes/step_*.yaml", "rollouts/step_*.parquet", "draws/step_*.parquet"),
    *("eval/step_*.json", "eval/step_*.parquet"),
)
_ONCE = re.compile("|".join(map(fnmatch.translate, _WRITTEN_ONCE)))
_CHANGING = ("metrics.jsonl", "journal/segment_*.journal", "summary.json")
_STEP = re.compile(r"step_(\d{6,})\b")
_BLOCK_BYTES = 2**20
_FIRST_LINE, _LAST_LINE = '{"files": {\n', "}}\n"

Facts = dict[str, Any]
"""`bytes` and `sha256` of a file."""
Entry = tuple[str, Facts]
"""A path in the run, and the facts of the file; empty if it was not read yet."""


def seal_files(run_dir: Path) -> None:
    """List the files of a run as they are now. Those that are written once are read once."""
    try:
        _write(run_dir, _as_they_are(run_dir, _listed(run_dir)))
    except SnapshotError:  # a damaged list, which the run replaces
        _write(run_dir, _as_they_are(run_dir, ()))


def _as_they_are(run_dir: Path, listed: Iterable[Entry]) -> Iterator[Entry]:
    """The entries of the new list in the order of their paths, made from those of the old one. One
    at a time: the files of a long run are many."""
    manifests = (path / MANIFEST for path in list_checkpoints(run_dir / "checkpoints"))
    there = {str(path.relative_to(run_dir)) for path in manifests if path.exists()}
    there.update(_matches(run_dir, (*_WRITTEN_ONCE, *_CHANGING)))
    unread: Iterator[Entry] = ((path, {}) for path in sorted(there))
    entries = heapq.merge(listed, unread, key=itemgetter(0))
    for path, found in groupby(entries, key=itemgetter(0)):
        known = next((facts for _, facts in found if facts), None)
        if path in there:
            yield path, _if_still_true(run_dir / path, path, known) or _facts(run_dir / path)
        elif known and _is_written_once(path):  # gone, but only a resume removes such a file
            yield path, known


def _listed(run_dir: Path) -> Iterator[Entry]:
    """The entries of the list in the order of their paths, one at a time; nothing if there is none.
    Raises SnapshotError."""
    path = run_dir / SEAL
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        if next(lines, "") != _FIRST_LINE:
            raise SnapshotError(
                f"{path}: damaged, or written by an earlier version (it does not begin as a list "
                "of files); restore it from a copy, or remove it: the next checkpoint writes it"
            )
        for line in lines:
            if line == _LAST_LINE:
                return
            yield from _entries(path, line)
    raise SnapshotError(f"{path}: damaged (it has no end); restore it from a copy")


def cut_back_seal(run_dir: Path, step: int) -> None:
    """Leave out what a resume after `step` removes or may write again."""
    if not (run_dir / SEAL).exists():
        return
    known = _read_if_there(run_dir)
    kept = {}
    for path, facts in known.items():
        found = _STEP.search(path)
        last = step - 1 if path.startswith("recipes/") else step  # a resume may write it again
        earlier = found is None or int(found[1]) <= last
        if earlier and _is_written_once(path) and not path.startswith("eval/step_000000"):
            kept[path] = facts
    _write(run_dir, kept.items())


def reseal(*paths: Path) -> None:
    """List these files of a run's eval/ again, which a regrading has changed on purpose."""
    run_dir = paths[0].absolute().parent.parent
    known = _read_if_there(run_dir)
    names = {str(path.absolute().relative_to(run_dir)) for path in paths}
    if names <= known.keys():
        known |= {name: _facts(run_dir / name) for name in names}
        _write(run_dir, sorted(known.items()))


def read_seal(run_dir: Path) -> dict[str, Facts]:
    """`bytes` and `sha256` by path; empty for a run without a list. Raises SnapshotError."""
    return dict(_listed(run_dir))


def _entries(path: Path, line: str) -> list[Entry]:
    """The entries in a line of the list: one. Raises SnapshotError."""
    try:
        entries: list[Entry] = list(json.loads(f"{{{line.rstrip().removesuffix(',')}}}").items())
        whole = all(
            isinstance(facts["bytes"], int) and isinstance(facts["sha256"], str)
            for _, facts in entries
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SnapshotError(f"{path}: damaged ({error}); restore it from a copy") from error
    if not whole:
        raise SnapshotError(f"{path}: damaged: an entry lacks bytes or sha256; restore it")
    return entries


def _write(run_dir: Path, entries: Iterable[Entry]) -> None:
    """One entry a line, in the order of the paths."""
    with (
        written_whole(run_dir / SEAL) as temporary,
        temporary.open("w", encoding="utf-8") as file,
    ):
        file.write(_FIRST_LINE.rstrip())
        for number, (path, facts) in enumerate(entries):
            file.write(f"{',' if number else ''}\n{json.dumps(path)}: {json.dumps(facts)}")
        file.write(f"\n{_LAST_LINE}")


def sealed_problem(path: Path, facts: Facts) -> str | None:
    """What is wrong with a listed file; None if it begins with what is listed."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    grows = path.name == "metrics.jsonl" or path.suffix == ".journal"
    if size < facts["bytes"] or (size > facts["bytes"] and not grows):
        return f"has {size} bytes, {SEAL} says {facts['bytes']}"
    if _sha256(path, facts["bytes"]) != facts["sha256"]:
        return f"is not what the run wrote: its SHA-256 differs from that in {SEAL}"
    return None


def changed_files(run_dir: Path, step: int | None = None) -> list[str]:
    """What the run did not leave as it is now: recipes, metrics.jsonl, evaluations, and manifests
    of checkpoints that are there; or a damaged list. A report prints them. So does a resume after
    `step`, which lists all of them anew: it leaves later files out, and looks for rollouts/ and
    draws/ too. Parquet files are not read, only measured: --verify reads them."""
    found = []
    try:
        for path, facts in _listed(run_dir):
            of_step = _STEP.search(path)
            later = step is not None and of_step is not None and int(of_step[1]) > step
            skipped = later or (step is None and path.startswith(("rollouts/", "draws/")))
            if not skipped and (problem := _quick_problem(run_dir / path, path, facts)):
                found.append(f"{path} {problem}")
    except SnapshotError as error:
        found.append(str(error).removeprefix(f"{run_dir}/"))
    return found


def _quick_problem(file: Path, path: str, facts: Facts) -> str | None:
    kind = path.partition("/")[0]
    is_gone_checkpoint = kind == "checkpoints" and not file.parent.exists()
    if kind in ("journal", "summary.json") or is_gone_checkpoint:
        return None
    if file.suffix == ".parquet" and file.is_file() and file.stat().st_size == facts["bytes"]:
        return None
    return sealed_problem(file, facts)


def _read_if_there(run_dir: Path) -> dict[str, Facts]:
    """The list as it is; empty if there is none, or a damaged one, which the run replaces."""
    try:
        return read_seal(run_dir)
    except SnapshotError:
        return {}


def _matches(run_dir: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    for pattern in map(Path, patterns):  # whose glob would hold an object for each file
        folder = run_dir / pattern.parent
        names = os.listdir(folder) if folder.is_dir() else []
        yield from (str(pattern.with_name(name)) for name in fnmatch.filter(names, pattern.name))


def _is_written_once(path: str) -> bool:
    return _ONCE.match(path) is not None


def _if_still_true(file: Path, path: str, known: Facts | None) -> Facts | None:
    """What is listed of a file that is written once, or of a segment of the journal, which only
    grows, if it has not; None if the file must be read."""
    if known is None or _is_written_once(path):
        return known
    same = file.suffix == ".journal" and known["bytes"] == file.stat().st_size
    return known if same else None


def _facts(path: Path) -> Facts:
    size = path.stat().st_size
    return {"bytes": size, "sha256": _sha256(path, size)}


def _sha256(path: Path, size: int) -> str:
    """The digest of the first `size` bytes, read a block at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (block := file.read(min(_BLOCK_BYTES, size))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()
