"""The problems of the tiny tasks: right answers, apart from each other, the same everywhere."""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest

from grpo_replay.recipe import load_recipe
from grpo_replay.tiny import TASKS, benchmark_problems, long_problems, problems, text_problems
from grpo_replay.tiny.problems import generator, operand_pool, problem_row
from grpo_replay.tiny.text_problems import last_number


def of_arithmetic(problem: str) -> str:
    return str(eval(problem))


def of_a_long_problem(problem: str) -> str:
    """The last letter says how many numbers are added and subtracted by turns."""
    start, added, subtracted = map(int, re.findall(r"\d\d", problem))
    pairs = ("abcdefghijklmnopqrst".index(problem[-1]) + 1) // 2
    return str((start + pairs * (added - subtracted)) % 100)


def twin(problem: str) -> str:
    """One text for all problems that differ only in the order of a sum's or product's operands."""
    products = ["*".join(sorted(term.split("*"))) for term in re.split(r"[+-]", problem)]
    if "-" in problem:
        return "-".join(products)
    return "+".join(sorted(products))


def operands(problem: str) -> tuple[str, ...]:
    """Equal for sums of the same numbers."""
    return tuple(sorted(problem.split(" + ")))


class Known(NamedTuple):
    """How a task's answers are computed again, what makes two of its problems alike, and the first
    problem of its training set and of each benchmark."""

    answer: Callable[[str], str]
    alike: Callable[[str], object]
    trained: str
    held_out: list[str]


KNOWN = {
    "tiny": Known(of_arithmetic, twin, "81+48", ["82+35", "53-47", "56*4", "22+2*2", "9*2-2*2"]),
    "tiny-long": Known(
        of_a_long_problem, str, "03+18-27j", ["45+25-34j", "61+78-94n", "85+63-97r"]
    ),
    "additions": Known(of_arithmetic, operands, "18 + 52", ["90 + 44"]),
    "step-sums": Known(of_arithmetic, operands, "12 + 7 + 19", ["19 + 12 + 12"]),
}


@pytest.fixture(params=KNOWN)
def name(request) -> str:
    return request.param


def test_every_task_is_known():
    assert set(TASKS) == set(KNOWN)
    assert len({problem for task in TASKS.values() for problem in task.benchmarks}) == 10
    assert TASKS["tiny"].benchmarks == problems.BENCHMARKS


def test_every_answer_is_what_python_computes_and_no_problem_occurs_twice(name):
    task, known = TASKS[name], KNOWN[name]
    sets = [task.train_problems(0), *map(task.benchmark_problems, task.benchmarks)]
    for rows in sets:
        assert len(rows) == len({row["problem_id"] for row in rows}) >= 100
        for row in rows:
            assert set(row) == {"problem", "answer", "benchmark", "problem_id"}
            assert row["answer"] == known.answer(row["problem"])
            assert row["problem_id"] == f"{row['benchmark']}:{row['problem']}"


@pytest.mark.parametrize("seed", [0, 42])
def test_no_training_problem_is_like_a_held_out_one(name, seed):
    task, alike = TASKS[name], KNOWN[name].alike
    held_out = [row for each in task.benchmarks for row in task.benchmark_problems(each)]
    seen = {alike(row["problem"]) for row in held_out}
    assert not seen & {alike(row["problem"]) for row in task.train_problems(seed)}


def test_the_problems_of_the_base_s_warm_up_are_not_held_out_ones_either():
    for name in problems.BENCHMARKS:
        held_out = {twin(row["problem"]) for row in benchmark_problems(name)}
        pool = {twin(problem_row(name, each)["problem"]) for each in operand_pool(name)}
        assert len(pool) >= problems.TRAIN_PROBLEMS / 2 and not held_out & pool


def test_a_drawn_long_problem_that_is_held_out_is_drawn_again(monkeypatch):
    draw = partial(long_problems.draw_operands, "tiny_long_14")
    first = draw(generator("x", 0, "train"))
    monkeypatch.setattr(long_problems, "_held_out", lambda name: {first: None})
    assert draw(generator("x", 0, "train")) != first


def test_problems_are_the_same_on_every_machine_and_follow_the_seed(name):
    task, known = TASKS[name], KNOWN[name]
    assert task.train_problems(0)[0]["problem"] == known.trained
    first = [task.benchmark_problems(each)[0]["problem"] for each in task.benchmarks]
    assert first == known.held_out
    assert task.train_problems(3) == task.train_problems(3) != task.train_problems(4)


def test_no_problem_is_like_an_example_of_its_recipe():
    template = load_recipe("smollm2").prompts.user_template
    examples = template[: template.index("{problem}")]
    shown = {operands(each) for each in re.findall(r"^(\d+ \+ \d+) =", examples, re.MULTILINE)}
    assert len(shown) >= 2
    rows = text_problems.train_problems("additions") + benchmark_problems("additions")
    assert not shown & {operands(row["problem"]) for row in rows}


def test_an_unknown_benchmark_is_refused_with_the_names_that_are_allowed():
    with pytest.raises(ValueError, match=r"'tiny_div'.*tiny_add"):
        benchmark_problems("tiny_div")


@pytest.mark.parametrize(
    "completion, score",
    [(" 83 + 41 = 124\n", 1.0), (" 83+41", 0.0), (" 1240\n", 0.0), (" -124\n", 0.0), ("\n", 0.0)],
)
def test_the_last_number_is_the_answer_and_the_problem_is_not(completion, score):
    assert last_number(completion, "124") == score
