"""Verdicts on real problems: reference solutions against their own and other answers.

    python benchmarks/grading_check.py PROBLEMS.jsonl        # fields: solution, answer

Every solution should be correct for its own answer and wrong for the next problem's; exceptions are
printed. Every verdict of `math_verify_boxed` and `math_verify` is compared with a direct call of
math-verify, on the last box of the last 500 characters or on the whole solution. Exits with 1 if
any differs.
"""

import argparse
import json
import sys
from pathlib import Path

import math_verify

from grpo_replay.recipe import BUILTIN_VERIFIERS, RewardSection
from grpo_replay.rewards.math_verify import in_environment
from grpo_replay.rewards.minerva import boxed_answer
from grpo_replay.rewards.scorer import RewardScorer


def direct(verifier: str, text: str, answer: str) -> bool:
    operand = boxed_answer(text) if verifier == "math_verify_boxed" else text
    if operand is None:
        return False
    gold = math_verify.parse(in_environment(answer))
    prediction = math_verify.parse(in_environment(operand))
    return math_verify.verify(gold, prediction) if gold and prediction else operand == answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", type=Path)
    rows = [json.loads(x) for x in parser.parse_args().problems.read_text("utf-8").splitlines()]
    own = [(row["solution"], row["answer"]) for row in rows]
    shifted = [
        (row["solution"], other["answer"])
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
    ]
    different = 0
    for name in BUILTIN_VERIFIERS:
        with RewardScorer.open(RewardSection(function=name)) as scorer:
            verdicts = scorer.score([(text, answer, None) for text, answer in own + shifted])
        correct = [verdict.status == "correct" for verdict in verdicts]
        ours, others = correct[: len(rows)], correct[len(rows) :]
        print(f"{name}: own answers {sum(ours)}/{len(rows)}, shifted {sum(others)}/{len(rows)}")
        for index, row in enumerate(rows):
            if not ours[index]:
                print(f"  not accepted: {row['solution'][-80:]!r} for {row['answer']!r}")
            if others[index]:
                print(f"  accepted: answer {row['answer']!r} for {shifted[index][1]!r}")
        if name.startswith("math_verify"):
            expected = [direct(name, text, answer) for text, answer in own + shifted]
            found = sum(a != b for a, b in zip(correct, expected, strict=True))
            print(f"  {found} of {len(expected)} verdicts differ from the direct call")
            different += found
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
