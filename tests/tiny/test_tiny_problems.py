"""The arithmetic problems: what they promise about answers, seeds and held-out sets."""

import re

import pytest

from grpo_replay.tiny.problems import (
    BENCHMARKS,
    HELD_OUT_PROBLEMS,
    PROMPT_TEMPLATE,
    TRAIN_PROBLEMS,
    benchmark_problems,
    operand_pool,
    problem_row,
    train_problems,
)


def every_row() -> list[dict[str, str]]:
    return train_problems() + [row for name in BENCHMARKS for row in benchmark_problems(name)]


def test_every_answer_is_what_python_computes():
    rows = every_row()
    assert len(rows) == 5 * (HELD_OUT_PROBLEMS + TRAIN_PROBLEMS)
    for row in rows:
        assert re.fullmatch(r"[0-9+*-]+", row["problem"])
        assert row["answer"] == str(eval(row["problem"]))


def test_a_row_by_hand():
    assert problem_row("tiny_pair", (3, 9, 7, 8)) == {
        "problem": "3*9-7*8",
        "answer": "-29",
        "benchmark": "tiny_pair",
        "problem_id": "tiny_pair:3*9-7*8",
    }
    assert PROMPT_TEMPLATE.format(problem="3*9-7*8") == "3*9-7*8="


def twin(problem: str) -> str:
    """One text for all problems that differ only in the order of a sum's or product's operands."""
    products = ["*".join(sorted(term.split("*"))) for term in re.split(r"[+-]", problem)]
    if "-" in problem:
        return "-".join(products)
    return "+".join(sorted(products))


@pytest.mark.parametrize("seed", range(5))
def test_no_training_problem_is_equivalent_to_a_held_out_one(seed):
    held_out = {twin(row["problem"]) for name in BENCHMARKS for row in benchmark_problems(name)}
    trained = {twin(row["problem"]) for row in train_problems(seed)}
    assert len(held_out) > 4.5 * HELD_OUT_PROBLEMS  # few twins among themselves
    assert not held_out & trained


def test_the_warm_up_pool_leaves_out_held_out_problems_too():
    for name in BENCHMARKS:
        held_out = {twin(row["problem"]) for row in benchmark_problems(name)}
        pool = {twin(problem_row(name, operands)["problem"]) for operands in operand_pool(name)}
        assert len(pool) >= TRAIN_PROBLEMS / 2
        assert not held_out & pool


@pytest.mark.parametrize("name", BENCHMARKS)
def test_no_problem_occurs_twice_in_a_set(name):
    held_out = [row["problem_id"] for row in benchmark_problems(name)]
    trained = [row["problem_id"] for row in train_problems() if row["benchmark"] == name]
    assert len(held_out) == len(set(held_out)) == HELD_OUT_PROBLEMS
    assert len(trained) == len(set(trained)) == TRAIN_PROBLEMS
