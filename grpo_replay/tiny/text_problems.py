"""Problems for a language model that others have trained: plain text, no base model of their own.

| task            | problem                                     | the work                   |
|-----------------|---------------------------------------------|----------------------------|
| `additions`     | `83 + 41`                                   | none: the answer alone     |
| `step_sums`     | `7 + 12 + 4`                                | a line of running sums     |
| `word_problems` | `Ann has 34 books. Ann gives away 12. …`    | to find the operation      |

The recipe shows a few worked examples in front of each problem (`EXAMPLES`). Every task has its own
held-out problems, the same for every seed. No training problem has the operands of a held-out one
or of an example, also not in another order or in another story. Needs only numpy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np

from grpo_replay.tiny.problems import HELD_OUT_SEED, generator, row

TRAIN_PROBLEMS = 2500
HELD_OUT_PROBLEMS = 200

Drawn = tuple[str, int, tuple[object, ...]]
"""A problem, its answer, and a key that is equal for problems with the same operands."""


def last_number(completion: str, answer: str) -> float:
    """1 if the last whole number of a completion is the answer, else 0. Unlike a symbolic verifier,
    it does not take the problem itself for its answer."""
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)


def addition(rng: np.random.Generator) -> Drawn:
    """Two numbers of two digits."""
    a, b = rng.integers(10, 100, 2).tolist()
    return f"{a} + {b}", a + b, tuple(sorted((a, b)))


def step_sum(rng: np.random.Generator) -> Drawn:
    """Three numbers below 20."""
    terms = rng.integers(2, 20, 3).tolist()
    return " + ".join(map(str, terms)), sum(terms), tuple(sorted(terms))


NAMES = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Grace", "Hugo", "Iris", "Jack")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps")
STORIES: tuple[tuple[str, Callable[[int, int], int]], ...] = (
    ("{0} has {a} {1}. {0} buys {b} more. How many {1} does {0} have now?", int.__add__),
    ("{0} has {a} {1} and finds {b} more. How many {1} does {0} have?", int.__add__),
    ("{0} has {a} {1}. {0} gives away {b}. How many {1} does {0} have left?", int.__sub__),
    ("There are {a} {1} in a box. {0} takes {b}. How many {1} are left in it?", int.__sub__),
    ("{0} has {a} boxes with {b} {1} in each. How many {1} does {0} have?", int.__mul__),
)


def word_problem(rng: np.random.Generator) -> Drawn:
    """One step in plain words: a sum, a difference or a product."""
    text, operation = STORIES[rng.integers(len(STORIES))]
    a, b = sorted(rng.integers(2, 60, 2).tolist(), reverse=True)
    if operation is int.__mul__:
        a, b = 2 + a % 8, 2 + b % 8
    words = NAMES[rng.integers(len(NAMES))], THINGS[rng.integers(len(THINGS))]
    problem = text.format(*words, a=a, b=b)
    return problem, operation(a, b), (operation.__name__, *sorted((a, b)))


TASKS: dict[str, Callable[[np.random.Generator], Drawn]] = {
    "additions": addition,
    "step_sums": step_sum,
    "word_problems": word_problem,
}
"""What draws a problem of each task."""

EXAMPLES: dict[str, tuple[tuple[object, ...], ...]] = {
    "additions": ((14, 21), (39, 52)),
    "step_sums": ((4, 7, 12), (3, 5, 16), (2, 8, 9), (6, 15, 18)),
    "word_problems": (("__add__", 5, 8), ("__sub__", 11, 31), ("__mul__", 3, 4)),
}
"""Keys of the examples that the recipes show, where the task could draw them."""


def train_problems(name: str, seed: int = 0) -> list[dict[str, str]]:
    """`TRAIN_PROBLEMS` distinct problems of a task. The seed selects them.

    The rows have the fields of the tiny task's: `problem`, `answer`, `benchmark`, `problem_id`.
    """
    taken = {key for _, _, key in _held_out(name)}.union(EXAMPLES[name])
    drawn = _distinct(name, seed, "train", TRAIN_PROBLEMS, taken)
    return [row(name, problem, answer) for problem, answer, _ in drawn]


def benchmark_problems(name: str) -> list[dict[str, str]]:
    """The `HELD_OUT_PROBLEMS` held-out problems of a task, with the rows of `train_problems`."""
    return [row(name, problem, answer) for problem, answer, _ in _held_out(name)]


@cache
def _held_out(name: str) -> tuple[Drawn, ...]:
    shown = set(EXAMPLES[name])
    return _distinct(name, HELD_OUT_SEED, "held out", HELD_OUT_PROBLEMS, shown)


def _distinct(
    name: str, seed: int, purpose: str, count: int, taken: set[tuple[object, ...]]
) -> tuple[Drawn, ...]:
    """So many problems with different texts, none with a key that is taken."""
    rng, found = generator(name, seed, purpose), dict[str, Drawn]()
    while len(found) < count:
        drawn = TASKS[name](rng)
        if drawn[2] not in taken:
            found[drawn[0]] = drawn
    return tuple(found.values())
