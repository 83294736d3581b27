"""Run asynchronously for long, and look whether memory, open files and queues stay flat.

    python benchmarks/async_soak.py --minutes 30 [--recipe tiny-async] [--output DIR]

Samples every ten seconds: resident memory, open files and threads of the trainer, the collector
with its verifiers, and the vLLM server; the queues from metrics.jsonl. After the first third of the
time, a straight line is fitted to each. Over the rest it may rise by at most TOLERANCES, beyond
twice the standard error of that rise: connections come and go. Ends the run with SIGTERM and checks
that the ledger balances at every step. --report FILE prints the table of an earlier samples.jsonl.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from async_parts.forks import Forked
from async_parts.run_process import RunProcess, balances, family, living
from async_parts.servers import free_port, wait_for

from grpo_replay.errors import INTERRUPTED

SAMPLE_SECONDS = 10.0
SETTLING_SHARE = 1 / 3
MIB = 2**20
QUEUES = {
    "outstanding groups": "async/outstanding_groups",
    "rollouts in flight": "ledger/in_flight_rollouts",
    "stored rollouts": "buffer/rollouts",
}
TOLERANCES = {"MiB": (0.03, 8.0), "files": (0.02, 2.0), "threads": (0.02, 2.0), "queue": (0.1, 4.0)}
"""Largest rise of the fitted line over the time that is fitted: a share of its mean, or so many,
whichever is larger."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--recipe", default="tiny-async")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--report", type=Path, default=None, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.report:
        lines = options.report.read_text().splitlines()
        return report([json.loads(line) for line in lines])
    folder = options.output or Path(tempfile.mkdtemp(prefix="async-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [
        "run.steps=1000000", "eval.benchmarks=[]", "checkpoint.every_steps=100",
        f"sampling.servers.address=127.0.0.1:{free_port()}", *options.set,
    ]  # fmt: skip
    run = RunProcess(options.recipe, folder / "run", overrides)
    process = run.start()
    try:
        samples = watch(run, process, options.minutes * 60, folder / "samples.jsonl")
        members = family(process)
        process.terminate()
        code = process.wait(300)
        wait_for(lambda: not living(members), 60)
    finally:
        process.kill()
    unbalanced = [line["step"] for line in run.metrics() if not balances(line)]
    print(f"exit code {code} (of an interrupted run: {INTERRUPTED})")
    print(f"processes left {len(living(members))}, steps {run.steps()}, unbalanced {unbalanced}")
    return report(samples) or code != INTERRUPTED or bool(unbalanced)


def watch(run: RunProcess, process: Forked, seconds: float, results: Path) -> list[dict[str, Any]]:
    """The samples from the first step on."""
    if wait_for(lambda: run.steps() > 0 or process.poll() is not None, 600) is None:
        raise SystemExit(f"no step in ten minutes: see {run.log}")
    samples, started = [], time.monotonic()
    while time.monotonic() - started < seconds:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with code {process.returncode}: see {run.log}")
        samples.append({"seconds": time.monotonic() - started, **sample(run, process)})
        with results.open("a") as file:
            file.write(json.dumps(samples[-1]) + "\n")
        time.sleep(SAMPLE_SECONDS)
    return samples


def sample(run: RunProcess, process: Forked) -> dict[str, float]:
    groups: dict[str, list[psutil.Process]] = {"trainer": [psutil.Process(process.pid)]}
    for member in living(family(process)):
        groups.setdefault(role_of(member), []).append(member)
    found: dict[str, float] = {}
    for name, members in groups.items():
        found[f"{name}, MiB"] = sum(each.memory_info().rss for each in members) / MIB
        found[f"{name}, files"] = sum(each.num_fds() for each in members)
        found[f"{name}, threads"] = sum(each.num_threads() for each in members)
    last = last_line(run)
    return found | {f"{name}, queue": last[key] for name, key in QUEUES.items()} | {
        "step": last["step"]
    }  # fmt: skip


def role_of(process: psutil.Process) -> str:
    """A process by what its parents are, too: vLLM's engine has no command line of its own."""
    lines = [" ".join(each.cmdline()) for each in (process, *process.parents()[:3])]
    if any("grpo_replay.collection.collector_process" in line for line in lines):
        return "collector"
    return "server" if any("api_server" in line for line in lines) else "other"


def last_line(run: RunProcess) -> dict[str, Any]:
    with (run.folder / "metrics.jsonl").open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 20_000))
        whole = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
    return json.loads(whole[-1])


def report(samples: Sequence[dict[str, Any]]) -> int:
    """Print the fits; 0 if all are flat."""
    later = samples[round(len(samples) * SETTLING_SHARE) :]
    seconds = np.array([each["seconds"] for each in later])
    rising = 0
    print(f"{len(samples)} samples, {len(later)} fitted over {np.ptp(seconds) / 60:.1f} minutes")
    print("| what | first | mean of the fitted | rise of the line | allowed | flat |")
    print("|---|---|---|---|---|---|")
    for name in later[0]:
        unit = name.rpartition(", ")[2]
        if unit not in TOLERANCES:
            continue
        values = np.array([each.get(name, np.nan) for each in later], dtype=float)
        rise, error = rise_of_line(seconds, values)
        mean = values.mean()
        allowed = max(TOLERANCES[unit][0] * mean, TOLERANCES[unit][1])
        flat = bool(rise - 2 * error <= allowed)
        rising += not flat
        first = samples[0].get(name, np.nan)
        line = f"{rise:+.2f} ± {error:.2f}"
        print(f"| {name} | {first:.1f} | {mean:.1f} | {line} | {allowed:.1f} | {flat} |")
    return int(rising > 0)


def rise_of_line(seconds: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """The rise of the fitted line over the whole time, and its standard error; NaN for samples that
    are missing."""
    if not np.isfinite(values).all():
        return np.nan, np.nan
    slope, start = np.polyfit(seconds, values, 1)
    residual = values - (start + slope * seconds)
    spread = np.sqrt(
        (residual**2).sum() / (len(values) - 2) / ((seconds - seconds.mean()) ** 2).sum()
    )
    return float(slope * np.ptp(seconds)), float(spread * np.ptp(seconds))


if __name__ == "__main__":
    sys.exit(main())
