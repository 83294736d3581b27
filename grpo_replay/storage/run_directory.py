"""The directory of a run: its lock, its files, and the return to a checkpoint's step.

All files of a step are written and flushed before the step's checkpoint. Returning to a checkpoint
therefore only removes later files, after `check` has found everything that the checkpoint needs
(`go_back`).
"""

import datetime
import errno
import fcntl
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from grpo_replay.errors import CheckpointError, OutputDirectoryError
from grpo_replay.recipe import Recipe
from grpo_replay.recipe.open_lists import VLLM_PACKAGES
from grpo_replay.storage.atomic import (
    flush_files,
    named_if_unwritable,
    write_json_whole,
    write_text_whole,
)
from grpo_replay.storage.checkpoint import leftovers
from grpo_replay.storage.rollout_log import (
    STEP_FOLDERS,
    first_steps,
    read_metrics,
    remove_later,
    step_files,
)
from grpo_replay.storage.starts import record_start
from grpo_replay.storage.stored_recipe import (
    RECIPE_FILE,
    read_recipe_file,
    refuse_secrets,
    write_recipe,
)
from grpo_replay.terminal.quiet import RedactingFormatter, without_secrets
from grpo_replay.version import __version__


def installed_version(package: str) -> str | None:
    """Returns the installed version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed, in the given order."""
    versions = {package: installed_version(package) for package in packages}
    return {package: found for package, found in versions.items() if found is not None}


LOCK, JOURNAL_FOLDER = ".lock", "journal"
_FOLDERS = (*STEP_FOLDERS, "checkpoints", "log")
_IS_HELD = (errno.EAGAIN, errno.EACCES)
"""Error numbers of flock if another process holds the lock."""
_OPENING_FILES = (LOCK, f"{RECIPE_FILE}.tmp")


