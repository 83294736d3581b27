"""The `minerva` verifier: last box of the last 500 characters, normalised exact match."""

import pytest

from grpo_replay.rewards.minerva import grade, last_box, normalise


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{{a}{b}} and } more }", "{a}{b}"),
        (r"\boxed{}", ""),
        ("no box", None),
        (r"closed \boxed{1}, open \boxed{2", None),
        ("\\boxed{" * 20_000, None),
    ],
)
def test_the_last_box_is_found_by_matching_braces(text, box):
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("x = 5", "5"),  # what follows the last =
        (r"\frac12", r"\frac{1}{2}"),  # fraction shorthand
        (r"\sqrt3", r"\sqrt{3}"),  # root shorthand
        ("1,234,567", "1234567"),  # commas between digits
        ("(1,234)", "(1,234)"),  # but not of a pair
        (r"\$18.90", "18.90"),
        ("12 dollars", "12"),  # unit words
        (r"10\text{ cm}", "10"),
        (r"90^\circ", "90"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"$7$", "7"),
        (r"\mbox{odd}", "odd"),
        (r"3\; 4", "34"),
        ("an apple", "apple"),
    ],
)
def test_answers_are_normalised_as_minerva_does(answer, form):
    assert normalise(answer) == form


def test_a_box_counts_only_within_the_last_500_characters():
    box = r"\boxed{7}"
    assert grade(box + "x" * (500 - len(box)), "7") == "correct"
    assert grade(box + "x" * (501 - len(box)), "7") == "unparsable"


def test_text_is_compared_and_not_value():
    assert grade(r"so \boxed{\frac12}", r"\frac{1}{2}") == "correct"
    assert grade(r"so \boxed{1/2}", r"\frac{1}{2}") == "incorrect"
    assert grade("the answer is 7", "7") == "unparsable"
