"""What the problems of both tiny tasks have in common."""

import pytest

from grpo_replay.tiny import TASKS, benchmark_problems, long_problems, problems, text_problems

FIRST_TRAINED = {
    problems: ["81+48", "23*8", "5*8-9*4"],
    long_problems: ["03+18-27j", "43+31-92r", "16+48-29j"],
}
FIRST_HELD_OUT = {
    problems: ["82+35", "53-47", "56*4", "22+2*2", "9*2-2*2"],
    long_problems: ["45+25-34j", "61+78-94n", "85+63-97r"],
}

both = pytest.mark.parametrize("task", [problems, long_problems], ids=["tiny", "tiny-long"])


@both
def test_rows_hold_strings_and_an_id_made_of_benchmark_and_problem(task):
    held_out = [row for name in task.BENCHMARKS for row in task.benchmark_problems(name)]
    for row in task.train_problems() + held_out:
        assert set(row) == {"problem", "answer", "benchmark", "problem_id"}
        assert all(isinstance(value, str) for value in row.values())
        assert row["problem_id"] == f"{row['benchmark']}:{row['problem']}"


@both
def test_the_seed_decides_the_training_problems_and_nothing_else_does(task):
    assert task.train_problems(3) == task.train_problems(3)
    assert task.train_problems(3) != task.train_problems(4)
    assert task.train_problems() == task.train_problems(0)


@both
def test_problems_are_the_same_on_every_machine_and_in_every_release(task):
    assert [row["problem"] for row in task.train_problems()[:3]] == FIRST_TRAINED[task]
    first = [task.benchmark_problems(name)[0]["problem"] for name in task.BENCHMARKS]
    assert first == FIRST_HELD_OUT[task]


def test_an_unknown_benchmark_is_refused_with_the_names_that_are_allowed():
    with pytest.raises(ValueError, match=r"'tiny_div'; allowed: tiny_add, .*, word_problems$"):
        benchmark_problems("tiny_div")


def test_every_task_names_the_benchmarks_that_its_module_makes():
    named = {name: task.benchmarks for name, task in TASKS.items()}
    of_text = {name.replace("_", "-"): (name,) for name in text_problems.TASKS}
    assert named == {
        "tiny": problems.BENCHMARKS, "tiny-long": long_problems.BENCHMARKS, **of_text,
    }  # fmt: skip
    for task in TASKS.values():
        for name in task.benchmarks:
            assert {row["benchmark"] for row in task.benchmark_problems(name)} == {name}
        assert {row["benchmark"] for row in task.train_problems(1)} == set(task.benchmarks)
