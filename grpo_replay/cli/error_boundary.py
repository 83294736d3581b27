"""Turns the errors of a command into messages and exit codes. Imported at the first error."""

import errno
import logging
import os
import re
import select
import sys
import sysconfig
import traceback
from pathlib import Path

from grpo_replay.errors import (
    DataError,
    GrpoReplayError,
    OutputDirectoryError,
    UsageError,
)

_BAD_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


def exit_code_of(error: Exception) -> int:
    """Report the error of a command; returns the exit code."""
    if isinstance(error, BrokenPipeError) and _reader_is_closed():
        return _end_quietly(error)
    return report_error(error)


def _reader_is_closed() -> bool:
    """Returns whether stdout is a pipe whose reader has closed it: `… | head`."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # no descriptor
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _end_quietly(error: BrokenPipeError) -> int:
    """Redirect Python's last flush to /dev/null; returns the exit code of the command, else 0."""
    from grpo_replay.terminal.console import redirect_to_devnull

    redirect_to_devnull(sys.stdout)
    return int(getattr(error.__context__, "exit_code", 0))


def report_error(error: Exception) -> int:
    """Print an error once over all ranks, and log it; returns the exit code. An error of this
    package is one line without a traceback; others get one, with the user's code or a bug as
    origin. A lost peer's and a full disk's errors are reworded first."""
    from grpo_replay.distributed.failures import (
        PeerFailure,
        is_lost_peer,
        is_reported_elsewhere,
        lost_contact,
        print_error,
        wait_until_printed,
    )
    from grpo_replay.terminal.console import printable
    from grpo_replay.terminal.quiet import without_secrets

    _log(error)
    error = (
        _removed_directory_error(error)
        or _bad_path_error(error)
        or _missing_extra_error(error)
        or error
    )
    if is_lost_peer(error):
        error = lost_contact(error)
    elif reason := _failed_write(error):
        error = OutputDirectoryError(reason)
    code = error.exit_code if isinstance(error, GrpoReplayError) else 1
    if is_reported_elsewhere(error):
        if isinstance(error, PeerFailure):
            wait_until_printed()
        return code
    if isinstance(error, GrpoReplayError):
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print_error(printable(without_secrets(f"error: {error}{notes}")))
        return code
    lines = "".join(traceback.format_exception(error))
    if location := _user_code_location(error):
        origin = f"error: {type(error).__name__} in {location}, which is not part of grpo-replay"
    else:
        origin = "This is a bug in grpo-replay: please report it with the lines above."
    print_error(printable(without_secrets(lines) + origin))
    return code


def _user_code_location(error: Exception) -> str | None:
    """Returns the innermost line of a traceback outside this package and installed ones, which is
    code that the recipe names; None without. (Compiled code names files that do not exist.)"""
    installed = (
        str(Path(__file__).parent.parent),
        *sysconfig.get_paths().values(),
        sys.base_prefix,
    )
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith((*installed, "<"))
              and Path(frame.filename).exists()]  # fmt: skip
    return f"{frames[-1].filename} line {frames[-1].lineno}, {frames[-1].name}" if frames else None


def _bad_path_error(error: Exception) -> GrpoReplayError | None:
    """Returns the error to show for a path that the operating system refuses; else None."""
    if not isinstance(error, OSError) or error.errno not in _BAD_PATH or error.filename is None:
        return None
    name = str(error.filename)
    short = name if len(name) <= 100 else f"{name[:60]}… ({len(name):,} characters)"
    return DataError(f"{short}: {error.strerror}; check the path and its permissions")


def _removed_directory_error(error: Exception) -> GrpoReplayError | None:
    """Returns the error to show if the working directory was removed; else None."""
    if not isinstance(error, FileNotFoundError):
        return None
    try:
        os.getcwd()
    except FileNotFoundError:
        return DataError(
            "the working directory was removed while this process is in it: change to one that "
            "exists (cd), and start again"
        )
    return None


def _missing_extra_error(error: Exception) -> GrpoReplayError | None:
    """Returns the error to show if an extra of this package is not installed; else None."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    from importlib.metadata import PackageNotFoundError, requires

    module = error.name.partition(".")[0]
    package = {"zmq": "pyzmq"}.get(module, module).replace("_", "-")
    try:
        lines = requires("grpo-replay") or []
    except PackageNotFoundError:  # a source tree on the path
        return None
    pattern = re.compile(rf"{re.escape(package)}\b.*extra == ['\"](\w+)['\"]", re.IGNORECASE)
    extras = [match[1] for line in lines if (match := pattern.match(line))]
    if not extras:
        return None
    extra = "train" if "train" in extras else extras[0]
    return UsageError(
        f"this command needs {module}, which is not installed: pip install 'grpo-replay[{extra}]'"
    )


def _failed_write(error: Exception) -> str | None:
    """Returns the message for an OSError of a full disk or a missing permission; else None."""
    from grpo_replay.storage.atomic import describe_write_failure

    if not isinstance(error, OSError) or not (reason := describe_write_failure(error)):
        return None
    file = f"{error.filename}: " if error.filename else ""
    return f"{file}{reason}"


def _log(error: Exception) -> None:
    """Write the traceback to the run's log, if one is open."""
    if any(isinstance(handler, logging.FileHandler) for handler in logging.root.handlers):
        logging.getLogger("grpo_replay").error("the command failed", exc_info=error)
