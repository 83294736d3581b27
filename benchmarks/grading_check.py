"""Verdicts on real reference answers: rewritten in usual ways, and against each other.

    python benchmarks/grading_check.py PROBLEMS.jsonl [--verifier boxed] [--others 20] [--show 20]

Every answer of the file (fields: answer, or a solution that ends in a box) is written in each of
the ways of `REWRITES` that changes it and leaves its value, and is graded in a box: all should be
correct. Then it is graded against `--others` other answers of its form, drawn at random: none
should be, unless the two are equal. Prints the shares, and the first verdicts of each kind that are
not expected. The verdicts of math-verify's verifiers are also compared with direct calls: exit code
1 if one differs. docs/rewards.md has the results on MATH's 5,000 test problems.
"""

import argparse
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import math_verify

from grpo_replay.recipe import BUILTIN_VERIFIERS, RewardSection
from grpo_replay.rewards.math_verify import in_environment
from grpo_replay.rewards.minerva import boxed_answer, last_box
from grpo_replay.rewards.scorer import RewardScorer

FRACTION = r"\\[dt]?frac\{(\d+)\}\{(\d+)\}"
UNIT = r"(?:\\[,; ]|\s)*(?:\\(?:text|mbox) ?\{[^{}]*\}(?:\^\d)?|\^\{?\\circ\}?|\\%)$"
PLAIN = r"-?(\d+|\\frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\})"
BOXES = (r"\boxed{%s}", r"So it is $\boxed {%s}$.", r"\fbox{%s}")


def decimal(answer: str) -> str:
    """A fraction that ends, as a decimal."""
    found = re.fullmatch(rf"(-?){FRACTION}", answer)
    value = found and Fraction(int(found[2]), int(found[3]))
    if not value or 10**6 % value.denominator:
        return answer
    return f"{found[1]}{float(value):.6f}".rstrip("0").rstrip(".")


def reversed_list(answer: str) -> str:
    parts = re.split(r", ?", answer)
    other = re.search(r"[(\[]|\\\{|\{,|\\text|\\!", answer)
    is_list = len(parts) > 1 and not other and not re.fullmatch(r"\d{1,3}(,\d{3})+", answer)
    return ", ".join(parts[::-1]) if is_list else answer


def spaced(answer: str) -> str:
    other = re.search(r"text|mbox|,\\!", answer)
    return answer if other else re.sub(r" ?([-+=,]) ?(?=[^!])", r" \1 ", answer)


def brackets(answer: str) -> str:
    if not re.fullmatch(r"[(\[][^()\[\]]*[)\]]", answer):
        return answer
    return rf"\left{answer[:-1]}\right{answer[-1]}"


def without_unit(answer: str) -> str:
    return answer if r"\cos" in answer else re.sub(r"(?<=[\d}])" + UNIT, "", answer)


def thousands(answer: str) -> str:
    return f"{int(answer):,}".replace(",", r"\,") if re.fullmatch(r"\d{4,}", answer) else answer


REWRITES: dict[str, Callable[[str], str]] = {
    "in dollars": lambda answer: f"${answer}$",
    r"\dfrac": lambda answer: re.sub(r"\\[dt]?frac(?=[{\d ])", r"\\dfrac", answer),
    "a/b": lambda answer: re.sub(rf"^(-?){FRACTION}$", r"\1\2/\3", answer),
    "a fraction as a decimal": decimal,
    "3.0": lambda answer: re.sub(r"^-?\d+$", r"\g<0>.0", answer),
    r"\left( \right)": brackets,
    r"3\,125": thousands,
    "spaces": spaced,
    "x = 3": lambda answer: f"x = {answer}" if re.fullmatch(PLAIN, answer) else answer,
    "a list reversed": reversed_list,
    "no unit": without_unit,
    r"no \text": lambda answer: re.sub(r"^\\(?:text|mbox)\{([^{}]*)\}$", r"\1", answer),
    "2^{1/2}": lambda answer: re.sub(r"(?<!i)\\sqrt\{(\d+)\}", r"(\1)^{1/2}", answer),
}


def form(answer: str) -> str:
    """Numbers become 0 and words a quote: answers of one form look alike."""
    shape = re.sub(r"\d+(?:\\?,\\?!?\d{3})*", "0", re.sub(r"\\[dt]frac", r"\\frac", answer))
    shape = re.sub(r"\\(?:text|mbox)\s*\{[^{}]*\}", '"', shape.replace("{0}", "0"))
    return re.sub(r"[-+ {}]|\\left|\\right", "", shape)[:12]


def others(answers: list[str], count: int) -> list[tuple[str, str]]:
    """Each answer with `count` others of its form; of any form if there are not so many."""
    chance, by_form, every = random.Random(0), defaultdict(set), sorted(set(answers))
    for each in every:
        by_form[form(each)].add(each)
    pools = {each: sorted(by_form[form(each)] - {each}) for each in every}
    return [
        (other, each)
        for each in answers
        for other in chance.sample(pools[each] if len(pools[each]) >= count else every, count)
        if other != each
    ]


def directly(verifier: str, text: str, answer: str) -> bool:
    operand = boxed_answer(text) if verifier == "math_verify_boxed" else text
    if operand is None:
        return False
    gold = math_verify.parse(in_environment(answer))
    prediction = math_verify.parse(in_environment(operand))
    return math_verify.verify(gold, prediction) if gold and prediction else operand == answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", type=Path)
    parser.add_argument("--verifier", default="boxed", choices=BUILTIN_VERIFIERS)
    parser.add_argument("--others", type=int, default=20)
    parser.add_argument("--show", type=int, default=20)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.problems.read_text("utf-8").splitlines()]
    answers = [row.get("answer") or last_box(row["solution"]) or "" for row in rows]
    groups = {
        name: [(other, each) for each in answers if (other := rewrite(each)) != each]
        for name, rewrite in REWRITES.items()
    }
    groups["another answer"] = others(answers, options.others)
    different = 0
    with RewardScorer.open(RewardSection(function=options.verifier)) as scorer:
        for name, pairs in groups.items():
            items = [(BOXES[n % 3] % one, gold) for n, (one, gold) in enumerate(pairs)]
            verdicts = scorer.score([(text, gold, None) for text, gold in items])
            correct = [verdict.status == "correct" for verdict in verdicts]
            share = sum(correct) / max(len(pairs), 1)
            print(f"{name:24}{sum(correct):8} of {len(pairs):6} correct, {share:.2%}")
            odd = [p for p, right in zip(pairs, correct) if right == (name == "another answer")]
            for one, gold in list(dict.fromkeys(odd))[: options.show]:
                print(f"      {one}   for   {gold}")
            if options.verifier.startswith("math_verify"):
                expected = [directly(options.verifier, *item) for item in items]
                different += sum(a != b for a, b in zip(correct, expected))
    print(f"{different} verdicts differ from direct calls of math-verify")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
