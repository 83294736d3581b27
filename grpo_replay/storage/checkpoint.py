"""Reads and writes checkpoints: written to a temporary folder, completed by a manifest, then
renamed.

    checkpoints/step_000100/  model/ or adapter/  engine/  buffer.parquet  state.json  manifest.json
    checkpoints/latest -> step_000100

A checkpoint is valid if its manifest matches its files (except the model cards, README.md in model/
and adapter/), and its state has the step of its name.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from grpo_replay.distributed.environment import available_cores
from grpo_replay.errors import CheckpointError
from grpo_replay.storage.atomic import (
    flush_tree,
    missing_operations,
    point_link,
    rename_folder,
    try_operation,
    write_json_whole,
)

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest"
STATE = "state.json"
MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"
MODEL_CARDS = (f"{MODEL_FOLDER}/README.md", f"{ADAPTER_FOLDER}/README.md")
CHECKPOINT_VERSION = 1
MAX_READERS = 8
"""Maximum number of files hashed at once; more would only compete for the disk."""

_NAME = re.compile(r"step_(\d{6,})")
_TEMPORARY = ".tmp-"

FileFacts = dict[str, dict[str, Any]]
"""`bytes` and `sha256` of each file, by its path in the checkpoint."""


@dataclass(slots=True)
class RunState:
    """All counters of a run. Random generators need no state: each stream is computed from
    (run.seed, step, purpose).

    `prompt_cursor` is the number of prompts taken so far. `reward` has the SHA-256 of the source
    file of each reward function (`training.reward_watch`), `prompts` that of problems and answers
    (`prompts.prompt_set`), `base` the digest of the initial model (`engine.models`).
    """

    step: int = 0
    policy_version: int = 0
    prompt_cursor: int = 0
    next_rollout_id: int = 0
    next_group_id: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    processed_tokens: int = 0
    replayed_rollouts: int = 0
    wall_seconds: float = 0.0
    reward: dict[str, str | None] = field(default_factory=dict)
    prompts: str = ""
    base: str = ""
    format_version: int = CHECKPOINT_VERSION

    @classmethod
    def from_json(cls, value: Any, path: Path) -> "RunState":
        """Makes the state of the content of state.json. Raises CheckpointError for other keys."""
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or set(value) != names:
            raise CheckpointError(
                f"{path}: expected the keys {', '.join(sorted(names))}; this checkpoint was "
                "written by another version of grpo-replay, or the file was changed"
            )
        if value["format_version"] != CHECKPOINT_VERSION:
            raise CheckpointError(
                f"{path}: checkpoint format {value['format_version']}, this version reads "
                f"{CHECKPOINT_VERSION}"
            )
        return cls(**value)


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def temporary_folder(checkpoints: Path, step: int) -> Path:
    """Returns the folder in which a checkpoint is written before it is renamed."""
    return checkpoints / f"{_TEMPORARY}{checkpoint_name(step)}"


def missing_file_system_features(checkpoints: Path) -> list[str]:
    """Returns a sentence for each optional feature that the file system lacks."""
    missing = missing_operations(checkpoints / f"{_TEMPORARY}trial")
    return [f"the file system of {checkpoints} has {sentence}" for sentence in missing]


def leftovers(checkpoints: Path) -> list[Path]:
    """Temporary folders of checkpoints that were never completed."""
    return [path for path in checkpoints.glob(f"{_TEMPORARY}*") if path.is_dir()]


def step_of(checkpoint: Path) -> int | None:
    """Returns the step in the name of a checkpoint's folder; None for another name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def begin_checkpoint(temporary: Path) -> None:
    """Create the temporary folder, empty."""
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)


def complete_checkpoint(
    temporary: Path, state: RunState, keep: int, known: FileFacts | None = None
) -> Path:
    """Write state and manifest, flush, rename, update `latest`, then remove all but the newest
    `keep` checkpoints. `known` has facts of files, which are then not read again."""
    checkpoints = temporary.parent
    write_json_whole(temporary / STATE, asdict(state))
    _apply_umask(temporary)
    flush_tree(temporary)
    facts = dict(known or {})
    facts |= file_facts(temporary, [name for name in _file_names(temporary) if name not in facts])
    write_json_whole(temporary / MANIFEST, {"files": dict(sorted(facts.items()))})
    final = checkpoints / checkpoint_name(state.step)
    rename_folder(temporary, final)
    point_latest(final)
    remove_old(final, keep)
    return final


def remove_old(newest: Path, keep: int) -> None:
    """Remove checkpoints before `newest`, so that `keep` remain with it. A checkpoint that cannot
    be removed completely, because it is read over NFS, keeps the name of a temporary folder; the
    next resume removes it."""
    earlier = list_checkpoints(newest.parent)
    for old in earlier[: max(earlier.index(newest) + 1 - keep, 0)]:
        removed = newest.with_name(f"{_TEMPORARY}{old.name}")
        rename_folder(old, removed)
        try:
            shutil.rmtree(removed)
        except OSError as error:
            logger.warning("%s cannot be removed now: %s", removed, error)


