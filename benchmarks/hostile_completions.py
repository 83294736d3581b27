"""Grade completions that are made to hurt the verifiers: none may crash one or hold the step up.

    python benchmarks/hostile_completions.py [--count 1200] [--seed 0] [--workers 2]

Ordinary completions are mixed in, one in four. Kinds: nesting, towers of powers, factorials,
megabytes, Unicode, unbalanced braces, huge numbers, matrices, endless boxes, control characters,
format strings, code, and cut-off mixtures of all. Prints, for every kind and verifier, how many
were graded and how; exits 1 if one had no verdict, an ordinary one had the wrong verdict, or the
whole took longer than the limits of its parts allow.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from grpo_replay.recipe import BUILTIN_VERIFIERS, RewardSection
from grpo_replay.rewards.scorer import RewardScorer

GRADED = ("correct", "incorrect", "unparsable", "timeout", "memory")
ORDINARY = "ordinary"
_SIGNS = "{}[]()\\$^_&%#~!+-*/=<>|.,:;'\"`?@ \n\t"


def _nested(chance: random.Random) -> str:
    depth = chance.choice((50, 500, 5_000, 50_000))
    opened, closed = chance.choice((
        ("{", "}"), ("(", ")"), (r"\frac{1}{", "}"), (r"\sqrt{", "}"), (r"\left(", r"\right)"),
        (r"\boxed{", "}"), ("[", "]"), (r"\text{", "}"), ("-", ""), (r"\sin ", ""),
    ))  # fmt: skip
    return rf"\boxed{{{opened * depth}1{closed * depth}}}"


def _tower(chance: random.Random) -> str:
    base, height = chance.randint(2, 99), chance.randint(3, 40)
    return rf"\boxed{{{'^{'.join([str(base)] * height)}{'}' * (height - 1)}}}"


def _factorial(chance: random.Random) -> str:
    return rf"\boxed{{{chance.randint(10, 10**9)}{'!' * chance.randint(1, 30)}}}"


def _megabytes(chance: random.Random) -> str:
    part = chance.choice(
        ("1", "1+", "x ", "\\", "{", "$", r"\boxed{1} ", "a=b ", "\n", "ééé", "0.")
    )
    size = chance.choice((10_000, 100_000, 1_000_000, 4_000_000))
    return rf"\boxed{{{part * (size // len(part))}}}"


def _unicode(chance: random.Random) -> str:
    points = [0, 0x85, 0xAD, 0x200B, 0x202E, 0x2028, 0x3B1, 0x665, 0xD800, 0xFF11, 0xFEFF, 0x1F600]
    text = "".join(chr(chance.choice(points)) for _ in range(chance.randint(1, 400)))
    return chance.choice((rf"\boxed{{{text}}}", text, f"{text}=1", rf"\boxed{{1{text}}}"))


def _unbalanced(chance: random.Random) -> str:
    text = "".join(chance.choice(_SIGNS + "0123456789xy") for _ in range(chance.randint(1, 800)))
    return chance.choice((r"\boxed{" + text, text + "}" * 50, rf"$${text}", rf"\[{text}\]"))


def _huge_number(chance: random.Random) -> str:
    return chance.choice((
        rf"\boxed{{{'9' * chance.choice((4_000, 5_000, 100_000))}}}",
        rf"\boxed{{1e{chance.randint(300, 10**9)}}}",
        rf"\boxed{{10^{{{chance.randint(10**5, 10**12)}}}}}",
        rf"\boxed{{0.{'3' * 50_000}}}",
        rf"\boxed{{\binom{{{10**8}}}{{{10**7}}}}}",
        r"\boxed{\sum_{i=1}^{10^{12}} \frac{1}{i}}",
        r"\boxed{\int_0^{10^{9}} e^{x^{x}} dx}",
    ))  # fmt: skip


def _matrix(chance: random.Random) -> str:
    size = chance.choice((2, 30, 200))
    rows = r" \\ ".join(" & ".join(["x^{2}+1"] * size) for _ in range(size))
    return rf"\boxed{{\begin{{pmatrix}} {rows} \end{{pmatrix}}}}"


def _many_boxes(chance: random.Random) -> str:
    return " ".join(rf"\boxed{{{each}}}" for each in range(chance.choice((10, 1_000, 20_000))))


def _control(chance: random.Random) -> str:
    return rf"\boxed{{{''.join(chr(chance.randrange(32)) for _ in range(200))}}}" + "\x1b[2J\x07"


def _code(chance: random.Random) -> str:
    return chance.choice((
        r"\boxed{__import__('os').system('kill -9 0')}", r"\boxed{{0.__class__.__mro__}}",
        r"\boxed{exec(chr(120)*10**9)}", r"\boxed{lambda: (yield)}", r"\boxed{%s%s%n%n{0}{1}}",
        r"\boxed{open('/etc/passwd').read()}", r"\boxed{\input{/etc/passwd}}",
        r"\boxed{\def\x{\x\x}\x}", r"\boxed{\loop\iftrue\repeat}", r"\boxed{x=1;while(1){}}",
    ))  # fmt: skip


KINDS: dict[str, Callable[[random.Random], str]] = {
    "nesting": _nested, "towers": _tower, "factorials": _factorial, "megabytes": _megabytes,
    "Unicode": _unicode, "unbalanced": _unbalanced, "huge numbers": _huge_number,
    "matrices": _matrix, "many boxes": _many_boxes, "control": _control, "code": _code,
}  # fmt: skip


def hostile(count: int, seed: int) -> list[tuple[str, str]]:
    """(kind, completion), kinds in turn; the last kind mixes two others."""
    chance, names = random.Random(seed), [*KINDS, "mixtures"]
    found = []
    for index in range(count):
        name = names[index % len(names)]
        if name == "mixtures":
            one, other = (make(chance) for make in chance.sample(list(KINDS.values()), 2))
            cut = chance.randrange(len(one) + 1)
            found.append((name, one[:cut] + other))
        else:
            found.append((name, KINDS[name](chance)))
    return found


def campaign(verifier: str, count: int, seed: int, workers: int, limit: float) -> dict[str, Any]:
    """Grade `count` hostile completions and a third as many ordinary ones. The verdicts of every
    kind, wrong verdicts of ordinary ones, and seconds."""
    items: list[tuple[str, str, str]] = []
    for index, (kind, text) in enumerate(hostile(count, seed)):
        items.append((kind, text, "7"))
        if index % 3 == 0:
            right = index % 2 == 0
            items.append((ORDINARY, rf"So \boxed{{{7 if right else 8}}}", "7"))
    section = RewardSection(function=verifier, workers=workers, time_limit_seconds=limit)
    verdicts: dict[str, Counter[str]] = defaultdict(Counter)
    wrong = 0
    with RewardScorer.open(section) as scorer:
        scorer.wait_ready()
        began = time.monotonic()
        graded = scorer.score([(text, answer, {}) for _, text, answer in items])
        seconds = time.monotonic() - began
    for (kind, text, _), verdict in zip(items, graded, strict=True):
        verdicts[kind][verdict.status] += 1
        expected = "correct" if r"\boxed{7}" in text else "incorrect"
        wrong += kind == ORDINARY and verdict.status != expected
    statuses = sum(verdicts.values(), Counter())
    ordinary = verdicts[ORDINARY].total()
    return {
        "verifier": verifier,
        "hostile": statuses.total() - ordinary,
        "ordinary": ordinary,
        "ordinary_wrong": wrong,
        "without_verdict": sum(n for status, n in statuses.items() if status not in GRADED),
        "timeouts": statuses["timeout"],
        "seconds": round(seconds, 1),
        "kinds": {kind: dict(found) for kind, found in sorted(verdicts.items())},
    }


def is_well(found: dict[str, Any], workers: int, limit: float) -> bool:
    """No crash, a verdict for each, the ordinary ones right, and not longer than the limits of
    those that were stopped, and two seconds for each of the megabytes."""
    longest = (found["timeouts"] * (limit + 5) + 2 * found["hostile"]) / workers + 60
    clean = not (found["without_verdict"] or found["ordinary_wrong"])  # a crash is no verdict
    return clean and found["seconds"] < longest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1200, help="hostile ones, for each verifier")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=5.0, help="reward.time_limit_seconds")
    parser.add_argument("--verifiers", nargs="+", default=list(BUILTIN_VERIFIERS))
    options = parser.parse_args()
    well = True
    for verifier in options.verifiers:
        found = campaign(verifier, options.count, options.seed, options.workers, options.limit)
        print(json.dumps(found), flush=True)
        well &= is_well(found, options.workers, options.limit)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
