"""The imperfect pupils that the shipped bases imitate: faultless, and with each mistake by hand."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tiny_pupil import Habits, LongHabits, LongPupil, Pupil

from grpo_replay.tiny import long_problems, problems

FAULTLESS = Habits(
    forgotten_carry=0, smaller_from_larger=0, left_to_right=0, lost_sign=0,
    misremembered_product=0, slip=0,
)  # fmt: skip
LONG_FAULTLESS = LongHabits(forgotten_carry=0, forgotten_ten=0, slip=0)


def pupil(**habits: float) -> Pupil:
    return Pupil(replace(FAULTLESS, **habits), np.random.default_rng(0))


def long_pupil(**habits: float) -> LongPupil:
    return LongPupil(replace(LONG_FAULTLESS, **habits), np.random.default_rng(0))


@pytest.mark.parametrize("name", problems.BENCHMARKS)
def test_a_pupil_without_mistakes_is_always_right(name):
    for operands in problems.operand_pool(name)[::7]:
        boxed = re.search(r"\\boxed\{(.+)\}$", pupil().answer(name, operands))
        assert boxed[1] == problems.problem_row(name, operands)["answer"]


@pytest.mark.parametrize("name", long_problems.BENCHMARKS)
def test_a_long_pupil_without_mistakes_is_always_right(name):
    rng = np.random.default_rng(1)
    for _ in range(100):
        operands = long_problems.draw_operands(name, rng)
        answer = long_pupil().answer(operands[0], long_problems.entries_of(name, operands))
        boxed = re.search(r"\\boxed\{(.+)\}$", answer)
        assert boxed[1] == long_problems.problem_row(name, operands)["answer"]


@pytest.mark.parametrize(
    ("habits", "name", "operands", "answer"),
    [
        ({"forgotten_carry": 1}, "tiny_add", (47, 38), r"15,7\boxed{75}"),
        ({"smaller_from_larger": 1}, "tiny_sub", (52, 38), r"6,2\boxed{26}"),
        ({"forgotten_carry": 1}, "tiny_mul", (47, 6), r"42,24\boxed{242}"),
        ({"left_to_right": 1}, "tiny_order", (27, 4, 6), r"31;6,18\boxed{186}"),
        ({"lost_sign": 1}, "tiny_pair", (3, 9, 7, 8), r"27-56;9,2\boxed{29}"),
    ],
)
def test_mistakes_by_hand(habits, name, operands, answer):
    assert pupil(**habits).answer(name, operands) == answer


@pytest.mark.parametrize(
    ("habits", "counter", "entries", "answer"),
    [
        ({"forgotten_ten": 1}, 37, (23,), r"a37+23=10,5,50;\boxed{50}"),
        ({"forgotten_carry": 1}, 37, (24,), r"a37+24=11,5,51;\boxed{51}"),
        ({"forgotten_carry": 1, "forgotten_ten": 1}, 60, (-23,), r"a60-23=7,3,37;\boxed{37}"),
    ],
)
def test_long_mistakes_by_hand(habits, counter, entries, answer):
    assert long_pupil(**habits).answer(counter, entries) == answer
