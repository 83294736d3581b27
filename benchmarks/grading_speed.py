"""Grading throughput of the verifier pool, compared with math-verify called in a loop.

    python benchmarks/grading_speed.py PROBLEMS.jsonl        # fields: solution, answer
    python benchmarks/grading_speed.py PROBLEMS.jsonl --verifier boxed --problems 512

Builds completions that resemble those of a model in training: 8 samples for each problem, 2,000 of
250; reasoning of 0 to 3 solution texts, then a final answer. 50 % are right, 40 % wrong (the
samples of a problem share a few wrong answers), 10 % (--cut-off) cut off before an answer. All
batches have the same problems with other reasoning and other wrong answers; both sides keep their
caches between batches, as in an evaluation. Verdicts are compared. On idle cores the wall time of
the pool would be the CPU time of its busiest worker. Other verifiers than `math_verify` are timed
without the loop.
"""

import argparse
import json
import os
import random
import re
import time
from pathlib import Path

import math_verify

from grpo_replay.recipe import BUILTIN_VERIFIERS, RewardSection
from grpo_replay.rewards.math_verify import in_environment
from grpo_replay.rewards.scorer import RewardScorer

SAMPLES = 8


def completions(rows: list[dict[str, str]], seed: int, cut_off: float) -> list[tuple[str, str]]:
    """(completion, reference answer) pairs."""
    rng = random.Random(seed)
    unboxed = [re.sub(r"\\boxed", "", row["solution"]) for row in rows]
    items = []
    for row in rows:
        wrong = [rng.choice(rows)["answer"] for _ in range(2)]
        for _ in range(SAMPLES):
            reasoning = "\n\n".join(rng.sample(unboxed, rng.randrange(4)))
            luck = rng.random()
            if luck < 0.5:
                text = f"{reasoning}\n\nSo the answer is $\\boxed{{{row['answer']}}}$."
            elif luck < 1 - cut_off:
                text = f"{reasoning}\n\nTherefore \\boxed{{{rng.choice(wrong)}}}"
            else:
                text = reasoning[: rng.randrange(len(reasoning) + 1)]
            items.append((text, row["answer"]))
    rng.shuffle(items)
    return items


def in_a_loop(items: list[tuple[str, str]]) -> list[bool]:
    """Verdicts of math-verify, called for one completion after another."""
    verdicts = []
    for text, answer in items:
        gold = math_verify.parse(in_environment(answer))
        prediction = math_verify.parse(in_environment(text))
        if gold and prediction:
            verdicts.append(math_verify.verify(gold, prediction))
        else:
            verdicts.append(text == answer)
    return verdicts


def workers_cpu_seconds() -> dict[str, float]:
    """CPU seconds so far of each child process (Linux)."""
    pids = [
        pid
        for file in Path("/proc/self/task").glob("*/children")
        for pid in file.read_text().split()
    ]
    fields = {pid: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids}
    ticks = os.sysconf("SC_CLK_TCK")
    return {pid: (int(each[11]) + int(each[12])) / ticks for pid, each in fields.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", type=Path)
    parser.add_argument("--verifier", default="math_verify", choices=BUILTIN_VERIFIERS)
    parser.add_argument("--problems", type=int, dest="count", help="only so many")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--cut-off", type=float, default=0.1, help="share cut off, up to 0.5")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.problems.read_text("utf-8").splitlines()]
    rows = random.Random(0).sample(rows, options.count) if options.count else rows
    section = RewardSection(function=options.verifier, workers=options.workers)
    with RewardScorer.open(section) as scorer:
        scorer.score([(f"\\boxed{{{i}}}", "1", None) for i in range(10 * options.workers)])
        for batch in range(options.batches):
            items = completions(rows, batch, options.cut_off)
            compare(scorer, items, batch + 1, with_loop=options.verifier == "math_verify")


def compare(
    scorer: RewardScorer, items: list[tuple[str, str]], batch: int, with_loop: bool
) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    expected = in_a_loop(items) if with_loop else []
    loop_wall, loop_cpu = time.perf_counter() - wall, time.process_time() - cpu
    before, wall, cpu = workers_cpu_seconds(), time.perf_counter(), time.process_time()
    verdicts = scorer.score([(text, answer, None) for text, answer in items])
    pool_wall, own_cpu = time.perf_counter() - wall, time.process_time() - cpu
    used = [seconds - before[pid] for pid, seconds in workers_cpu_seconds().items()]
    if not with_loop:
        correct = sum(each.status == "correct" for each in verdicts)
        print(
            f"batch {batch}: {len(items)} completions, {correct} correct; wall {pool_wall:.2f} s; "
            f"CPU: workers {' + '.join(f'{each:.2f}' for each in used)} s, caller {own_cpu:.2f} s"
        )
        return
    different = sum((v.status == "correct") != e for v, e in zip(verdicts, expected, strict=True))
    print(
        f"batch {batch}: {len(items)} completions, {sum(expected)} correct, {different} verdicts "
        f"differ; wall: loop {loop_wall:.2f} s, pool {pool_wall:.2f} s, "
        f"{loop_wall / pool_wall:.1f}x; CPU: loop {loop_cpu:.2f} s, workers "
        f"{' + '.join(f'{each:.2f}' for each in used)} s, caller {own_cpu:.2f} s, "
        f"{loop_cpu / max(used):.1f}x the busiest worker"
    )


if __name__ == "__main__":
    main()
