"""Seconds from the command to a held-out accuracy of the tiny task or SmolLM2's, beside TRL's.

    pip install trl==1.16.0                            # in an environment of its own
    python benchmarks/tiny_to_accuracy.py --json runs.json
    python benchmarks/tiny_to_accuracy.py --smollm2 FOLDER --rates 1e-5 --steps 8 --save-every 2

The runs are those of `tiny_against_trl.py`. First every contender runs with each of `--rates` on
`--tune-seed`; the rate that needs the fewest CPU seconds to the level is its own. Then the
contenders run with other seeds, in alternating order. The weights are kept every few steps and
evaluated after the run (1,000 held-out problems, two completions each at T = 1), all by the same
code. The time to a level is that of the first evaluation at or above it, interpolated linearly from
the one before. Saving the weights is not counted. Runs that `--json` holds are not made again.
"""

import argparse
import json
import statistics
import tempfile
from math import inf
from pathlib import Path
from typing import Any

from tiny_against_trl import CONTENDERS, run_apart, task_of

Run = dict[str, Any]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", type=float, default=0.5, help="held-out accuracy")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 4e-4])
    parser.add_argument("--smollm2", type=Path, help="folder of the model")
    parser.add_argument("--tune-seed", type=int, default=1001)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1003, 1004, 1005])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=["ours", "trl"])
    parser.add_argument("--json", type=Path, default=Path("tiny_to_accuracy.json"))
    return parser.parse_args()


class Runs:
    """Makes runs and keeps their results in a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._task = task_of(options.smollm2)
        file = options.json
        self._known: list[Run] = json.loads(file.read_text()) if file.exists() else []

    def get(self, name: str, seed: int, rate: float) -> Run:
        steps, save_every = self._options.steps, self._options.save_every
        for run in self._known:
            if (run["name"], run["seed"], run["rate"], len(run["wall"])) == (
                name, seed, rate, steps
            ):  # fmt: skip
                return run
        with tempfile.TemporaryDirectory() as folder:
            parts = (self._task, name, seed, rate, steps, save_every)
            run = run_apart(*parts, Path(folder) / "run")
        show(run)
        self._known.append(run)
        self._options.json.write_text(json.dumps(self._known))
        return run


def show(run: Run) -> None:
    curve = " ".join(f"{100 * value:.1f}" for value in run["accuracy"].values())
    print(f"{run['name']} seed {run['seed']} rate {run['rate']:g}: first step after "
          f"{run['wall'][0]:.1f} s, last after {run['wall'][-1]:.1f} s, {run['cpu'][-1]:.1f} s of "
          f"CPU; saving {run['saving'][0]:.1f} s not counted. Held-out %: {curve}",
          flush=True)  # fmt: skip


def seconds_to(level: float, run: Run, quantity: str) -> float:
    """Seconds to the level; infinite if it is never reached."""
    before: tuple[float, float] | None = None
    for step, value in run["accuracy"].items():
        seconds = run[quantity][int(step) - 1]
        if value >= level:
            if before is None:
                return seconds
            share = (level - before[1]) / (value - before[1])
            return before[0] + share * (seconds - before[0])
        before = seconds, value
    return inf


def report(level: float, found: dict[str, list[Run]]) -> None:
    print(f"\nto {100 * level:.0f} % held-out")
    for quantity in ("wall", "cpu"):
        needed = {name: [seconds_to(level, run, quantity) for run in found[name]] for name in found}
        for name, seconds in needed.items():
            middle, peers = statistics.median(seconds), statistics.median(needed.get("trl", [inf]))
            each = ", ".join("not reached" if one == inf else f"{one:.1f}" for one in seconds)
            line = f"  {name:<10} {quantity:>4} s: {each}; median {middle:.1f}"
            if name != "trl" and middle < inf and peers < inf:
                line += f", {middle / peers:.2f} of TRL's"
            print(line)


def main() -> None:
    options = parse_options()
    runs = Runs(options)
    rate_of = dict.fromkeys(options.only, options.rates[0])
    for name in options.only if len(options.rates) > 1 else ():
        tried = {rate: runs.get(name, options.tune_seed, rate) for rate in options.rates}
        needed = {rate: seconds_to(options.level, run, "cpu") for rate, run in tried.items()}
        rate_of[name] = min(needed, key=needed.__getitem__)
        print(f"{name}: CPU s to {options.level} by rate on seed {options.tune_seed}: {needed}")
    found: dict[str, list[Run]] = {name: [] for name in options.only}
    for number, seed in enumerate(options.seeds):
        for name in options.only if number % 2 == 0 else options.only[::-1]:
            found[name].append(runs.get(name, seed, rate_of[name]))
    for level in (options.level - 0.05, options.level, options.level + 0.05):
        report(level, found)


if __name__ == "__main__":
    main()
