"""Train many small steps in one process, and look whether its memory rises.

    python benchmarks/soak.py --steps 10000 [--output FILE] [--folder DIR]

The recipe `tiny` with 16 completions of at most 14 tokens a step, one update, replay, and a
checkpoint every 500 steps. Resident memory and open files of the trainer and of its verifiers are
noted every 100 steps. A straight line is fitted by least squares to what comes after the first
1,000 steps (a run that is cut short: after its first tenth): its slope in MiB per 1,000 steps, with
the standard error. A slope above LIMIT by more than twice its error fails. FILE (JSON) is written
anew with every sample.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from async_parts.forks import Forked
from async_parts.run_process import RunProcess, family, living
from async_soak import MIB, rise_of_line

EVERY_STEPS = 100
SETTLING_STEPS = 1000
LIMIT = 1.0
"""MiB per 1,000 steps."""
OVERRIDES = (
    "sampling.prompts_per_step=4", "sampling.group_size=4", "replay.warmup_steps=3",
    "optimizer.learning_rate=1e-6", "checkpoint.every_steps=500", "eval.benchmarks=[]",
    "sampling.max_completion_length=14", "batch.updates_per_step=1",
)  # fmt: skip
"""A small learning rate: a pupil that answers everything would leave no group to train on."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=Path("soak.json"))
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    overrides = [*OVERRIDES, f"run.steps={options.steps}", *options.set]
    run = RunProcess("tiny", folder / "run", overrides)
    process = run.start()
    samples: list[dict[str, float]] = []
    try:
        while process.poll() is None:
            step = run.steps()
            if step >= EVERY_STEPS * (1 + len(samples)):
                samples.append({"step": step, **sample(process)})
                options.output.write_text(json.dumps(result(samples), indent=1))
            time.sleep(0.1)
    finally:
        process.kill()
    if not samples:
        raise SystemExit(f"the run ended before step {EVERY_STEPS}: see {run.log}")
    found = result(samples)
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}))
    return int(process.returncode != 0 or not flat(found))


def sample(process: Forked) -> dict[str, float]:
    """MiB and open files of the trainer and of what it has started."""
    trainer, others = psutil.Process(process.pid), living(family(process))
    return {
        "trainer, MiB": trainer.memory_info().rss / MIB,
        "verifiers, MiB": sum(each.memory_info().rss for each in others) / MIB,
        "files": trainer.num_fds(),
        "seconds": time.time() - trainer.create_time(),
    }


def result(samples: list[dict[str, float]]) -> dict[str, Any]:
    """The fits in MiB per 1,000 steps and the samples."""
    last = samples[-1]["step"]
    settled = SETTLING_STEPS if last > 2 * SETTLING_STEPS else last / 10
    later = [each for each in samples if each["step"] > settled]
    steps = np.array([each["step"] for each in later], dtype=float)
    found: dict[str, Any] = {"steps": last, "fitted_from_step": settled, "fitted": len(later)}
    for name in ("trainer, MiB", "verifiers, MiB"):
        if len(later) > 2:
            rise, error = rise_of_line(steps, np.array([each[name] for each in later]))
            per = 1000 / float(np.ptp(steps))
            found[f"{name} per 1,000 steps"] = {"slope": rise * per, "error": error * per}
    return {**found, "samples": samples}


def flat(found: dict[str, Any]) -> bool:
    """Whether no fitted line rises faster than LIMIT, by more than twice its error."""
    fits = [value for name, value in found.items() if name.endswith("per 1,000 steps")]
    return bool(fits) and all(fit["slope"] - 2 * fit["error"] <= LIMIT for fit in fits)


if __name__ == "__main__":
    sys.exit(main())
