"""The imperfect pupil: each mistake by hand, and the whole of a faultless pupil."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tiny_pupil import Habits, Pupil, misremembered_products

from grpo_replay.tiny.problems import BENCHMARKS, operand_pool, problem_row

FAULTLESS = Habits(
    forgotten_carry=0,
    smaller_from_larger=0,
    left_to_right=0,
    lost_sign=0,
    misremembered_product=0,
    slip=0,
)


def pupil(**habits: float) -> Pupil:
    return Pupil(replace(FAULTLESS, **habits), np.random.default_rng(0))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_pupil_without_mistakes_is_always_right(name):
    for operands in operand_pool(name)[::7]:
        boxed = re.fullmatch(r"[0-9,;-]+\\boxed\{(.+)\}", pupil().answer(name, operands))
        assert boxed and boxed[1] == problem_row(name, operands)["answer"]


@pytest.mark.parametrize(
    ("habits", "name", "operands", "answer"),
    [
        ({}, "tiny_add", (47, 38), r"15,8\boxed{85}"),
        ({"forgotten_carry": 1}, "tiny_add", (47, 38), r"15,7\boxed{75}"),
        ({}, "tiny_sub", (52, 38), r"4,1\boxed{14}"),
        ({"smaller_from_larger": 1}, "tiny_sub", (52, 38), r"6,2\boxed{26}"),
        ({}, "tiny_mul", (47, 6), r"42,28\boxed{282}"),
        ({"forgotten_carry": 1}, "tiny_mul", (47, 6), r"42,24\boxed{242}"),
        ({}, "tiny_order", (27, 4, 6), r"24;11,5\boxed{51}"),
        ({"left_to_right": 1}, "tiny_order", (27, 4, 6), r"31;6,18\boxed{186}"),
        ({}, "tiny_pair", (3, 9, 7, 8), r"27-56;9,2\boxed{-29}"),
        ({"lost_sign": 1}, "tiny_pair", (3, 9, 7, 8), r"27-56;9,2\boxed{29}"),
    ],
)
def test_mistakes_by_hand(habits, name, operands, answer):
    assert pupil(**habits).answer(name, operands) == answer


def test_misremembered_products_are_neighbours_in_the_table():
    table = misremembered_products(Habits())
    assert len(table) == round(0.40 * 36)
    for factors, wrong in table.items():
        a, b = min(factors), max(factors)
        assert wrong in (a * (b - 1), a * (b + 1))
