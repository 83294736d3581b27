"""Runs one command and takes its whole process group along when the run that asked for it ends.

    python guard.py PARENT_PID command …

The guard leads a session of its own, so that a signal to the trainer's group does not reach the
server half way through a step, and a trainer that was killed outright leaves nothing behind: the
guard notices within `POLL_SECONDS` that its parent is gone. Standard library only; run as a script.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0


def main(parent: int, command: list[str]) -> int:
    """The command's exit code, once nothing of its group is left."""
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
    """Whether a living process other than the guard is in its group (reads /proc)."""
    own, group = os.getpid(), os.getpgid(0)
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == own:
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as stat:
                state, _, process_group = stat.read().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state != "Z":
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
