"""The one place where the errors of a command become messages and exit codes. Loaded when one
occurs."""

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
    """Report what a command raised; returns the exit code."""
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        return _end_quietly(error)
    return report_error(error)


def _reader_is_gone() -> bool:
    """True if stdout is a pipe that nobody reads any more: `… | head`."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # no descriptor
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _end_quietly(error: BrokenPipeError) -> int:
    """Let Python's last flush go nowhere; returns the exit code that the command had, else 0."""
    from grpo_replay.terminal.console import lead_nowhere

    lead_nowhere(sys.stdout)
    return int(getattr(error.__context__, "exit_code", 0))


def report_error(error: Exception) -> int:
    """Print an error once over all ranks; returns the exit code."""
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
        _of_a_removed_directory(error)
        or _of_a_bad_path(error)
        or _of_a_missing_extra(error)
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
    if place := _foreign_place(error):
        whose = f"error: {type(error).__name__} in {place}, which is no part of grpo-replay"
    else:
        whose = "This is a bug in grpo-replay: please report it with the lines above."
    print_error(printable(without_secrets(lines) + whose))
    return code


def _foreign_place(error: Exception) -> str | None:
    """The innermost line of a traceback that is neither of this package nor of an installed one:
    code that the recipe names. None without one. (Compiled code names files that are not there.)"""
    own = (str(Path(__file__).parent.parent), *sysconfig.get_paths().values(), sys.base_prefix)
    frames = [each for each in traceback.extract_tb(error.__traceback__)
              if not each.filename.startswith((*own, "<"))
              and Path(each.filename).exists()]  # fmt: skip
    return f"{frames[-1].filename} line {frames[-1].lineno}, {frames[-1].name}" if frames else None


def _of_a_bad_path(error: Exception) -> GrpoReplayError | None:
    """The error to show for a path that the system refuses whatever we do with it; else None."""
    if not isinstance(error, OSError) or error.errno not in _BAD_PATH or error.filename is None:
        return None
    name = str(error.filename)
    short = name if len(name) <= 100 else f"{name[:60]}… ({len(name):,} characters)"
    return DataError(f"{short}: {error.strerror}; check the path and its permissions")


def _of_a_removed_directory(error: Exception) -> GrpoReplayError | None:
    """The error to show if there is no working directory any more, where relative paths begin."""
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


def _of_a_missing_extra(error: Exception) -> GrpoReplayError | None:
    """The error to show if an extra of this package that the command needs is not installed."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    from importlib.metadata import PackageNotFoundError, requires

    module = error.name.partition(".")[0]
    wanted = {"zmq": "pyzmq"}.get(module, module).replace("_", "-")
    try:
        lines = requires("grpo-replay") or []
    except PackageNotFoundError:  # a source tree on the path
        return None
    needs = re.compile(rf"{re.escape(wanted)}\b.*extra == ['\"](\w+)['\"]", re.IGNORECASE)
    extras = [found[1] for line in lines if (found := needs.match(line))]
    if not extras:
        return None
    extra = "train" if "train" in extras else extras[0]
    return UsageError(
        f"this command needs {module}, which is not installed: pip install 'grpo-replay[{extra}]'"
    )


def _failed_write(error: Exception) -> str | None:
    """A message for an OSError of a disk that is full or a folder that may not be changed."""
    from grpo_replay.storage.atomic import describe_write_failure

    if not isinstance(error, OSError) or not (reason := describe_write_failure(error)):
        return None
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{reason}"


def _log(error: Exception) -> None:
    """Write the traceback to the run's log, if one is open."""
    if any(isinstance(handler, logging.FileHandler) for handler in logging.root.handlers):
        logging.getLogger("grpo_replay").error("the command failed", exc_info=error)
