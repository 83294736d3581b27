"""RUN/files.json: size and SHA-256 of what a run has written, for `inspect-buffer --verify`.

Written before each checkpoint and at the end. What a file gains later (metrics.jsonl, journal/) is
not covered until the next time. Checkpoints have a manifest of their own; here is the digest of
that manifest, from the next checkpoint on. A resume cuts the list back to its step.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_replay.errors import SnapshotError
from grpo_replay.storage.atomic import write_json_whole
from grpo_replay.storage.checkpoint import MANIFEST, list_checkpoints

SEAL = "files.json"
_WRITTEN_ONCE = (
    *("recipe.yaml", "recipes/step_*.yaml", "rollouts/step_*.parquet", "draws/step_*.parquet"),
    *("eval/step_*.json", "eval/step_*.parquet"),
)
_CHANGING = ("metrics.jsonl", "journal/segment_*.journal", "summary.json")
_STEP = re.compile(r"step_(\d{6,})\b")
_BLOCK_BYTES = 2**20


def seal_files(run_dir: Path) -> None:
    """List the files of a run as they are now. Those that are written once are read once."""
    known = _read_if_there(run_dir)
    once = {
        path: _facts(run_dir / path, known.get(path)) for path in _matches(run_dir, _WRITTEN_ONCE)
    }
    changing = {
        path: _facts(run_dir / path, _if_not_grown(run_dir / path, known.get(path)))
        for path in _matches(run_dir, _CHANGING)
    }
    manifests = [path / MANIFEST for path in list_checkpoints(run_dir / "checkpoints")]
    changing |= {
        str(path.relative_to(run_dir)): _facts(path) for path in manifests if path.exists()
    }
    # A file that is gone stays listed: only a resume removes what was written once.
    lost = {path: facts for path, facts in known.items() if _is_written_once(path)}
    write_json_whole(run_dir / SEAL, {"files": dict(sorted((lost | once | changing).items()))})


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
    write_json_whole(run_dir / SEAL, {"files": kept})


def reseal(*paths: Path) -> None:
    """List these files of a run's eval/ again, which a regrading has changed on purpose."""
    run_dir = paths[0].absolute().parent.parent
    known = _read_if_there(run_dir)
    names = {str(path.absolute().relative_to(run_dir)) for path in paths}
    if names <= known.keys():
        known |= {name: _facts(run_dir / name) for name in names}
        write_json_whole(run_dir / SEAL, {"files": known})


def read_seal(run_dir: Path) -> dict[str, dict[str, Any]] | None:
    """`bytes` and `sha256` by path; None for a run without a list. Raises SnapshotError."""
    path = run_dir / SEAL
    if not path.exists():
        return None
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        whole = all(
            isinstance(each["bytes"], int) and isinstance(each["sha256"], str)
            for each in files.values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{path}: damaged ({error}); restore it from a copy") from error
    if not whole:
        raise SnapshotError(f"{path}: damaged: an entry lacks bytes or sha256; restore it")
    return files


def sealed_problem(path: Path, facts: dict[str, Any]) -> str | None:
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


def _read_if_there(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The list as it is; empty if there is none, or a damaged one, which the run replaces."""
    try:
        return read_seal(run_dir) or {}
    except SnapshotError:
        return {}


def _matches(run_dir: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    for pattern in patterns:
        yield from (str(path.relative_to(run_dir)) for path in run_dir.glob(pattern))


def _is_written_once(path: str) -> bool:
    return any(Path(path).match(pattern) for pattern in _WRITTEN_ONCE)


def _if_not_grown(path: Path, known: dict[str, Any] | None) -> dict[str, Any] | None:
    """What is listed of a segment of the journal, which only grows; None if it must be read."""
    if known is None or path.suffix != ".journal" or known["bytes"] != path.stat().st_size:
        return None
    return known


def _facts(path: Path, known: dict[str, Any] | None = None) -> dict[str, Any]:
    if known is not None:
        return known
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
