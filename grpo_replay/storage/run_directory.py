"""A run's directory: its lock, its files, and how a resume goes back to a step.

All files of a step are written before the step's checkpoint. To go back to a checkpoint it is
therefore enough to remove later files; nothing that belongs to the checkpoint can be missing.
"""

import fcntl
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from grpo_replay import __version__
from grpo_replay.errors import CheckpointError, OutputDirectoryError, RecipeError
from grpo_replay.recipe import Recipe, read_recipe_layer, recipe_to_yaml, resolve_recipe
from grpo_replay.storage.atomic import write_json_whole, write_text_whole
from grpo_replay.storage.versions import VLLM_PACKAGES, installed_version

LOCK = ".lock"
STEP_FOLDERS = ("rollouts", "draws", "eval")
_STEP_NAME = re.compile(r"step_(\d+)")


class _AttemptLog(logging.FileHandler):
    """The log file of one attempt. A process has at most one open."""


class RunDirectory:
    """Paths and small files of one run. Only rank 0 writes, except for each rank's own log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.recipe_path = path / "recipe.yaml"
        self.checkpoints = path / "checkpoints"
        self.summary_path = path / "summary.json"
        self._lock: IO[str] | None = None

    @property
    def exists(self) -> bool:
        """True if a run was started here before."""
        return self.recipe_path.exists() or self.metrics_path.exists()

    def lock(self) -> None:
        """Lock the directory until this process ends, in whatever way it ends.

        Raises OutputDirectoryError if another process holds the lock.
        """
        try:
            self._lock = (self.path / LOCK).open("a+")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            raise OutputDirectoryError(
                f"output directory {self.path} is in use by process {self._lock.read().strip()}: "
                "wait for it or stop it, or choose another --output-dir"
            ) from error
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()

    def unlock(self) -> None:
        """Release the lock, if held."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def refuse_occupied(self) -> None:
        """Raises OutputDirectoryError if the directory of a new run already contains files."""
        if self.path.exists() and not self.path.is_dir():
            raise OutputDirectoryError(
                f"output directory {self.path} is not a directory: choose another --output-dir"
            )
        if self.path.exists() and self._files():
            found = "another run" if self.exists else "other files"
            remedy = ", or continue that run with --resume" if self.exists else ""
            raise OutputDirectoryError(
                f"output directory {self.path} already holds {found}: choose another "
                f"--output-dir{remedy}"
            )

    def _files(self) -> list[Path]:
        return [path for path in self.path.iterdir() if path.name != LOCK]

    def create(self, recipe: Recipe) -> None:
        """Create the directory of a new run. Raises OutputDirectoryError if it is occupied."""
        self.refuse_occupied()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        self.lock()
        self.refuse_occupied()  # another process may have created files before we got the lock
        self._write_opening(recipe)

    def reopen(self, recipe: Recipe, step: int) -> list[str]:
        """Go back to the end of `step` (0: the start). Returns the changes of the recipe."""
        changes = self._recipe_changes(recipe)
        self._truncate_metrics(step)
        for folder in STEP_FOLDERS:
            for file in (self.path / folder).glob("step_*"):
                if _step_of(file) > step:
                    _remove(file)
        for checkpoint in self.checkpoints.glob("step_*"):
            if _step_of(checkpoint) > step:
                _remove(checkpoint)
        for leftover in self.checkpoints.glob(".tmp-*"):
            _remove(leftover)
        self.summary_path.unlink(missing_ok=True)
        self._write_opening(recipe)
        return changes

    def _write_opening(self, recipe: Recipe) -> None:
        try:
            for folder in ("rollouts", "draws", "eval", "checkpoints", "log"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            write_text_whole(self.recipe_path, recipe_to_yaml(recipe))
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> OutputDirectoryError:
        return OutputDirectoryError(
            f"output directory {self.path} cannot be written: {error}; choose another "
            "--output-dir, free space, or change its permissions"
        )

    def _recipe_changes(self, recipe: Recipe) -> list[str]:
        if not self.recipe_path.exists():
            return []
        try:
            before = resolve_recipe([read_recipe_layer(self.recipe_path)], str(self.recipe_path))
        except RecipeError as error:
            raise OutputDirectoryError(
                f"{self.path} cannot be resumed: its recipe.yaml is no longer valid: {error}"
            ) from error
        old, new = flatten(before.model_dump()), flatten(recipe.model_dump())
        return [
            f"{key}: {old.get(key)!r} -> {new[key]!r}" for key in new if old.get(key) != new[key]
        ]

    def _truncate_metrics(self, step: int) -> None:
        if not self.metrics_path.exists():
            return
        kept = []
        for line in self.metrics_path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break  # an incomplete last line, from a kill during the write
            if row["step"] <= step:
                kept.append(line + "\n")
        if len(kept) != step:
            raise CheckpointError(
                f"{self.metrics_path} has {len(kept)} complete lines up to step {step}, which "
                f"the checkpoint of that step needs: the file was changed; restore it, or start "
                "a new run"
            )
        write_text_whole(self.metrics_path, "".join(kept))

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics, allow_nan=False) + "\n")
            file.flush()

    def read_metrics(self) -> list[dict[str, Any]]:
        """The metrics of every training step so far, in order."""
        lines = self.metrics_path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def flush_metrics(self) -> None:
        """Flush the metrics to disk, before a checkpoint that relies on them."""
        if self.metrics_path.exists():
            with self.metrics_path.open("rb") as file:
                os.fsync(file.fileno())

    def write_environment(self, attempt: int, facts: Mapping[str, Any]) -> None:
        write_json_whole(self.path / "environment.json", {"attempt": attempt, **facts})

    def next_attempt(self) -> int:
        """Number of the next attempt, from 1."""
        logs = (self.path / "log").glob("attempt_*.log")
        return 1 + sum(".rank_" not in log.name for log in logs)

    def open_log(self, attempt: int, rank: int = 0) -> Path:
        """Send this process's logging to the rank's log file of the attempt, and return its path.

        Log files of earlier runs in this process are closed. This one stays open after the run, for
        errors that come later.
        """
        own = f".rank_{rank}" if rank > 0 else ""
        path = self.path / "log" / f"attempt_{attempt:03d}{own}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = _AttemptLog(path, encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        for earlier in [h for h in root.handlers if isinstance(h, _AttemptLog)]:
            root.removeHandler(earlier)
            earlier.close()
        root.addHandler(handler)
        logging.getLogger("grpo_replay").setLevel(logging.INFO)
        return path


def environment_facts(world_size: int) -> dict[str, Any]:
    """Package versions, hardware, git commit and command of this attempt."""
    import torch

    packages = ("torch", "transformers", "deepspeed", *VLLM_PACKAGES, "datasets",
                "math-verify", "numpy", "pyarrow")  # fmt: skip
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "grpo_replay": __version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "packages": {package: installed_version(package) for package in packages},
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "gpus": gpus,
        "world_size": world_size,
        "command": sys.argv,
    }


def _git_commit() -> str | None:
    """The git commit of this checkout; None for an installed package or without git."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True
            )
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed package may lie inside another git repository without being part of it.
    tracked = git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    return git("rev-parse", "HEAD") if tracked else None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one level: dotted keys to leaf values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _step_of(path: Path) -> int:
    match = _STEP_NAME.match(path.name)
    return int(match.group(1)) if match else -1


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
