"""Temporary folders that do not outlive their process for long: those of killed ones are removed
by the next that makes one of the kind."""

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import IO

LOCK = "in-use"


class HeldFolder:
    """A new folder `path` of mode 700 in `parent` (None: the system's for temporary files), whose
    name begins with `prefix`. Folders with that beginning that no process holds are removed."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _remove_abandoned(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        unnamed = self.path / f"{LOCK}.new"
        self._lock: IO | None = _locked(unnamed)
        unnamed.rename(self.path / LOCK)  # only now may others judge by it

    def release(self) -> None:
        """Remove it. A no-op the second time."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()
            self._lock = None


def _locked(path: Path) -> IO:
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
