"""Compare `math_verify_boxed` with `math_verify` on 200 completions of mixed quality.

    python benchmarks/grading_forms.py PROBLEMS.jsonl        # fields: solution, answer

Makes one completion per problem, of eleven kinds in rotation, from the solutions of 200 problems.
Grades them with `math_verify_boxed` (paper A's rule: the last box of the trailing 500 characters)
and with `math_verify` (the whole completion). Prints the number of accepted completions by kind,
then every difference: the content of the box, the expressions parsed from the whole completion, and
its end. docs/evaluation.md classifies the differences by hand.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import math_verify

from grpo_replay.recipe import RewardSection
from grpo_replay.rewards.math_verify import in_environment
from grpo_replay.rewards.minerva import TAIL_CHARACTERS, boxed_answer, last_box
from grpo_replay.rewards.scorer import RewardScorer

VERIFIERS = ("math_verify_boxed", "math_verify")
COMPLETIONS = 200


@dataclass(frozen=True, slots=True)
class Source:
    """A problem's solution and answer, and those of another problem."""

    solution: str
    answer: str
    other_solution: str
    other_answer: str

    @property
    def unboxed(self) -> str:
        """The solution with its box replaced by the content of the box."""
        return _without_boxes(self.solution)

    @property
    def padding(self) -> str:
        """More than `TAIL_CHARACTERS` of another problem's reasoning, without a box."""
        text = _without_boxes(self.other_solution) + " "
        return text * (TAIL_CHARACTERS // len(text) + 1)


def _without_boxes(text: str) -> str:
    while (content := last_box(text)) is not None:
        text = text.replace(f"\\boxed{{{content}}}", content)
    return re.sub(r"\\boxed\b", "", text)


def _halfway(source: Source) -> str:
    return source.solution[: len(source.solution) // 2]


def _inside_the_box(source: Source) -> str:
    start = source.solution.rfind("\\boxed{") + len("\\boxed{")
    return source.solution[: start + max(1, len(source.answer) // 2)]


def _prose(source: Source) -> str:
    sentences = re.split(r"(?<=[.!?])\s+", source.unboxed.strip())
    return " ".join([*sentences[:-1], f"The answer is {source.answer}."])


KINDS: dict[str, Callable[[Source], str]] = {
    "the solution as it is": lambda s: s.solution,
    "another problem's answer": lambda s: f"{s.unboxed}\n\nSo it is $\\boxed{{{s.other_answer}}}$.",
    "cut off halfway": _halfway,
    "cut off inside the box": _inside_the_box,
    "boxed first, then reasoning": lambda s: (
        f"The answer is $\\boxed{{{s.answer}}}$, because:\n\n{s.unboxed} {s.padding}"
    ),
    "a box, then a check": lambda s: f"{s.solution}\n\nWe check it once more. {s.padding}",
    "answer in prose": _prose,
    "answer in a formula": lambda s: s.unboxed,
    "wrong box, then the right one": lambda s: (
        f"A guess: $\\boxed{{{s.other_answer}}}$.\n\n{s.solution}"
    ),
    "two boxes side by side": lambda s: (
        f"{s.unboxed}\n\nSo $\\boxed{{{s.other_answer}}}$, or rather $\\boxed{{{s.answer}}}$."
    ),
    "right box, then a wrong one": lambda s: (
        f"{s.solution}\n\nOr rather $\\boxed{{{s.other_answer}}}$."
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", type=Path)
    parser.add_argument("--full", action="store_true", help="print the differing ones in full")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.problems.read_text("utf-8").splitlines()]
    items = make_completions(rows[:COMPLETIONS])
    verdicts = {name: grade(name, items) for name in VERIFIERS}
    print_counts(items, verdicts)
    boxed, whole = (verdicts[name] for name in VERIFIERS)
    for number, (item, one, other) in enumerate(zip(items, boxed, whole, strict=True)):
        if (one == "correct") != (other == "correct"):
            print_difference(number, item, one, other, options.full)


Item = tuple[str, str, str]  # kind, completion, reference answer


def make_completions(rows: list[dict[str, str]]) -> list[Item]:
    """One completion per problem, kinds in rotation."""
    items = []
    for index, row in enumerate(rows):
        other = rows[(index + 1) % len(rows)]
        kind = list(KINDS)[index % len(KINDS)]
        source = Source(row["solution"], row["answer"], other["solution"], other["answer"])
        items.append((kind, KINDS[kind](source), row["answer"]))
    return items


def grade(verifier: str, items: list[Item]) -> list[str]:
    """The status of every verdict."""
    with RewardScorer.open(RewardSection(function=verifier)) as scorer:
        verdicts = scorer.score([(text, answer, None) for _, text, answer in items])
    return [verdict.status for verdict in verdicts]


def print_counts(items: list[Item], verdicts: dict[str, list[str]]) -> None:
    print(f"{'kind':32}{'n':>4}{'boxed':>7}{'whole':>7}{'only whole':>12}{'only boxed':>12}")
    accepted = list(zip(*([v == "correct" for v in verdicts[n]] for n in VERIFIERS), strict=True))
    for kind in (*KINDS, "all"):
        mine = [
            found for item, found in zip(items, accepted, strict=True) if kind in (item[0], "all")
        ]
        counts = (sum(boxed for boxed, _ in mine), sum(whole for _, whole in mine))
        only = (mine.count((False, True)), mine.count((True, False)))
        print(f"{kind:32}{len(mine):4}{counts[0]:7}{counts[1]:7}{only[0]:12}{only[1]:12}")


def print_difference(number: int, item: Item, boxed: str, whole: str, full: bool) -> None:
    kind, text, answer = item
    read = [str(part) for part in math_verify.parse(in_environment(text))]
    print(f"\n#{number} {kind}: boxed {boxed}, whole {whole}, {len(text)} characters")
    print(f"  answer {answer!r}, box {boxed_answer(text)!r}, read in the whole {read}")
    print(f"  {text if full else '…' + text[-160:]!r}")


if __name__ == "__main__":
    main()
