"""The two shortcuts of the `math_verify` verifier against the long way, formula by formula.

    python benchmarks/grading_shortcuts.py PROBLEMS.jsonl        # fields: solution, answer

Parsing: every formula of the solutions, and each one cut off at a random place, parsed in two
stages in one process and by latex2sympy as it is in another; tree or refusal must be the same.
Comparing: every pair of different answers (and of each answer and its expansion, factorisation and
double), and 500 large numbers written with a decimal and with a fraction, equal and nearly so,
through math-verify's comparison with and without the proof that a difference is not zero.
Exits with 1 and prints the place if anything differs.
"""

import argparse
import itertools
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import math_verify
import math_verify.grader
import math_verify.parser
import sympy
from math_verify.errors import TimeoutException
from math_verify.utils import timeout

from grpo_replay.rewards import two_stage
from grpo_replay.rewards.difference import simplify_unless_not_zero
from grpo_replay.rewards.math_verify import in_environment

_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]", re.DOTALL)


def formulas(rows: list[dict[str, str]], seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    found = [row["answer"] for row in rows]
    for row in rows:
        found += ["".join(groups) for groups in _FORMULA.findall(row["solution"])]
    distinct = list(dict.fromkeys(found))
    return list(
        dict.fromkeys(distinct + [text[: rng.randrange(1, len(text) + 1)] for text in distinct])
    )


def parsed(texts: list[str], in_two_stages: bool) -> tuple[list[str], float]:
    """Tree or refusal of each formula, and the CPU seconds of all."""
    if in_two_stages:
        two_stage.install()
    before = time.process_time()
    outcomes = [_outcome(text) for text in texts]
    return outcomes, time.process_time() - before


def _outcome(text: str) -> str:
    try:
        return sympy.srepr(timeout(60)(math_verify.parser.parse_latex_cached.__wrapped__)(text))
    except TimeoutException:
        return "time-out"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def compared(answers: list[str], shortcut: bool) -> tuple[list[tuple[str, str, bool]], float]:
    """(gold, prediction, equal) of all pairs, and the CPU seconds of comparing them."""
    if shortcut:
        math_verify.grader.simplify = simplify_unless_not_zero
    parsed_answers = {text: math_verify.parse(in_environment(text)) for text in answers}
    before, verdicts = time.process_time(), []
    for gold, prediction in itertools.permutations(answers, 2):
        equal = math_verify.verify(parsed_answers[gold], parsed_answers[prediction])
        verdicts.append((gold, prediction, equal))
    for gold, parts in parsed_answers.items():
        for name, change in _CHANGES.items():
            if parts and isinstance(parts[0], sympy.Expr):
                equal = math_verify.verify(parts[0], change(parts[0]))
                verdicts.append((gold, name, equal))
    for gold, prediction in decimals_and_fractions():
        equal = math_verify.verify(math_verify.parse(gold), math_verify.parse(prediction))
        verdicts.append((gold, prediction, equal))
    return verdicts, time.process_time() - before


def decimals_and_fractions(count: int = 500, seed: int = 0) -> Iterator[tuple[str, str]]:
    rng = random.Random(seed)
    for _ in range(count):
        tenths, base, power = rng.randrange(1, 100), rng.randrange(2, 10), rng.randrange(3, 41)
        rest = rng.choice(["", "+x", "\\pi", "-1"])
        decimal = f"${tenths / 10}\\cdot {base}^{{{power}}}{rest}$"
        for top in (tenths, tenths + 1):
            fraction = f"$\\frac{{{top}}}{{10}}\\cdot {base}^{{{power}}}{rest}$"
            yield decimal, fraction
            yield fraction, decimal


_CHANGES = {
    "expanded": sympy.expand,
    "factored": sympy.factor,
    "doubled": lambda expression: 2 * expression,
    "shifted by 1e-8": lambda expression: expression + sympy.Rational(1, 10**8),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", type=Path)
    rows = [json.loads(x) for x in parser.parse_args().problems.read_text("utf-8").splitlines()]
    texts = formulas(rows)
    answers = list(dict.fromkeys(row["answer"] for row in rows))
    differences = 0
    for name, work, items in (("parsed", parsed, texts), ("compared", compared, answers)):
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
            long_way = processes.submit(work, items, False)
            short_way = processes.submit(work, items, True)
            (expected, long), (got, short) = long_way.result(), short_way.result()
        differing = [pair for pair in zip(expected, got, strict=True) if pair[0] != pair[1]]
        differences += len(differing)
        print(
            f"{name}: {len(expected)} cases, {len(differing)} differ; "
            f"CPU: {long:.1f} s the long way, {short:.1f} s the short way",
            flush=True,
        )
        for pair in differing:
            print(f"  {pair[0]}\n  {pair[1]}")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
