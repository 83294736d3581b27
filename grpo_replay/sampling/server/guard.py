"""Run a command, and end its whole process group when the run that started it ends.

    python guard.py PARENT_PID command …

The guard leads its own session, so that a signal to the trainer's process group does not reach the
server in the middle of a step. When the trainer is killed outright, the guard notices within
`POLL_SECONDS` that its parent is gone and ends the server. Run as a script; standard library only.
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
    """True if the guard's group has another living process (reads /proc)."""
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
