"""Makes the problems of the long task: one number is added to a counter of two digits and another
subtracted, in turn, up to a given letter.

    37+28-19d       37, then a: +28, b: -19, c: +28, d: -19

The counter keeps only two digits (arithmetic modulo 100): 37, 65, 46, 74, 55. The benchmarks differ
in the number of entries, `tiny_long_10` to `tiny_long_18`.

Every benchmark has its own held-out problems, the same for every seed, and no training problem is
one of them. Needs only numpy.
"""

from __future__ import annotations

from functools import cache
from string import ascii_lowercase as LETTERS

import numpy as np

from grpo_replay.tiny.problems import HELD_OUT_SEED, generator, row

ENTRIES: dict[str, int] = {"tiny_long_10": 10, "tiny_long_14": 14, "tiny_long_18": 18}
"""Number of entries of a problem, by benchmark."""

BENCHMARKS: tuple[str, ...] = tuple(ENTRIES)
"""Names of the benchmarks, easy to hard."""

HELD_OUT_PROBLEMS = 100
"""Number of held-out problems of each benchmark."""

TRAIN_PROBLEMS = 512
"""Number of training problems of each benchmark."""

Operands = tuple[int, int, int]
"""The start of the counter, 0 to 99, and the numbers added and subtracted, 10 to 99."""


def train_problems(seed: int = 0) -> list[dict[str, str]]:
    """Make `TRAIN_PROBLEMS` problems of each benchmark, shuffled together. The seed selects them.

    The rows have the fields of the tiny task: `problem`, `answer`, `benchmark`, `problem_id`.
    """
    rows: list[dict[str, str]] = []
    for name in BENCHMARKS:
        rng = generator(name, seed, "train")
        chosen: dict[Operands, None] = {}
        while len(chosen) < TRAIN_PROBLEMS:
            chosen[draw_operands(name, rng)] = None
        rows.extend(problem_row(name, operands) for operands in chosen)
    order = generator("all long", seed, "order").permutation(len(rows))
    return [rows[i] for i in order]


def benchmark_problems(name: str) -> list[dict[str, str]]:
    """Make the `HELD_OUT_PROBLEMS` problems of a benchmark, with the fields of `train_problems`."""
    return [problem_row(name, operands) for operands in _held_out(name)]


def problem_row(name: str, operands: Operands) -> dict[str, str]:
    """Make the row of one problem from its benchmark and its operands."""
    start, added, subtracted = operands
    problem = f"{start:02d}+{added}-{subtracted}{LETTERS[ENTRIES[name] - 1]}"
    return row(name, problem, (start + sum(entries_of(name, operands))) % 100)


def entries_of(name: str, operands: Operands) -> list[int]:
    """The entries of a problem in order: the number that is added, negative if subtracted."""
    _, added, subtracted = operands
    return [added if i % 2 == 0 else -subtracted for i in range(ENTRIES[name])]


def draw_operands(name: str, rng: np.random.Generator) -> Operands:
    """Draw the operands of a problem of a benchmark that is not held out."""
    operands = _random_operands(rng)
    while operands in _held_out(name):
        operands = _random_operands(rng)
    return operands


@cache
def _held_out(name: str) -> dict[Operands, None]:
    """Returns the operands of the held-out problems in order; a dict for quick look-up."""
    rng = generator(name, HELD_OUT_SEED, "held out")
    chosen: dict[Operands, None] = {}
    while len(chosen) < HELD_OUT_PROBLEMS:
        chosen[_random_operands(rng)] = None
    return chosen


def _random_operands(rng: np.random.Generator) -> Operands:
    start, added, subtracted = rng.integers((0, 10, 10), 100).tolist()
    return start, added, subtracted
