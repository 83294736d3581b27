"""Part 12: one step beside TRL's, through benchmarks/against_trl.py."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from gpu_parts.environment import version_of
from gpu_parts.record import Context

SCRIPT = Path(__file__).resolve().parents[1] / "against_trl.py"


def compare_with_trl(context: Context) -> None:
    """Seconds and peak memory of a step, ours and TRL's, on the same rollouts."""
    record = context.record
    record.figure("TRL", version_of("trl"))
    file = context.work / "against_trl.json"
    command = [sys.executable, str(SCRIPT), *context.size.trl, "--json", str(file)]
    record.figure("options", " ".join(context.size.trl))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"against_trl.py ended with {done.returncode}: {done.stderr[-3000:]}")
    for line in done.stdout.splitlines():
        if "completion tokens in" in line:
            record.note(line)
    rounds = json.loads(file.read_text())["rounds"]
    for name in rounds[0]:
        record.row("a step", {
            "trainer": name,
            "seconds": statistics.median(s for each in rounds for s in each[name]["wall"]),
            "peak_gib": statistics.median(each[name]["peak_mib"] for each in rounds) / 1024,
        })  # fmt: skip
