"""Seconds from the command to the first training step of `train tiny`.

    python benchmarks/start_up.py                          # this checkout
    python benchmarks/start_up.py --checkouts . ../other   # in turn with another one

The first step is done when metrics.jsonl has a line; the base model is not evaluated before it. CPU
seconds are those of the main process. The first round reads files from a cold disk, perhaps.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SETTINGS = ("eval.at_start=false", "run.steps=1", "replay.warmup_steps=0")


def first_step(checkout: Path, folder: Path) -> tuple[float, float]:
    """(wall seconds, CPU seconds)"""
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "grpo_replay", "train", "tiny", *words, "--output-dir", folder]
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=folder.parent, env=environment, **quiet) as process:
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(map(str, command))} ended without a step")
            time.sleep(0.02)
        wall = time.perf_counter() - started
        times = psutil.Process(process.pid).cpu_times()
    return wall, times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkouts", type=Path, nargs="+", default=[Path()])
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    found: dict[Path, list[tuple[float, float]]] = {each: [] for each in options.checkouts}
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for index, checkout in enumerate(options.checkouts):
                found[checkout].append(first_step(checkout, Path(name) / f"{number}-{index}"))
                wall, cpu = found[checkout][-1]
                print(f"{checkout}: {wall:.2f} s, {cpu:.2f} s of CPU", flush=True)
    for checkout, times in found.items():
        wall, cpu = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"{checkout}: median {wall:.2f} s, {cpu:.2f} s of CPU")


if __name__ == "__main__":
    main()
