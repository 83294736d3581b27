"""The long problems: what they promise about answers, seeds and held-out sets."""

import re

import pytest

from grpo_replay.tiny.long_problems import (
    BENCHMARKS,
    ENTRIES,
    HELD_OUT_PROBLEMS,
    TRAIN_PROBLEMS,
    benchmark_problems,
    draw_operands,
    entries_of,
    problem_row,
    train_problems,
)
from grpo_replay.tiny.problems import generator


def every_row() -> list[dict[str, str]]:
    return train_problems() + [row for name in BENCHMARKS for row in benchmark_problems(name)]


def test_a_row_by_hand():
    assert entries_of("tiny_long_10", (5, 28, 19)) == [28, -19] * 5
    assert problem_row("tiny_long_10", (5, 28, 19)) == {
        "problem": "05+28-19j",
        "answer": "50",  # 5 + 5 * 9
        "benchmark": "tiny_long_10",
        "problem_id": "tiny_long_10:05+28-19j",
    }
    assert problem_row("tiny_long_10", (5, 19, 28))["answer"] == "60"  # 5 - 45 + 100


def test_every_answer_is_what_python_computes():
    rows = every_row()
    assert len(rows) == 3 * (HELD_OUT_PROBLEMS + TRAIN_PROBLEMS)
    for row in rows:
        text = re.fullmatch(r"(\d\d)\+(\d\d)-(\d\d)([a-r])", row["problem"])
        start, added, subtracted = map(int, text.groups()[:3])
        pairs = ENTRIES[row["benchmark"]] // 2
        assert "abcdefghijklmnopqrst".index(text[4]) + 1 == 2 * pairs
        assert row["answer"] == str((start + pairs * (added - subtracted)) % 100)


@pytest.mark.parametrize("seed", range(5))
def test_no_training_problem_is_held_out_and_none_occurs_twice(seed):
    held_out = {row["problem_id"] for name in BENCHMARKS for row in benchmark_problems(name)}
    trained = {row["problem_id"] for row in train_problems(seed)}
    assert (len(held_out), len(trained)) == (3 * HELD_OUT_PROBLEMS, 3 * TRAIN_PROBLEMS)
    assert not held_out & trained


def test_a_drawn_problem_that_is_held_out_is_drawn_again(monkeypatch):
    from grpo_replay.tiny import long_problems

    first = draw_operands("tiny_long_14", generator("x", 0, "train"))
    assert draw_operands("tiny_long_14", generator("x", 0, "train")) == first
    monkeypatch.setattr(long_problems, "_held_out", lambda name: {first: None})
    assert draw_operands("tiny_long_14", generator("x", 0, "train")) != first
