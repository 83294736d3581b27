"""Seconds to a held-out accuracy on two cores: synchronous, asynchronous use-once, and FIFO replay.

    python benchmarks/async_wall_clock.py --output DIR [--seeds 1003 1004 1005 1006 1007]

Paper B's comparison on recipe `tiny-long`. One core has a vLLM server, which decodes 32 rollouts at
once in all arms; the other has the trainer, the collector and the verifiers. Every run has the same
seconds of training. First each arm runs with every one of `--rates` on `--tune-seed`: its rate is
the one with the highest accuracy at the end. Then the arms run with the other seeds, in alternating
order. Checkpoints are evaluated after the run, all with the same code and seeds (300 held-out
problems, `--samples` completions each at T = 1). The time of a checkpoint is the sum of `step_time`
up to it: start-up, checkpoints and evaluation are not in it. Interpolated linearly between
evaluations. What DIR holds is not made again.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from async_parts.run_process import RunProcess, balances
from async_parts.servers import Server, servers

from grpo_replay import api
from grpo_replay.errors import INTERRUPTED
from grpo_replay.evaluation.evaluation_report import read_report

RECIPE = "tiny-long"
TRAINER_CORE, SERVER_CORE = 0, 1
COMMON = [
    "sampling.backend=vllm_server", "sampling.servers.launch=0",
    "sampling.servers.max_in_flight=32", "loss.behavior_logprobs=sampler",
    "engine.zero_stage=0", "eval.benchmarks=[]", "checkpoint.keep=1000", "run.steps=1000000",
]  # fmt: skip
ARMS = {
    "sync": ["replay.preset=grpo", "checkpoint.every_steps=8"],
    "use once": [
        "replay.preset=grpo", "run.mode=async", "sampling.collection.order=newest_first",
        "checkpoint.every_steps=8",
    ],
    "fifo": [
        "replay.preset=fifo", "run.mode=async", "replay.ratio=1", "replay.capacity_rollouts=128",
        "replay.drop_zero_variance=true", "run.sync_every_steps=4", "checkpoint.every_steps=40",
    ],
}  # fmt: skip
"""What differs. All take batches of 32 rollouts and make one update with each."""

MEANS = ("step_time", "cost/mu", "async/trainer_idle", "async/sampler_idle", "async/age_mean")
"""Metrics of which the means over the steps are shown."""

Run = dict[str, Any]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--level", type=float, default=0.70, help="held-out accuracy")
    parser.add_argument("--seconds", type=float, default=150.0, help="of training, in every run")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 2e-4])
    parser.add_argument("--tune-seed", type=int, default=1001)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1003, 1004, 1005, 1006, 1007])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


def main() -> int:
    campaign = Campaign(parse_options())
    options, arms = campaign.options, campaign.options.arms
    os.sched_setaffinity(0, {SERVER_CORE})
    with servers(RECIPE, options.output, 1) as (server,):
        os.sched_setaffinity(0, {TRAINER_CORE})  # and the runs that this process starts
        campaign.train(server, "use once", 0, options.rates[0], limit=1)  # warms the server up
        rates = {arm: campaign.tune(server, arm) for arm in arms}
        for number, seed in enumerate(options.seeds):
            for arm in arms if number % 2 == 0 else arms[::-1]:
                campaign.train(server, arm, seed, rates[arm])
    found = {arm: [campaign.evaluated(arm, s, rates[arm]) for s in options.seeds] for arm in arms}
    (options.output / "runs.json").write_text(json.dumps(found))
    for level in (options.level - 0.05, options.level, options.level + 0.05):
        report(level, found)
    return int(any(run["unbalanced"] for runs in found.values() for run in runs))


class Campaign:
    """The runs of one folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        options.output.mkdir(parents=True, exist_ok=True)

    def run(self, arm: str, seed: int, rate: float, *more: str) -> RunProcess:
        folder = self.options.output / f"{arm.replace(' ', '-')}-{seed}-{rate:g}"
        settings = [*COMMON, *ARMS[arm], f"run.seed={seed}", f"optimizer.learning_rate={rate}"]
        return RunProcess(RECIPE, folder, [*settings, *self.options.set, *more])

    def tune(self, server: Server, arm: str) -> float:
        """The arm's best rate on the tuning seed, by the last accuracy."""
        last = {}
        for rate in self.options.rates:
            self.train(server, arm, self.options.tune_seed, rate)
            run = self.run(arm, self.options.tune_seed, rate)
            last[rate] = self.accuracy(run, run.checkpoints()[-1])
            print(f"{arm}, rate {rate:g}: {100 * last[rate]:.1f} % at the end", flush=True)
        return max(last, key=last.__getitem__)

    def train(
        self, server: Server, arm: str, seed: int, rate: float, limit: float | None = None
    ) -> None:
        """Train for the seconds, or `limit`, and end the run as SIGTERM does."""
        run = self.run(arm, seed, rate, f"sampling.servers.urls=[{server.url}]")
        done = run.folder / "trained"
        if done.exists():
            return
        process, enough = run.start(), limit or self.options.seconds
        while not seconds(run) or seconds(run)[-1] < enough:
            if process.poll() is not None:
                raise SystemExit(f"the run ended by itself: see {run.log}")
            time.sleep(1)
        process.terminate()
        if process.wait(120) != INTERRUPTED:
            raise SystemExit(f"the run did not end as SIGTERM ends it: see {run.log}")
        done.touch()

    def evaluated(self, arm: str, seed: int, rate: float) -> Run:
        run = self.run(arm, seed, rate)
        lines, clock = run.metrics(), [0.0, *seconds(run)]
        curve = [(clock[step], self.accuracy(run, step)) for step in (0, *run.checkpoints())]
        found = {
            "arm": arm, "seed": seed, "rate": rate, "steps": len(lines), "curve": curve,
            **{f"{name}_tokens": sum(line[f"cost/{name}_tokens"] for line in lines)
               for name in ("generated", "trained")},
            **{key: mean_of(lines, key) for key in MEANS},
            "unbalanced": [x["step"] for x in lines if arm != "sync" and not balances(x)],
        }  # fmt: skip
        show(found)
        return found

    def accuracy(self, run: RunProcess, step: int) -> float:
        """On the held-out problems; with the sampler in this process, on this thread alone."""
        model, output = f"builtin:{RECIPE}", self.options.output / "base.json"
        if step:
            model = str(run.folder / f"checkpoints/step_{step:06d}")
            output = run.folder / f"accuracy_{step:06d}.json"
        if not output.exists():
            sampler = ["sampling.backend=hf", "sampling.max_batch_rollouts=300"]
            api.evaluate(model, output, RECIPE, samples=self.options.samples, overrides=sampler)
        return float(read_report(output).sampled.mean.avg_at_k)


