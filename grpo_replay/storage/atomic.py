"""Atomic writes: a file or folder is complete or absent, even after a power failure, if the file
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
"""What file systems say of an operation that they do not have."""
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
_TORCH_ERROR = re.compile(r"iostream error|inline_container|PytorchStreamWriter")


@contextmanager
def written_whole(path: Path, flushed: bool = True) -> Iterator[Path]:
    """Yields a temporary path to write to. The file is then flushed and renamed to `path`, or
    removed after an error. Without `flushed` it is whole after a kill, but only `flush_files` makes
    it survive a power failure."""
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
    """The value with tuples as lists, and null for every number that is not finite."""
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
    """Call an operation that some file systems do not have; returns whether this one has it. Raises
    OSError for other failures."""
    try:
        operation(*arguments)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def point_link(link: Path, target: str) -> None:
    """Point the symbolic link `link` at `target`, atomically. Without symbolic links there is none
    afterwards: an old one would point at something else."""
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    if not try_operation(os.symlink, target, temporary):
        link.unlink(missing_ok=True)
        return
    os.replace(temporary, link)
    _flush(link.parent)


def missing_operations(trial: Path) -> list[str]:
    """A sentence for each operation that the file system lacks and a run can do without, tried in
    the folder `trial`, which is made and removed. Raises OSError for an operation that it needs."""
    shutil.rmtree(trial, ignore_errors=True)
    inner, file, lacks = trial / "folder", trial / "renamed" / "file", list[str]()
    inner.mkdir(parents=True)
    (inner / file.name).write_text("trial", encoding="utf-8")
    inner.rename(file.parent)
    if not try_operation(os.symlink, file, trial / "link"):
        lacks.append(
            "no symbolic links: `latest` is missing there, the newest step_… stands for it"
        )
    if not try_operation(file.chmod, file.stat().st_mode & 0o777):
        lacks.append("no permissions that can be set: weights may be readable by their owner alone")
    with file.open() as opened:
        if not try_operation(os.fsync, opened.fileno()):
            lacks.append("no flush to disk: after a power failure files may be missing or damaged")
    shutil.rmtree(trial)
    return lacks


def flush_tree(folder: Path) -> None:
    """Flush `folder` and all files and folders below it to disk."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            _flush(path)
    _flush(folder)


def flush_files(paths: Iterable[Path]) -> None:
    """Flush these files to disk."""
    for path in paths:
        _flush(path)


def free_bytes(path: Path) -> int:
    """Free bytes for this user on the file system of `path`, which need not exist yet."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def describe_write_failure(error: BaseException) -> str | None:
    """Reason and remedy of an error caused by a disk that is full or fails, a limit on the size of
    files, or a folder that may not be changed; None for other errors. Needed because
    only Python raises an OSError for these; Rust and C++ libraries do not."""
    seen: BaseException | None = error
    while seen is not None:
        from_rust = _RUST_ERROR.search(str(seen))  # safetensors and tokenizers
        number = int(from_rust[1]) if from_rust else getattr(seen, "errno", None)
        if number in (*_FULL_DISK, *_FORBIDDEN):
            return _with_remedy(os.strerror(number), number)
        if isinstance(seen, RuntimeError) and _TORCH_ERROR.search(str(seen)):
            return _with_remedy(f"torch says {str(seen).splitlines()[0]!r}", None)
        seen = seen.__cause__ or seen.__context__
    return None


def _with_remedy(reason: str, number: int | None) -> str:
    """The reason of a failed write, and what to do. Without an error number it may be any."""
    remedies = {
        "free space there or raise the limit": number is None or number in _FULL_DISK,
        "make the place writable or choose another path": number not in _FULL_DISK,
    }
    return f"{reason}; {', or '.join(text for text, fits in remedies.items() if fits)}"


def flush_descriptor(descriptor: int) -> None:
    """Flush an open file or folder to disk, if its file system can."""
    try_operation(os.fsync, descriptor)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush_descriptor(descriptor)
    finally:
        os.close(descriptor)