def _apply_umask(temporary: Path) -> None:
    """Give safetensors files, which only their owner may read, the permissions of other files."""
    usual = (temporary / STATE).stat().st_mode & 0o777
    for path in temporary.rglob("*.safetensors"):
        try_operation(path.chmod, usual)


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """All checkpoints, complete or damaged, oldest first. Folders with other names are ignored."""
    by_step = {step_of(path): path for path in checkpoints.glob("step_*") if path.is_dir()}
    return [by_step[step] for step in sorted(step for step in by_step if step is not None)]


def find_checkpoint(checkpoints: Path) -> Path | None:
    """Verify and return the newest checkpoint; None if there is none.

    Raises CheckpointError if it is damaged. The message names the newest complete one before it.
    """
    existing = list_checkpoints(checkpoints)
    if not existing:
        return None
    try:
        verify_checkpoint(existing[-1])
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_name_previous(existing[:-1])}") from error
    return existing[-1]


def _name_previous(older: list[Path]) -> str:
    """Returns the end of the message about a damaged checkpoint: the newest complete older one."""
    for checkpoint in reversed(older):
        try:
            verify_checkpoint(checkpoint)
        except CheckpointError:
            continue
        return (
            f". The one before it, {checkpoint.name}, is complete: remove the damaged folder to "
            "resume from there"
        )
    return ". No complete checkpoint is before it: start a new run"


def verify_checkpoint(checkpoint: Path) -> None:
    """Check every file against the manifest, and the state's step against the folder's name. Raises
    CheckpointError naming the first bad one."""
    manifest = read_json(
        checkpoint / MANIFEST, "the checkpoint is incomplete, or the folder is not a checkpoint"
    )
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{checkpoint / MANIFEST}: expected an object with 'files'")
    if STATE not in manifest["files"]:
        raise CheckpointError(f"{checkpoint / MANIFEST} does not list {STATE}: it was changed")
    facts = file_facts(checkpoint, _file_names(checkpoint))
    for name, expected in manifest["files"].items():
        actual = facts.get(name)
        if actual is None:
            raise CheckpointError(f"checkpoint {checkpoint} is damaged: {name} is missing")
        if actual != expected:
            raise CheckpointError(
                f"checkpoint {checkpoint} is damaged: {name} has {actual['bytes']} bytes and "
                f"SHA-256 {actual['sha256'][:12]}…, its manifest says {expected['bytes']} and "
                f"{str(expected['sha256'])[:12]}…"
            )
    _refuse_wrong_name(checkpoint)


def _refuse_wrong_name(checkpoint: Path) -> None:
    named, step = step_of(checkpoint), read_state(checkpoint).step
    if named not in (None, step):
        raise CheckpointError(
            f"checkpoint {checkpoint} is of step {step}, by its {STATE}: it was renamed or copied; "
            f"name it {checkpoint_name(step)} again"
        )


def read_state(checkpoint: Path) -> RunState:
    """Read the counters of a checkpoint. Raises CheckpointError."""
    return RunState.from_json(
        read_json(checkpoint / STATE, "the checkpoint has no state"), checkpoint / STATE
    )


def newest_state(checkpoints: Path) -> RunState:
    """Read the newest checkpoint's counters; initial ones without. Raises CheckpointError."""
    existing = list_checkpoints(checkpoints)
    return read_state(existing[-1]) if existing else RunState()


def read_json(path: Path, meaning: str) -> Any:
    """Read a JSON file. Raises CheckpointError; `meaning` explains a missing file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: {meaning}") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error


def file_facts(folder: Path, names: Sequence[str]) -> FileFacts:
    """Return size and SHA-256 of files in `folder`, read in parallel."""

    def facts_of(name: str) -> dict[str, Any]:
        path = folder / name
        return {"bytes": path.stat().st_size, "sha256": _sha256(path)}

    # hashlib releases the GIL. The largest file goes first, so that it is not left for the end.
    by_size = sorted(names, key=lambda name: -(folder / name).stat().st_size)
    with ThreadPoolExecutor(max_workers=min(available_cores(), MAX_READERS)) as pool:
        return dict(zip(by_size, pool.map(facts_of, by_size), strict=True))


def checkpoint_bytes_on_disk(checkpoint: Path) -> int:
    """Total size of a checkpoint's files."""
    return sum((checkpoint / name).stat().st_size for name in _file_names(checkpoint))


def _file_names(folder: Path) -> list[str]:
    """List a manifest's files: all but itself and model cards, which an evaluation rewrites."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    names = (str(path.relative_to(folder)) for path in paths)
    return [name for name in names if not name.startswith(MODEL_CARDS)]


def model_cards(checkpoint: Path) -> list[Path]:
    """Returns the model cards of a checkpoint: in model/ and adapter/, if these exist."""
    cards = [checkpoint / name for name in MODEL_CARDS]
    return [card for card in cards if card.parent.is_dir()]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def point_latest(checkpoint: Path) -> None:
    """Point the symbolic link `latest`, in the folder of checkpoints, at one of them, if the file
    system has links. A folder named `latest`, left by a tool that follows links, is replaced."""
    latest = checkpoint.with_name(LATEST)
    copy = checkpoint.with_name(f"{_TEMPORARY}{LATEST}")
    if latest.is_dir() and not latest.is_symlink():
        rename_folder(latest, copy)
    point_link(latest, checkpoint.name)
    shutil.rmtree(copy, ignore_errors=True)
