"""Makes the arithmetic problems of the tiny task: five small benchmarks, from easy to hard.

| benchmark    | problem   | steps to the answer                                       |
|--------------|-----------|-----------------------------------------------------------|
| `tiny_add`   | `47+38`   | a sum of two digits, and its carry                        |
| `tiny_sub`   | `52-38`   | a difference of two digits, and its borrow                |
| `tiny_mul`   | `47*6`    | two products from the table, a carry of up to 8           |
| `tiny_order` | `27+4*6`  | the product first, then a sum with its carry              |
| `tiny_pair`  | `7*8-3*9` | two products, then a difference with its borrow and sign  |

Every benchmark has its own held-out problems, the same for every seed. No training problem is a
held-out one, not even with the operands of a sum or product exchanged. Needs only numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from zlib import crc32

import numpy as np

HELD_OUT_PROBLEMS = 200
"""Number of held-out problems of each benchmark."""

TRAIN_PROBLEMS = 512
"""Number of training problems of each benchmark."""

HELD_OUT_SEED = 20260604
"""Seed of the held-out problems. Fixed, so that they are the same in every run."""

PROMPT_TEMPLATE = "{problem}="
"""Template of a prompt."""


@dataclass(frozen=True)
class _Family:
    """One benchmark: the format of a problem, the ranges of its operands, and its answer."""

    text: str  # format string over the operands
    low: tuple[int, ...]  # smallest operands, inclusive
    high: tuple[int, ...]  # largest operands, inclusive
    answer: Callable[..., int]
    allowed: Callable[..., bool] = lambda *operands: True
    key: Callable[..., object] = lambda *operands: operands  # equal for equivalent problems


_FAMILIES: dict[str, _Family] = {
    "tiny_add": _Family(
        "{0}+{1}", (10, 10), (99, 99), lambda a, b: a + b, key=lambda a, b: frozenset((a, b))
    ),
    "tiny_sub": _Family("{0}-{1}", (10, 10), (99, 99), lambda a, b: a - b, lambda a, b: a > b),
    "tiny_mul": _Family("{0}*{1}", (11, 2), (99, 9), lambda a, b: a * b),
    "tiny_order": _Family(
        "{0}+{1}*{2}",
        (10, 2, 2),
        (99, 9, 9),
        lambda a, b, c: a + b * c,
        key=lambda a, b, c: (a, frozenset((b, c))),
    ),
    "tiny_pair": _Family(
        "{0}*{1}-{2}*{3}",
        (2, 2, 2, 2),
        (9, 9, 9, 9),
        lambda a, b, c, d: a * b - c * d,
        lambda a, b, c, d: a * b != c * d,
        key=lambda a, b, c, d: (frozenset((a, b)), frozenset((c, d))),
    ),
}

BENCHMARKS: tuple[str, ...] = tuple(_FAMILIES)
"""Names of the benchmarks, easy to hard."""


def train_problems(seed: int = 0) -> list[dict[str, str]]:
    """Make `TRAIN_PROBLEMS` problems of each benchmark, shuffled together. The seed selects them.

    A row has `problem` ("47+38"), `answer` ("85"), `benchmark` ("tiny_add") and `problem_id`
    ("tiny_add:47+38"), all strings. No row is a held-out problem of any benchmark.
    """
    rows: list[dict[str, str]] = []
    for name in BENCHMARKS:
        pool = operand_pool(name)
        chosen = generator(name, seed, "train").choice(len(pool), TRAIN_PROBLEMS, replace=False)
        rows.extend(problem_row(name, pool[i]) for i in chosen)
    order = generator("all", seed, "order").permutation(len(rows))
    return [rows[i] for i in order]


def benchmark_problems(name: str) -> list[dict[str, str]]:
    """Make the `HELD_OUT_PROBLEMS` problems of a benchmark, with the fields of `train_problems`."""
    return [problem_row(name, operands) for operands in _held_out(name)]


def problem_row(name: str, operands: tuple[int, ...]) -> dict[str, str]:
    """Make the row of one problem from its benchmark and its operands."""
    family = _FAMILIES[name]
    return row(name, family.text.format(*operands), family.answer(*operands))


def row(name: str, problem: str, answer: int) -> dict[str, str]:
    """Make the row of one problem of a benchmark from its text and its answer."""
    problem_id = f"{name}:{problem}"
    return {
        "problem": problem, "answer": str(answer), "benchmark": name, "problem_id": problem_id
    }  # fmt: skip


@cache
def operand_pool(name: str) -> tuple[tuple[int, ...], ...]:
    """Operands of all problems of a benchmark that are not equivalent to a held-out one."""
    family = _FAMILIES[name]
    held_out_keys = {family.key(*operands) for operands in _held_out(name)}
    return tuple(o for o in _all_operands(name) if family.key(*o) not in held_out_keys)


@cache
def _held_out(name: str) -> tuple[tuple[int, ...], ...]:
    operands = _all_operands(name)
    rng = generator(name, HELD_OUT_SEED, "held out")
    return tuple(operands[i] for i in rng.choice(len(operands), HELD_OUT_PROBLEMS, replace=False))


@cache
def _all_operands(name: str) -> tuple[tuple[int, ...], ...]:
    family = _FAMILIES[name]
    ranges = [np.arange(lo, hi + 1) for lo, hi in zip(family.low, family.high, strict=True)]
    grid = np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, len(ranges))
    return tuple(o for o in map(tuple, grid.tolist()) if family.allowed(*o))


def generator(name: str, seed: int, purpose: str) -> np.random.Generator:
    """Make a random generator that depends only on the arguments."""
    return np.random.default_rng([seed, crc32(f"{purpose}/{name}".encode())])
