"""Files and folders that are there whole or not at all, also after a power cut."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_replay.errors import OutputDirectoryError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """The temporary name under which to write; flushed and renamed to `path` at the end, removed
    after an error."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush(path.parent)


@contextmanager
def named_if_unwritable(path: Path) -> Iterator[None]:
    """An OSError becomes an OutputDirectoryError that says what could not be written."""
    try:
        yield
    except OSError as error:
        raise OutputDirectoryError(
            f"{path} cannot be written ({error.strerror or error}): free space there, make its "
            "folder writable, or name another place"
        ) from error


def write_text_whole(path: Path, text: str) -> None:
    """Write text as UTF-8."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_whole(path: Path, value: Any) -> None:
    """Write indented JSON in ASCII. Raises ValueError for numbers that are not finite."""
    write_text_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def rename_folder(folder: Path, name: Path) -> None:
    """Rename a folder, and have the new name on disk."""
    os.rename(folder, name)
    _flush(name.parent)


def point_link(link: Path, target: str) -> None:
    """Make the symbolic link `link` name `target`, in one step."""
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
    _flush(link.parent)


def flush_tree(folder: Path) -> None:
    """Have every file and folder below `folder`, and itself, on disk."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems flush files but no folders
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
