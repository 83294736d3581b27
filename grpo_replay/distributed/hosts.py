"""The hosts of a run on several nodes: the hostfile, and whether ssh reaches them."""

import re
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from grpo_replay.errors import LaunchError, UsageError

_SSH_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Host:
    """A line of the hostfile: `name slots=8`."""

    name: str
    slots: int
    line: int


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a DeepSpeed (MPI style) hostfile: `name slots=8` per line.

    Raises UsageError with file and line for anything else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path}: cannot be read: {error}") from error
    hosts: dict[str, Host] = {}
    for number, text in enumerate(lines, start=1):
        line = text.split("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if match is None or int(match[2]) < 1:
            raise UsageError(f"{path}:{number}: expected `host slots=8`, found {line!r}")
        if match[1] in hosts:
            raise UsageError(f"{path}:{number}: {match[1]!r} is already on line "
                             f"{hosts[match[1]].line}; give each host one line")  # fmt: skip
        hosts[match[1]] = Host(match[1], int(match[2]), number)
    if not hosts:
        raise UsageError(f"{path}: no hosts; expected lines such as `host slots=8`")
    return list(hosts.values())


def is_here(name: str) -> bool:
    """Whether the name is this machine's."""
    return name in {"localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()}


def refuse_unreachable(hosts: Sequence[Host], hostfile: Path) -> None:
    """Raises LaunchError with the lines of the hosts on which `ssh host true` fails."""
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        answers = list(pool.map(_ssh_failure, hosts))
    failed = [(host, why) for host, why in zip(hosts, answers, strict=True) if why is not None]
    if not failed:
        return
    lines = [f"  {hostfile}:{host.line}: {host.name}: {why}" for host, why in failed[:5]]
    raise LaunchError(
        f"{len(failed)} of {len(hosts)} hosts cannot be reached over ssh:\n" + "\n".join(lines)
        + "\npassword-less ssh from this machine to each host is needed (docs/scaling.md)"
    )  # fmt: skip


def _ssh_failure(host: Host) -> str | None:
    """Why `ssh host true` fails, or None."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_SECONDS}",
               host.name, "true"]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * _SSH_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip() or "no answer").splitlines()[-1]