def seconds(run: RunProcess) -> list[float]:
    """Seconds of training up to the end of each step."""
    return np.cumsum([line["step_time"] for line in run.metrics()]).tolist()


def mean_of(lines: list[dict[str, Any]], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return float(np.mean(values)) if values else None


def show(run: Run) -> None:
    curve = " ".join(f"{100 * value:.1f}" for _, value in run["curve"])
    means = ", ".join(f"{key} {run[key]:.3g}" for key in MEANS if run[key] is not None)
    print(f"{run['arm']} seed {run['seed']} rate {run['rate']:g}: {run['steps']} steps in "
          f"{run['curve'][-1][0]:.0f} s, {run['generated_tokens']:,} tokens generated, "
          f"{run['trained_tokens']:,} trained on; {means}. Held-out %: {curve}",
          flush=True)  # fmt: skip


def seconds_to(level: float, run: Run) -> float:
    """Seconds to the level; infinite if it is never reached."""
    before: tuple[float, float] | None = None
    for clock, value in run["curve"]:
        if value >= level:
            if before is None:
                return clock
            share = (level - before[1]) / (value - before[1])
            return before[0] + share * (clock - before[0])
        before = clock, value
    return float("inf")


def report(level: float, found: dict[str, list[Run]]) -> None:
    print(f"\nseconds of training to {100 * level:.0f} % held-out")
    needed = {arm: [seconds_to(level, run) for run in runs] for arm, runs in found.items()}
    for arm, each in needed.items():
        print(f"  {arm:<9} {', '.join(f'{one:.1f}' for one in each)}; "
              f"median {statistics.median(each):.1f}")  # fmt: skip
    for one, other in (("use once", "sync"), ("fifo", "use once"), ("fifo", "sync")):
        if one in needed and other in needed:
            ratios = [a / b for a, b in zip(needed[one], needed[other], strict=True)]
            print(f"  {one} / {other}, by seed: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; "
                  f"median {statistics.median(ratios):.2f}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
