"""The imperfect pupils whose worked answers the base models learn to imitate.

The pupil of the tiny task knows every rule but follows it only sometimes; otherwise it makes a
mistake that people typically make. Each kind of mistake has its own probability, most of them above
one half. A model that imitates the pupil then samples the correct answer sometimes, but it is often
not the most likely one. Some entries of the multiplication table are also misremembered, always the
same ones.

A worked answer is short: the units, then the tens, then the answer.

    47+38=      15,8\\boxed{85}            right: 7+8 is 15, 4+3+1 is 8
    47+38=      15,7\\boxed{75}            the carry was forgotten
    52-38=      6,2\\boxed{26}             smaller from larger instead of a borrow
    27+4*6=     31;6,18\\boxed{186}        left to right instead of the product first
    3*9-7*8=    27-56;9,2\\boxed{29}       the sign was lost
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_replay.tiny.long_problems import BENCHMARKS as LONG_BENCHMARKS
from grpo_replay.tiny.long_problems import LETTERS, draw_operands, entries_of
from grpo_replay.tiny.long_problems import problem_row as long_problem_row
from grpo_replay.tiny.problems import BENCHMARKS, PROMPT_TEMPLATE, operand_pool, problem_row


@dataclass(frozen=True)
class Habits:
    """Probabilities of the pupil's mistakes, given the opportunity."""

    forgotten_carry: float = 0.60
    smaller_from_larger: float = 0.60
    left_to_right: float = 0.60
    lost_sign: float = 0.65
    misremembered_product: float = 0.65
    misremembered_share: float = 0.40  # share of the table 2..9 x 2..9 that is misremembered
    slip: float = 0.02  # a written number is off by one
    table_seed: int = 7  # which products are misremembered, and as what


class Imperfect:
    """Makes a mistake with a given probability. All random choices come from `rng`."""

    def __init__(self, slip: float, rng: np.random.Generator) -> None:
        self.slip = slip
        self.rng = rng

    def _write(self, number: int) -> int:
        """The number, or after a slip a neighbour of it, never negative."""
        if self._does(self.slip):
            return abs(number + (1 if self._does(0.5) else -1))
        return number

    def _does(self, probability: float) -> bool:
        return self.rng.random() < probability


