"""The imperfect pupil of the long task, who keeps the counter one entry at a time.

An entry takes fourteen or fifteen tokens: its letter, the counter and what is added or subtracted,
the units (of a difference after the borrow), the tens, and the new counter.

    37+28-19c=      a37+28=15,6,65;b65-19=6,4,46;c46+28=14,7,74;\\boxed{74}

The pupil makes one mistake, which is the same decision many times in a problem: no carry. It is
rather rare in most sums, and usual in those whose units make exactly ten:

    37+28-19a=      a37+28=15,5,55;\\boxed{55}
    37+23-19a=      a37+23=10,5,50;\\boxed{50}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_replay.tiny.long_problems import (
    BENCHMARKS,
    LETTERS,
    draw_operands,
    entries_of,
    problem_row,
)
from grpo_replay.tiny.problems import PROMPT_TEMPLATE
from grpo_replay.tiny.pupil import Imperfect


@dataclass(frozen=True)
class LongHabits:
    """Probabilities of the pupil's mistakes, given the opportunity."""

    forgotten_carry: float = 0.25  # of sums with units above ten
    forgotten_ten: float = 0.6  # of sums with units of exactly ten
    slip: float = 0.0  # the units are off by one


class LongPupil(Imperfect):
    """Writes worked answers to the problems of the long task."""

    def __init__(self, habits: LongHabits, rng: np.random.Generator) -> None:
        super().__init__(habits.slip, rng)
        self.habits = habits

    def lessons(self, size: int) -> list[tuple[str, str]]:
        """Prompts of random problems that are not held out, each with a worked answer."""
        names = [BENCHMARKS[i] for i in self.rng.integers(len(BENCHMARKS), size=size)]
        return [self._lesson(name) for name in names]

    def _lesson(self, name: str) -> tuple[str, str]:
        operands = draw_operands(name, self.rng)
        prompt = PROMPT_TEMPLATE.format(problem=problem_row(name, operands)["problem"])
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
