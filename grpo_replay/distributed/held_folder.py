"""Temporary folders that are removed after their process: those of a killed process by the next one
that makes a folder with the same prefix."""

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import IO

LOCK = "in-use"


class HeldFolder:
    """A new folder `path` of mode 700 in `parent` (None: the system's for temporary files), whose
    name begins with `prefix`. Folders with that prefix that no process holds are removed."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _remove_abandoned(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        unnamed = self.path / f"{LOCK}.new"
        self._lock: IO | None = _locked(unnamed)
        unnamed.rename(self.path / LOCK)  # others see the lock file only once it is locked

    def release(self) -> None:
        """Remove the folder. A no-op the second time."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()
            self._lock = None


def _locked(path: Path) -> IO:
    """Opens and locks a file until it is closed. Raises OSError if another process holds it."""
    lock = path.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or just removed
            if (folder / LOCK).is_file():
                with _locked(folder / LOCK):
                    shutil.rmtree(folder)
