"""Whether the base of grpo-replay installs beside other trainers, by a dry run of pip, which reads
metadata and installs nothing. Usage: check_peers.py [NAME==VERSION]…

A conflict of requirements fails. A peer that this index, platform or Python cannot resolve at all,
even alone, is printed with pip's reason, and so is one that takes longer than the limit.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS = [  # the newest of each, and an older TRL
    "trl==1.16.0", "verl==0.9.1", "ms-swift==4.6.0", "openrlhf==0.11.2", "skyrl==0.3.0",
    "areal==1.0.4", "trl==1.13.0",
]  # fmt: skip
LIMIT_SECONDS = 120
ALL_SECONDS = 600
"""After this time no further peer is tried, and the screen names those left out."""
CANNOT_BUILD = {"flash-attn"}
"""Requirements whose metadata pip gets only by a build that needs torch: left out."""


def resolve(*requirements: str) -> str | None:
    """None if pip finds versions that fit together, else its last error. Raises TimeoutExpired."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "-q", "--ignore-installed"]
    done = subprocess.run(
        [*command, *requirements], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    return (errors or done.stderr.splitlines() or ["pip failed"])[-1]


def requirements_of(peer: str) -> list[str]:
    """The peer; if it needs one of `CANNOT_BUILD`, its other requirements."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "-q", "--ignore-installed"]
    done = subprocess.run(
        [*command, "--no-deps", "--report", "-", peer], capture_output=True, text=True
    )
    if done.returncode != 0:
        return [peer]  # `resolve` says why
    lines = json.loads(done.stdout)["install"][0]["metadata"].get("requires_dist", [])
    needed = [line for line in lines if "extra ==" not in line]
    others = [line for line in needed if re.split(r"[^\w.-]", line)[0] not in CANNOT_BUILD]
    return [peer] if others == needed else others


def judge(peer: str) -> tuple[str, str]:
    """What became of a peer, and the reason."""
    requirements = requirements_of(peer)
    try:
        if (reason := resolve(str(ROOT), *requirements)) is None:
            return "resolved", ""
        if (alone := resolve(*requirements)) is not None:
            return "not checked", f"it does not resolve here alone: {alone}"
    except subprocess.TimeoutExpired:
        return "not checked", f"not resolved within {LIMIT_SECONDS} s"
    return "CONFLICT", reason


def main() -> None:
    outcomes = []
    end = time.monotonic() + ALL_SECONDS
    for peer in sys.argv[1:] or PEERS:
        in_time = time.monotonic() < end
        outcome, reason = judge(peer) if in_time else ("not checked", "no time was left")
        print(f"{peer}: {outcome} {reason}".rstrip(), flush=True)
        outcomes.append(outcome)
    if "CONFLICT" in outcomes or "resolved" not in outcomes:
        sys.exit(f"{outcomes.count('CONFLICT')} conflicts, {outcomes.count('resolved')} resolved")


main()
