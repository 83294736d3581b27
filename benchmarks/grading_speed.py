"""Grading throughput: the verifier pool against math-verify called in a loop, same verdicts.

    python benchmarks/grading_speed.py PROBLEMS.jsonl        # fields: solution, answer

Builds 2,000 completions as a model under training writes them: 8 samples for each of 250 problems;
reasoning of 0 to 3 solution texts, then a final answer: 50 % of them right, 40 % wrong (the samples
of a problem share a few wrong answers), 10 % cut off before an answer. The problems of
all batches are the same, the reasoning and the wrong answers are not; both sides keep what they
remember from batch to batch, as they do over an evaluation.
"""

import argparse
import json
import random
import re
import time
from pathlib import Path

import math_verify

from grpo_replay.grading.symbolic import in_environment
from grpo_replay.recipe import RewardSection
from grpo_replay.rewards import RewardScorer

SAMPLES = 8


def completions(rows: list[dict[str, str]], seed: int = 0) -> list[tuple[str, str]]:
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
            elif luck < 0.9:
                text = f"{reasoning}\n\nTherefore \\boxed{{{rng.choice(wrong)}}}"
            else:
                text = reasoning[: rng.randrange(len(reasoning) + 1)]
            items.append((text, row["answer"]))
    rng.shuffle(items)
    return items


def in_a_loop(items: list[tuple[str, str]]) -> tuple[list[bool], float]:
    """Verdicts of math-verify called for one completion after the other, and seconds."""
    started = time.perf_counter()
    verdicts = []
    for text, answer in items:
        gold = math_verify.parse(in_environment(answer))
        prediction = math_verify.parse(in_environment(text))
        if gold and prediction:
            verdicts.append(math_verify.verify(gold, prediction))
        else:
            verdicts.append(text == answer)
    return verdicts, time.perf_counter() - started


def in_the_pool(scorer: RewardScorer, items: list[tuple[str, str]]) -> tuple[list[bool], float]:
    """Verdicts of our pool, and seconds."""
    started = time.perf_counter()
    verdicts = scorer.score([(text, answer, None) for text, answer in items])
    return [v.status == "correct" for v in verdicts], time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.problems.read_text("utf-8").splitlines()]
    with RewardScorer.open(
        RewardSection(function="math_verify", workers=options.workers)
    ) as scorer:
        scorer.score([(f"\\boxed{{{i}}}", "1", None) for i in range(10 * options.workers)])
        for seed in range(options.seeds):
            items = completions(rows, seed)
            expected, loop_seconds = in_a_loop(items)
            verdicts, seconds = in_the_pool(scorer, items)
            different = sum(a != b for a, b in zip(expected, verdicts, strict=True))
            print(
                f"batch {seed + 1}: {len(items)} completions, {sum(expected)} correct; loop "
                f"{loop_seconds:.2f} s; pool of {options.workers} {seconds:.2f} s; "
                f"{loop_seconds / seconds:.1f}x; {different} verdicts differ"
            )


if __name__ == "__main__":
    main()
