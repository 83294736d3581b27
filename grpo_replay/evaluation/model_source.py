"""Which model is to be evaluated: a checkpoint, a run, a Hugging Face folder or an id."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_replay.errors import CheckpointError

MODEL_FILES = (
    *("*.safetensors", "*.bin", "*.index.json", "config.json", "generation_config.json"),
    *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.py"),
)
"""What makes a model; anything else in its folder, such as an evaluation, does not."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model and where it came from. `path` is a folder or hub id; `recipe` the run's, if any;
    `notice` a sentence for the user if something was chosen for them; `step` the training step;
    `checked` the manifest's SHA-256 by file, to be compared while hashing."""

    path: str
    name: str
    recipe: Path | None = None
    step: int | None = None
    notice: str | None = None
    checked: dict[str, str] = field(default_factory=dict)


def find_model(ckpt: str) -> ModelSource:
    """The model that `--ckpt` names. Raises CheckpointError if there is none."""
    path = Path(ckpt).expanduser()
    if ckpt.startswith("builtin:"):
        return ModelSource(ckpt, ckpt.replace(":", "-"))
    if not path.exists():
        if _HUB_ID.fullmatch(ckpt) and not (path.is_symlink() or path.parent.is_dir()):
            return ModelSource(ckpt, path.name)
        if _HUB_ID.fullmatch(ckpt) and path.parent.is_dir():
            raise CheckpointError(
                f"--ckpt {ckpt}: no such folder in {path.parent}/, which is one here; if it is a "
                "hub id, evaluate from another folder"
            )
        raise CheckpointError(f"--ckpt {ckpt}: no such folder, and not a hub id (owner/name)")
    if not path.is_dir():
        raise CheckpointError(
            f"--ckpt {ckpt} is a file: name the folder of a checkpoint, a run or a model"
        )
    if (path / "model").is_dir():
        return _checkpoint(path.resolve())
    if (path / "checkpoints").is_dir():
        return _latest(path / "checkpoints")
    if (path / "latest").is_symlink():
        return _latest(path)
    if (path / "config.json").is_file():
        return _folder(path.resolve())
    listing = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"--ckpt {ckpt} is no checkpoint: expected a checkpoint (with model/), a run (with "
        f"checkpoints/) or a Hugging Face folder (with config.json), found {listing}"
    )


def model_sha256(path: str, expected: Mapping[str, str], revision: str | None = None) -> str:
    """The SHA-256 over names and contents of weights, configuration and tokenizer of a folder or
    cached hub id, of the latter at a revision.

    Raises CheckpointError for a file whose own SHA-256 is not the `expected` one.
    """
    folder = _local_folder(path, revision)
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if not (file.is_file() and any(file.match(pattern) for pattern in MODEL_FILES)):
            continue
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if expected.get(file.name, found) != found:
            raise CheckpointError(
                f"{file}: its content is not what the checkpoint's manifest says: the checkpoint "
                "is damaged; evaluate another one"
            )
        total.update(f"{file.name}\0{found}\n".encode())
    return total.hexdigest()


def used_revision(revision: str | None, path: str) -> str | None:
    """The revision that counts: a folder has none, whatever the recipe trained from."""
    return None if path.startswith("builtin:") or Path(path).is_dir() else revision


def _latest(checkpoints: Path) -> ModelSource:
    latest = checkpoints / "latest"
    if not latest.is_dir():
        raise CheckpointError(
            f"{checkpoints} has no checkpoint yet (no {latest.name}): name another folder, or let "
            "the run reach its first checkpoint"
        )
    chosen = latest.resolve()
    source = _checkpoint(chosen)
    run = checkpoints.resolve().parent
    return replace(source, notice=f"evaluating {chosen.name}, the latest checkpoint of {run}")


def _checkpoint(checkpoint: Path) -> ModelSource:
    model = checkpoint / "model"
    if not (model / "config.json").is_file():
        raise CheckpointError(f"{model} holds no model (no config.json)")
    manifest = _read_json(checkpoint / "manifest.json", "the checkpoint is incomplete")
    state = _read_json(checkpoint / "state.json", "the checkpoint is incomplete")
    run = checkpoint.parent.parent
    recipe = run / "recipe.yaml"
    try:
        files = manifest["files"].items()
        checked = {
            name.removeprefix("model/"): facts["sha256"]
            for name, facts in files
            if name.startswith("model/")
        }
        step = int(state["step"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: manifest or state is damaged: {error!r}") from error
    missing = [name for name in checked if not (model / name).is_file()]
    if missing:
        raise CheckpointError(f"{model} is damaged: {missing[0]} of its manifest is missing")
    return ModelSource(
        str(model),
        f"{run.name}-{checkpoint.name}",
        recipe if recipe.is_file() else None,
        step,
        checked=checked,
    )


def _folder(folder: Path) -> ModelSource:
    if folder.name == "model" and (folder.parent / "manifest.json").is_file():
        return _checkpoint(folder.parent)
    return ModelSource(str(folder), folder.name)


def _local_folder(path: str, revision: str | None) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except OSError as error:
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(f"model {path!r}{at} is not in the local cache: {error}") from error


def _read_json(path: Path, meaning: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {meaning} ({error})") from error