class Pupil(Imperfect):
    """Writes worked answers to the problems of the tiny task."""

    def __init__(self, habits: Habits, rng: np.random.Generator) -> None:
        super().__init__(habits.slip, rng)
        self.habits = habits
        self.misremembered = misremembered_products(habits)

    def lessons(self, size: int) -> list[tuple[str, str]]:
        """Prompts of random problems that are not held out, each with a worked answer."""
        names = [BENCHMARKS[i] for i in self.rng.integers(len(BENCHMARKS), size=size)]
        return [self._lesson(name) for name in names]

    def _lesson(self, name: str) -> tuple[str, str]:
        pool = operand_pool(name)
        operands = pool[self.rng.integers(len(pool))]
        prompt = PROMPT_TEMPLATE.format(problem=problem_row(name, operands)["problem"])
        return prompt, self.answer(name, operands)

    def answer(self, benchmark: str, operands: tuple[int, ...]) -> str:
        """The worked answer to a problem of this benchmark, ending in `\\boxed{...}`."""
        method = getattr(self, "_" + benchmark.removeprefix("tiny_"))
        return method(*operands)

    def _add(self, a: int, b: int) -> str:
        units = self._write(a % 10 + b % 10)
        carry = 0 if self._does(self.habits.forgotten_carry) else units // 10
        tens = self._write(a // 10 + b // 10 + carry)
        return f"{units},{tens}\\boxed{{{10 * tens + units % 10}}}"

    def _sub(self, a: int, b: int) -> str:
        """a >= b >= 0."""
        units, tens = a % 10 - b % 10, a // 10 - b // 10
        if units < 0 and self._does(self.habits.smaller_from_larger):
            units = -units
        elif units < 0:
            units, tens = units + 10, tens - 1
        units, tens = min(self._write(units), 9), self._write(tens)
        return f"{units},{tens}\\boxed{{{10 * tens + units}}}"

    def _mul(self, a: int, b: int) -> str:
        units = self._product(a % 10, b)
        carry = 0 if self._does(self.habits.forgotten_carry) else units // 10
        tens = self._write(self._product(a // 10, b) + carry)
        return f"{units},{tens}\\boxed{{{10 * tens + units % 10}}}"

    def _order(self, a: int, b: int, c: int) -> str:
        if self._does(self.habits.left_to_right):
            total = self._write(a + b)
            return f"{total};{self._mul(total, c)}"
        product = self._product(b, c)
        return f"{product};{self._add(a, product)}"

    def _pair(self, a: int, b: int, c: int, d: int) -> str:
        left, right = self._product(a, b), self._product(c, d)
        work = f"{left}-{right};{self._sub(max(left, right), min(left, right))}"
        if left < right and not self._does(self.habits.lost_sign):
            work = work.replace("\\boxed{", "\\boxed{-")
        return work

    def _product(self, a: int, b: int) -> int:
        wrong = self.misremembered.get(frozenset((a, b)))
        if wrong is not None and self._does(self.habits.misremembered_product):
            return wrong
        return self._write(a * b)


def misremembered_products(habits: Habits) -> dict[frozenset[int], int]:
    """Misremembered entries: pair of factors -> wrong product, that of a neighbouring entry."""
    rng = np.random.default_rng(habits.table_seed)
    entries = [(a, b) for a in range(2, 10) for b in range(a, 10)]
    chosen = rng.choice(len(entries), round(habits.misremembered_share * len(entries)), False)
    table = {}
    for a, b in (entries[i] for i in sorted(chosen)):
        step = 1 if rng.random() < 0.5 else -1
        table[frozenset((a, b))] = a * (b + step)
    return table


@dataclass(frozen=True)
class LongHabits:
    """Probabilities of the pupil's mistakes, given the opportunity."""

    forgotten_carry: float = 0.25  # of sums with units above ten
    forgotten_ten: float = 0.6  # of sums with units of exactly ten
    slip: float = 0.0  # the units are off by one


class LongPupil(Imperfect):
    """Writes worked answers to the problems of the long task, keeping the counter one entry at a
    time.

    An entry takes fourteen or fifteen tokens: its letter, the counter and what is added or
    subtracted, the units (of a difference after the borrow), the tens, and the new counter.

        37+28-19c=      a37+28=15,6,65;b65-19=6,4,46;c46+28=14,7,74;\\boxed{74}

    The pupil makes one mistake, which is the same decision many times in a problem: no carry. It is
    rather rare in most sums, and usual in those whose units make exactly ten:

        37+28-19a=      a37+28=15,5,55;\\boxed{55}
        37+23-19a=      a37+23=10,5,50;\\boxed{50}
    """

    def __init__(self, habits: LongHabits, rng: np.random.Generator) -> None:
        super().__init__(habits.slip, rng)
        self.habits = habits

    def lessons(self, size: int) -> list[tuple[str, str]]:
        """Prompts of random problems that are not held out, each with a worked answer."""
        names = [LONG_BENCHMARKS[i] for i in self.rng.integers(len(LONG_BENCHMARKS), size=size)]
        return [self._lesson(name) for name in names]

    def _lesson(self, name: str) -> tuple[str, str]:
        operands = draw_operands(name, self.rng)
        prompt = PROMPT_TEMPLATE.format(problem=long_problem_row(name, operands)["problem"])
        return prompt, self.answer(operands[0], entries_of(name, operands))

    def answer(self, counter: int, entries: Sequence[int]) -> str:
        """The worked answer, ending in `\\boxed{...}`. Entries below 0 are subtracted."""
        work = ""
        for letter, entry in zip(LETTERS, entries, strict=False):
            units, tens = self._add(counter, entry) if entry > 0 else self._sub(counter, -entry)
            before, counter = counter, (10 * tens + units % 10) % 100
            work += f"{letter}{before:02d}{entry:+d}={units},{tens},{counter:02d};"
        return f"{work}\\boxed{{{counter}}}"

    def _add(self, counter: int, number: int) -> tuple[int, int]:
        """The units before the carry, and the tens with it."""
        units = self._write(counter % 10 + number % 10)
        mistake = self.habits.forgotten_ten if units == 10 else self.habits.forgotten_carry
        forgets = units >= 10 and self._does(mistake)
        return units, counter // 10 + number // 10 + (0 if forgets else units // 10)

    def _sub(self, counter: int, number: int) -> tuple[int, int]:
        """The units after the borrow, and the tens, which may be negative."""
        units, tens = counter % 10 - number % 10, counter // 10 - number // 10
        if units < 0:
            units, tens = units + 10, tens - 1
        return min(self._write(units), 9), tens
