"""The pupil of the long task: each mistake by hand, and the whole of a faultless pupil."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tiny_pupil import LongHabits, LongPupil

from grpo_replay.tiny.long_problems import BENCHMARKS, draw_operands, entries_of, problem_row

FAULTLESS = LongHabits(forgotten_carry=0, forgotten_ten=0, slip=0)


def pupil(**habits: float) -> LongPupil:
    return LongPupil(replace(FAULTLESS, **habits), np.random.default_rng(0))


def is_right(teacher: LongPupil, name: str, rng: np.random.Generator) -> bool:
    operands = draw_operands(name, rng)
    answer = teacher.answer(operands[0], entries_of(name, operands))
    boxed = re.fullmatch(r"[a-r0-9+=,;-]+\\boxed\{(\d+)\}", answer)
    return boxed[1] == problem_row(name, operands)["answer"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_pupil_without_mistakes_is_always_right(name):
    rng = np.random.default_rng(1)
    assert all(is_right(pupil(), name, rng) for _ in range(200))


@pytest.mark.parametrize(
    ("habits", "counter", "entries", "answer"),
    [
        ({}, 37, (28, -19, 95), r"a37+28=15,6,65;b65-19=6,4,46;c46+95=11,14,41;\boxed{41}"),
        ({}, 5, (-19,), r"a05-19=6,-2,86;\boxed{86}"),
        ({}, 37, (63,), r"a37+63=10,10,00;\boxed{0}"),
        ({}, 37, (23,), r"a37+23=10,6,60;\boxed{60}"),
        ({"forgotten_ten": 1}, 37, (23,), r"a37+23=10,5,50;\boxed{50}"),
        ({"forgotten_ten": 1}, 37, (24,), r"a37+24=11,6,61;\boxed{61}"),
        ({"forgotten_carry": 1}, 37, (23,), r"a37+23=10,6,60;\boxed{60}"),
        ({"forgotten_carry": 1}, 37, (24,), r"a37+24=11,5,51;\boxed{51}"),
        ({"forgotten_carry": 1, "forgotten_ten": 1}, 37, (22,), r"a37+22=9,5,59;\boxed{59}"),
        ({"forgotten_carry": 1, "forgotten_ten": 1}, 60, (-23,), r"a60-23=7,3,37;\boxed{37}"),
    ],
)
def test_mistakes_by_hand(habits, counter, entries, answer):
    assert pupil(**habits).answer(counter, entries) == answer


def test_a_slip_changes_the_units_of_a_step_by_one():
    for start, entry in ((37, 21), (37, -25)):
        units = int(pupil(slip=1).answer(start, (entry,)).split("=")[1].split(",")[0])
        assert abs(units - (start + entry) % 10) == 1


def test_the_imperfect_pupil_is_right_in_some_problems_of_each_benchmark():
    careless, rng = LongPupil(LongHabits(), np.random.default_rng(2)), np.random.default_rng(3)
    for name in BENCHMARKS:
        assert 0.25 < np.mean([is_right(careless, name, rng) for _ in range(500)]) < 0.7
