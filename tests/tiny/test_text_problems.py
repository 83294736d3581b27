"""Problems for a language model: right answers, apart from each other, the same everywhere."""

import re

import pytest

from grpo_replay.recipe import load_recipe
from grpo_replay.tiny.text_problems import (
    HELD_OUT_PROBLEMS,
    TASKS,
    TRAIN_PROBLEMS,
    benchmark_problems,
    last_number,
    train_problems,
)

RECIPES = {"additions": "smollm2"}
EXAMPLE = {"additions": r"^(\d+ \+ \d+) ="}
"""The problems among the examples of a prompt."""
OPERATIONS = {"more": "+", "away": "-", "takes": "-", "each": "*"}
FIRST = {
    "additions": ("18 + 52", "90 + 44"),
    "step_sums": ("12 + 7 + 19", "19 + 12 + 12"),
    "word_problems": (
        "Grace has 58 marbles. Grace buys 8 more. How many marbles does Grace have now?",
        "Cara has 31 stamps. Cara gives away 10. How many stamps does Cara have left?",
    ),
}

every_task = pytest.mark.parametrize("name", TASKS)


def expression(problem: str) -> str:
    """The problem as Python computes it: itself, or made of the numbers and words of its story."""
    if "?" not in problem:
        return problem
    (operation,) = {sign for word, sign in OPERATIONS.items() if word in problem}
    return operation.join(re.findall(r"\d+", problem))


def operands(problem: str) -> tuple[str, ...]:
    """Equal for problems with the same numbers and the same operation."""
    text = expression(problem)
    (sign,) = set(re.findall(r"[-+*]", text))
    return (sign, *sorted(re.findall(r"\d+", text)))


@every_task
def test_every_answer_is_what_python_computes(name):
    rows = train_problems(name) + benchmark_problems(name)
    assert len(rows) == len({row["problem_id"] for row in rows}) == 2700
    assert (TRAIN_PROBLEMS, HELD_OUT_PROBLEMS) == (2500, 200)
    for row in rows:
        assert row["answer"] == str(eval(expression(row["problem"])))
        assert row["problem_id"] == f"{name}:{row['problem']}"
        assert row["benchmark"] == name


@every_task
@pytest.mark.parametrize("seed", [0, 42])
def test_no_training_problem_has_the_operands_of_a_held_out_one(name, seed):
    held_out = {operands(row["problem"]) for row in benchmark_problems(name)}
    assert not held_out & {operands(row["problem"]) for row in train_problems(name, seed)}


@pytest.mark.parametrize("name", RECIPES)
def test_no_problem_has_the_operands_of_an_example_of_its_recipe(name):
    template = load_recipe(RECIPES[name]).prompts.user_template
    examples = template[: template.index("{problem}")]
    shown = {operands(each) for each in re.findall(EXAMPLE[name], examples, re.MULTILINE)}
    assert len(shown) >= 2
    rows = train_problems(name) + benchmark_problems(name)
    assert not shown & {operands(row["problem"]) for row in rows}


@every_task
def test_problems_are_the_same_on_every_machine_and_follow_the_seed(name):
    assert (train_problems(name)[0]["problem"], benchmark_problems(name)[0]["problem"]) == (
        FIRST[name]
    )
    assert train_problems(name, 3) == train_problems(name, 3) != train_problems(name, 4)


@pytest.mark.parametrize(
    "completion, score",
    [
        (" 124\n", 1.0),
        (" 83 + 41 = 124\n", 1.0),
        (" 83+41", 0.0),
        (" 1240\n", 0.0),
        (" -124\n", 0.0),
        (" 124 or 125\n", 0.0),
        ("\n", 0.0),
    ],
)
def test_the_last_number_is_the_answer_and_the_problem_is_not(completion, score):
    assert last_number(completion, "124") == score