class _AttemptLog(logging.FileHandler):
    """The log file of one attempt; a process has at most one open. If it cannot be written, for
    example on a full disk, prints one line to stderr, instead of a traceback for each record."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            reason = f"the log {self.baseFilename} cannot be written: {sys.exc_info()[1]}"
            print(reason, file=sys.stderr)


class RunDirectory:
    """Paths and small files of one run. Only rank 0 writes, except for each rank's own log."""

    def __init__(self, path: Path) -> None:
        """Names the files; creates nothing."""
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.recipe_path = path / RECIPE_FILE
        self.checkpoints = path / "checkpoints"
        self.summary_path = path / "summary.json"
        self._lock: IO[str] | None = None
        self._flushed_step = 0

    @property
    def exists(self) -> bool:
        """True if a run was started here before."""
        return self.recipe_path.exists() or self.metrics_path.exists()

    def lock(self) -> None:
        """Lock the directory until this process ends, even if it is killed.

        Raises OutputDirectoryError if another process holds the lock, or the file system has none.
        """
        with named_if_unwritable(self.path):
            self._lock = (self.path / LOCK).open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _IS_HELD:
                raise self._in_use() from error
            raise OutputDirectoryError(
                f"output directory {self.path} cannot be locked ({error.strerror}): choose an "
                "--output-dir on a file system with flock (Lustre: mounted with -o flock; NFS: its "
                "lock service runs)"
            ) from error
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()} on {platform.node()}\n")
        self._lock.flush()

    def refuse_in_use(self) -> None:
        """Raises OutputDirectoryError if a process holds the lock."""
        if is_locked(self.path / LOCK):
            raise self._in_use()

    def _in_use(self) -> OutputDirectoryError:
        process = (self.path / LOCK).read_text().strip()
        return OutputDirectoryError(
            f"output directory {self.path} is in use by process {process}: wait for it or stop it, "
            "or choose another --output-dir"
        )

    def unlock(self) -> None:
        """Release the lock, if held."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def holds_only_opening_files(self) -> bool:
        """True for a folder with only the files that a run may leave if it dies while it starts."""
        return self.path.is_dir() and self._names <= set(_OPENING_FILES)

    @property
    def is_free(self) -> bool:
        """True for a folder in which a run may start: it is empty, or has a run without steps,
        checkpoints, evaluations and journal."""
        if not self.path.is_dir():
            return not self.path.exists()
        # A run locks its folder first, so without a lock the files are not those of a run.
        results = {*STEP_FOLDERS, "checkpoints", JOURNAL_FOLDER, self.metrics_path.name}
        return self.holds_only_opening_files or (
            (self.path / LOCK).exists() and not results & self._names
        )

    @property
    def _names(self) -> set[str]:
        """Names of files and folders in the directory, except the empty folders of a run."""
        return {
            path.name
            for path in self.path.iterdir()
            if path.name not in _FOLDERS or not path.is_dir() or any(path.iterdir())
        }

    def refuse_occupied(self) -> None:
        """Raises OutputDirectoryError if a new run's directory has files, or cannot be one."""
        if self.path.is_symlink() and not self.path.exists():
            raise OutputDirectoryError(
                f"output directory {self.path} is a link to {self.path.readlink()}, which does "
                "not exist: make that folder, or choose another --output-dir"
            )
        if self.path.exists() and not self.path.is_dir():
            raise OutputDirectoryError(
                f"output directory {self.path} is not a directory: choose another --output-dir"
            )
        if not self.is_free:
            content = "another run" if self.exists else "other files"
            remedy = ", or continue that run with --resume" if self.exists else ""
            raise OutputDirectoryError(
                f"output directory {self.path} already holds {content}: choose another "
                f"--output-dir{remedy}"
            )

    def refuse_unwritable(self) -> None:
        """Raises OutputDirectoryError if this user may not write to or create the folder."""
        existing = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            raise OutputDirectoryError(
                f"output directory {self.path}: {existing} cannot be written: choose another "
                "--output-dir, or change its permissions"
            )

    def create(self, recipe: Recipe) -> None:
        """Create the directory of a new run. Raises OutputDirectoryError if it is occupied,
        RecipeError if the recipe holds a secret."""
        refuse_secrets(recipe)
        self.refuse_occupied()
        with named_if_unwritable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        self.refuse_occupied()  # another process may have created files before we got the lock
        with named_if_unwritable(self.path):
            self._make_folders()
            write_recipe(self.recipe_path, recipe)
            record_start(self.path, recipe, 0)

    def check(self, step: int) -> int:
        """Check the files that a resume after `step` needs, and change nothing. Returns the number
        of steps that were made. Raises CheckpointError for missing metrics, RecipeError for a
        recipe that cannot be read."""
        first_steps(self.metrics_path, step)
        made = self.metrics_path.read_bytes().count(b"\n") if self.metrics_path.exists() else 0
        every_steps = read_recipe_file(self.recipe_path).checkpoint.every_steps
        if step == 0 and made > every_steps:  # a resume would remove every step
            raise CheckpointError(
                f"{self.checkpoints} holds no checkpoint, though {self.metrics_path} has "
                f"{made} steps and one was due every {every_steps}: restore it, or start a "
                "new run in another --output-dir. Nothing was changed"
            )
        return made

    def go_back(self, recipe: Recipe, step: int) -> None:
        """Go back to the end of `step` (0: the start), to continue from there with `recipe`:
        removes later metrics, step files and unfinished checkpoints, and stores the recipe and the
        start. If the recipe changed, an evaluation of the base model is removed when step is 0."""
        with named_if_unwritable(self.path):
            if self.metrics_path.exists():
                kept = first_steps(self.metrics_path, step)
                write_text_whole(self.metrics_path, "".join(f"{line}\n" for line in kept))
            is_changed = read_recipe_file(self.recipe_path) != recipe
            if is_changed:
                write_recipe(self.recipe_path, recipe)
            record_start(self.path, recipe, step, step > 0 and not recipe.checkpoint.restore_buffer)
            remove_later(self.path, step)
            if step == 0 and is_changed:  # the evaluation of the base model may have changed
                for suffix in ("json", "parquet"):
                    (self.path / "eval" / f"step_000000.{suffix}").unlink(missing_ok=True)
            for leftover in leftovers(self.checkpoints):
                shutil.rmtree(leftover)
            self.summary_path.unlink(missing_ok=True)
            self._make_folders()
        self._flushed_step = step

    def _make_folders(self) -> None:
        for folder in _FOLDERS:
            (self.path / folder).mkdir(parents=True, exist_ok=True)

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append a step's line to metrics.jsonl. Raises OutputDirectoryError on a full disk."""
        line = json.dumps(metrics, allow_nan=False) + "\n"
        with (
            named_if_unwritable(self.metrics_path),
            self.metrics_path.open("a", encoding="utf-8") as file,
        ):
            file.write(line)
            file.flush()

    def add_to_last_metrics(self, metrics: Mapping[str, Any]) -> bool:
        """Add metrics to the line of the last step, unless it has them. Returns whether it did."""
        lines = self.metrics_path.read_text(encoding="utf-8").splitlines()
        last = json.loads(lines[-1])
        if metrics.keys() <= last.keys():
            return False
        lines[-1] = json.dumps(last | dict(metrics), allow_nan=False)
        with named_if_unwritable(self.metrics_path):
            write_text_whole(self.metrics_path, "".join(f"{line}\n" for line in lines))
        return True

    def read_metrics(self) -> list[dict[str, Any]]:
        """Returns the metrics of every training step so far, in order."""
        return list(read_metrics(self.metrics_path, allow_unfinished=False))

    def flush_steps(self, step: int) -> None:
        """Flush metrics and files of steps up to `step`, before its checkpoint is written."""
        files = step_files(self.path, self._flushed_step + 1, step)
        folders = [self.path / name for name in STEP_FOLDERS]
        metrics = [self.metrics_path] if self.metrics_path.exists() else []
        flush_files([*files, *folders, *metrics])
        self._flushed_step = step

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, the last file of a run."""
        with named_if_unwritable(self.summary_path):
            write_json_whole(self.summary_path, summary)

    def write_environment(self, attempt: int, facts: Mapping[str, Any]) -> None:
        write_json_whole(self.path / "environment.json", {"attempt": attempt, **facts})

    def next_attempt(self) -> int:
        """Returns the number of the next attempt, from 1."""
        logs = (self.path / "log").glob("attempt_*.log")
        return 1 + sum(".rank_" not in log.name for log in logs)

    def log_path(self, attempt: int, rank: int = 0) -> Path:
        """Returns the log file of a rank in an attempt."""
        own = f".rank_{rank}" if rank > 0 else ""
        return self.path / "log" / f"attempt_{attempt:03d}{own}.log"

    def open_log(self, attempt: int, rank: int = 0) -> Path:
        """Send this process's logging to the rank's log file of the attempt, and return its path.

        Closes the log files of earlier runs in this process. The new one stays open after the run,
        for later errors.
        """
        path = self.log_path(attempt, rank)
        with named_if_unwritable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = _AttemptLog(path, encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        for earlier in [h for h in root.handlers if isinstance(h, _AttemptLog)]:
            root.removeHandler(earlier)
            earlier.close()
        root.addHandler(handler)
        logging.getLogger("grpo_replay").setLevel(logging.INFO)
        return path


def default_run_dir(name: str) -> Path:
    """Returns the default directory of a new run of the recipe `name`."""
    return Path(f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}")


def refuse_missing(run_dir: Path) -> None:
    """Raises CheckpointError if the folder holds no run to resume: none, a checkpoint instead of
    its run, or the run of another trainer."""
    if not RunDirectory(run_dir).exists:
        in_run = run_dir.absolute().parent.name == "checkpoints"
        remedy = (
            f"it is a checkpoint of the run {run_dir.absolute().parent.parent}: give that one"
            if in_run
            else "check --output-dir, or leave --resume out to start one there"
        )
        raise CheckpointError(f"--resume: {run_dir} holds no run (no {RECIPE_FILE}): {remedy}")
    if is_of_another_trainer(run_dir):
        raise CheckpointError(
            f"--resume: {run_dir} holds the run of another trainer (metrics.jsonl without "
            "environment.json, with which every run of grpo-replay train begins): continue it "
            "there, in TRL with resume_from_checkpoint. Nothing was changed"
        )


def is_of_another_trainer(run_dir: Path) -> bool:
    """Returns True for a folder that replay in another trainer wrote (`integrations`)."""
    own = any((run_dir / name).exists() for name in ("environment.json", LOCK, "checkpoints"))
    return (run_dir / "metrics.jsonl").exists() and not own


def environment_facts(world_size: int) -> dict[str, Any]:
    """Return packages, hardware, git commit and command (without secrets), for environment.json."""
    import torch

    packages = ("torch", "transformers", "deepspeed", *VLLM_PACKAGES, "datasets",
                "math-verify", "reasoning-gym", "numpy", "pyarrow")  # fmt: skip
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
        "command": [without_secrets(word) for word in sys.argv],
    }


def _git_commit() -> str | None:
    """Returns the git commit of the package's checkout; None if it is installed or without git."""

    def git(*words: str) -> str | None:
        """Returns the output of git; None if it fails."""
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


def is_locked(path: Path) -> bool:
    """Return whether a process holds a file's lock; False without file, or locks on its disk."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _IS_HELD
    return False


def read_summary(run: Path) -> dict[str, Any] | None:
    """summary.json of a finished run; None if the run has not finished."""
    path = run / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
