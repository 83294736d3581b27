"""Runs a command, and ends its process group when the command or the parent process ends.

    python guard.py PARENT_PID command …

The guard leads its own session, so that a signal to the trainer's process group does not reach the
server in the middle of a step. Linux signals it when its parent ends, even after SIGKILL. It runs
as a script, and imports nothing of this package.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 5.0


def main(parent: int, command: list[str]) -> None:
    """Run `command`, and end its process group when it ends, on SIGTERM, or when the parent has
    ended; SIGKILL after `GRACE_SECONDS`. Does not return: the guard is in that group."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before `prctl`
        sys.exit()
    child = subprocess.Popen(command)
    try:
        child.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
