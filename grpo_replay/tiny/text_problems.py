"""Makes problems in plain text for any pretrained language model; no base model ships with them.

| task            | problem        | the work               |
|-----------------|----------------|------------------------|
| `additions`     | `83 + 41`      | none: the answer alone |
| `step_sums`     | `7 + 12 + 4`   | a line of running sums |

The recipe shows a few worked examples in front of each problem (`EXAMPLES`). Every task has its own
held-out problems, the same for every seed. No training problem has the operands of a held-out one
or of an example, not even in another order. Needs only numpy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np

from grpo_replay.tiny.problems import HELD_OUT_SEED, generator, row

TRAIN_PROBLEMS = 2500
HELD_OUT_PROBLEMS = 200

KeyedProblem = tuple[str, int, tuple[int, ...]]
"""A problem, its answer, and a key that is equal for problems with the same operands."""


def last_number(completion: str, answer: str) -> float:
    """Reward 1 if the last whole number of a completion is the answer, else 0. Unlike a symbolic
    verifier, it does not accept the problem itself as its answer."""
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)


def addition(rng: np.random.Generator) -> KeyedProblem:
    """Draw a sum of two numbers of two digits."""
    a, b = rng.integers(10, 100, 2).tolist()
    return f"{a} + {b}", a + b, tuple(sorted((a, b)))


def step_sum(rng: np.random.Generator) -> KeyedProblem:
    """Draw a sum of three numbers below 20."""
    terms = rng.integers(2, 20, 3).tolist()
    return " + ".join(map(str, terms)), sum(terms), tuple(sorted(terms))


TASKS: dict[str, Callable[[np.random.Generator], KeyedProblem]] = {
    "additions": addition,
    "step_sums": step_sum,
}
"""The function that draws a problem, by task."""

EXAMPLES: dict[str, tuple[tuple[int, ...], ...]] = {
    "additions": ((14, 21), (39, 52)),
    "step_sums": ((4, 7, 12), (3, 5, 16), (2, 8, 9), (6, 15, 18)),
}
"""Keys of the examples that the recipes show, if the task could draw them."""


def train_problems(name: str, seed: int = 0) -> list[dict[str, str]]:
    """Make `TRAIN_PROBLEMS` distinct problems of a task. The seed selects them.

    The rows have the fields of the tiny task: `problem`, `answer`, `benchmark`, `problem_id`.
    """
    excluded_keys = {key for _, _, key in _held_out(name)}.union(EXAMPLES[name])
    problems = _distinct_problems(name, seed, "train", TRAIN_PROBLEMS, excluded_keys)
    return [row(name, problem, answer) for problem, answer, _ in problems]


def benchmark_problems(name: str) -> list[dict[str, str]]:
    """Make the `HELD_OUT_PROBLEMS` problems of a task, with the fields of `train_problems`."""
    return [row(name, problem, answer) for problem, answer, _ in _held_out(name)]


@cache
def _held_out(name: str) -> tuple[KeyedProblem, ...]:
    example_keys = set(EXAMPLES[name])
    return _distinct_problems(name, HELD_OUT_SEED, "held out", HELD_OUT_PROBLEMS, example_keys)


def _distinct_problems(
    name: str, seed: int, purpose: str, count: int, excluded_keys: set[tuple[int, ...]]
) -> tuple[KeyedProblem, ...]:
    """Draw `count` problems with different texts, none with an excluded key."""
    rng, problems = generator(name, seed, purpose), dict[str, KeyedProblem]()
    while len(problems) < count:
        text, answer, key = TASKS[name](rng)
        if key not in excluded_keys:
            problems[text] = (text, answer, key)
    return tuple(problems.values())
