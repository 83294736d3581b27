"""Atomic writes: a file or folder is complete or missing, even after a power failure if the file
system can flush."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_replay.errors import OutputDirectoryError

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ESTALE, errno.EIO)
_UNSUPPORTED = (errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EPERM)
"""Error numbers of an operation that a file system does not support."""
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
_TORCH_ERROR = re.compile(r"iostream error|inline_container|PytorchStreamWriter")


@contextmanager
def written_whole(path: Path, flushed: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to; then flush the file and rename it to `path`, or remove it
    after an error. Without `flushed` the file survives a kill, but a power failure only after
    `flush_files`."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        if flushed:
            _flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if flushed:
        _flush(path.parent)


@contextmanager
def named_if_unwritable(path: Path) -> Iterator[None]:
    """Turn an OSError into an OutputDirectoryError that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputDirectoryError(
            f"{path} cannot be written: {_with_remedy(reason, error.errno)}"
        ) from error


def write_text_whole(path: Path, text: str) -> None:
    """Write text atomically, as UTF-8."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_whole(path: Path, value: Any) -> None:
    """Write indented ASCII JSON atomically. Raises ValueError for numbers that are not finite."""
    write_text_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def json_values(value: Any) -> Any:
    """Convert a value for JSON: tuples to lists, numbers that are not finite to None."""
    if isinstance(value, Mapping):
        return {key: json_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rename_folder(folder: Path, name: Path) -> None:
    """Rename a folder and flush its parent, so that the new name is on disk."""
    os.rename(folder, name)
    _flush(name.parent)


def try_operation(operation: Callable[..., object], *arguments: Any) -> bool:
    """Call an operation that some file systems do not support. Returns whether it is supported.
    Raises OSError for other failures."""
    try:
        operation(*arguments)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def point_link(link: Path, target: str) -> None:
    """Point the symbolic link `link` at `target`, atomically. If links are not supported, remove
    `link`, which would point at something older."""
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    if not try_operation(os.symlink, target, temporary):
        link.unlink(missing_ok=True)
        return
    os.replace(temporary, link)
    _flush(link.parent)


def missing_operations(trial: Path) -> list[str]:
    """Try file operations in the folder `trial`, which is created and removed. Returns a sentence
    for each optional operation that is missing. Raises OSError if a necessary one fails."""
    shutil.rmtree(trial, ignore_errors=True)
    inner, file, missing = trial / "folder", trial / "renamed" / "file", list[str]()
    inner.mkdir(parents=True)
    (inner / file.name).write_text("trial", encoding="utf-8")
    inner.rename(file.parent)
    if not try_operation(os.symlink, file, trial / "link"):
        missing.append("no symbolic links: there is no `latest`, use the newest step_… instead")
    if not try_operation(file.chmod, file.stat().st_mode & 0o777):
        missing.append(
            "no permissions that can be set: weights may be readable by their owner only"
        )
    with file.open() as opened:
        if not try_operation(os.fsync, opened.fileno()):
            missing.append(
                "no flush to disk: after a power failure files may be missing or damaged"
            )
    shutil.rmtree(trial)
    return missing


def flush_tree(folder: Path) -> None:
    """Flush `folder` and all files and folders below it to disk."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            _flush(path)
    _flush(folder)


def flush_files(paths: Iterable[Path]) -> None:
    """Flush files to disk."""
    for path in paths:
        _flush(path)


def free_bytes(path: Path) -> int:
    """Free bytes for this user on the file system of `path`, which need not exist yet."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def describe_write_failure(error: BaseException) -> str | None:
    """Return reason and remedy of an error that a full or failing disk, a limit on the size of
    files, or a folder without write permission has caused, directly or as a cause of it; None for
    other errors. Also recognises errors of Rust and C++ libraries, which are not OSErrors."""
    cause: BaseException | None = error
    while cause is not None:
        rust_error = _RUST_ERROR.search(str(cause))  # safetensors and tokenizers
        number = int(rust_error[1]) if rust_error else getattr(cause, "errno", None)
        if number in (*_FULL_DISK, *_FORBIDDEN):
            return _with_remedy(os.strerror(number), number)
        if isinstance(cause, RuntimeError) and _TORCH_ERROR.search(str(cause)):
            return _with_remedy(f"torch says {str(cause).splitlines()[0]!r}", None)
        cause = cause.__cause__ or cause.__context__
    return None


def _with_remedy(reason: str, number: int | None) -> str:
    """The reason of a failed write, and what to do. With `number` None the cause is not known."""
    remedies = {
        "free space there or raise the limit": number is None or number in _FULL_DISK,
        "make the folder writable or choose another path": number not in _FULL_DISK,
    }
    return f"{reason}; {', or '.join(text for text, applies in remedies.items() if applies)}"


def flush_descriptor(descriptor: int) -> None:
    """Flush an open file or folder to disk, if the file system supports it."""
    try_operation(os.fsync, descriptor)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush_descriptor(descriptor)
    finally:
        os.close(descriptor)
