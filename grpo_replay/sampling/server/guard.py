"""Run a command, and end its whole process group when the run that started it ends.

    python guard.py PARENT_PID command …

The guard leads its own session, so that a signal to the trainer's process group does not reach the
server in the middle of a step. When the trainer is killed outright, the guard notices within
`POLL_SECONDS` that its parent is gone and ends the server. Run as a script; imports nothing
of this package.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0


def main(parent: int, command: list[str]) -> int:
    """The command's exit code, after all processes of its group have ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    child = subprocess.Popen(command)
    try:
        while child.poll() is None and os.getppid() == parent:
            time.sleep(POLL_SECONDS)
    finally:
        _end_group(child)
    return child.returncode


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end_group(child: subprocess.Popen) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and (child.poll() is None or _group_has_others()):
        time.sleep(POLL_SECONDS)
    if child.poll() is None or _group_has_others():
        os.killpg(0, signal.SIGKILL)  # the guard is one of them


def _group_has_others() -> bool:
    """True if the guard's group has another living process."""
    own, group = os.getpid(), os.getpgid(0)
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if pid == own or os.getpgid(pid) != group:
                continue
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
