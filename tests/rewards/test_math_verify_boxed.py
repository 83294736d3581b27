"""The `math_verify_boxed` verifier: math-verify on the last box of the last 500 characters."""

import pytest

from grpo_replay.recipe import RewardSection
from grpo_replay.rewards.math_verify import SymbolicGrader
from grpo_replay.rewards.scorer import RewardScorer

FAR = "We check the result once more. " * 17  # 527 characters


@pytest.fixture(scope="module")
def scorers():
    with (
        RewardScorer.open(RewardSection(function="math_verify_boxed", workers=1)) as boxed,
        RewardScorer.open(RewardSection(function="math_verify", workers=1)) as whole,
    ):
        yield boxed, whole


@pytest.mark.parametrize(
    ("completion", "answer", "boxed", "whole"),
    [
        # The three of paper A's rule that a whole-completion reading gets wrong:
        ("The answer is 5.", "5", "unparsable", "correct"),
        ("so we get $x = 5$ and then we", "5", "unparsable", "correct"),
        ("\\boxed{5} " + FAR, "5", "unparsable", "correct"),
        # What is in the box is parsed, not compared as text:
        ("so \\boxed{0.5}", "\\frac{1}{2}", "correct", "correct"),
        ("so $\\boxed{\\frac{10}{20}}$.", "1/2", "correct", "correct"),
        ("so \\boxed{$7$}", "7", "correct", "correct"),
        # The last of several boxes decides:
        ("\\boxed{4} is wrong. It is \\boxed{5}", "5", "correct", "correct"),
        ("\\boxed{4}, or rather \\boxed{5}", "5", "correct", "incorrect"),  # read as a pair
        ("\\boxed{5}, or rather \\boxed{4}", "5", "incorrect", "incorrect"),
        ("\\boxed{5}, or rather \\boxed{4", "5", "unparsable", "correct"),
        ("\\boxed{5} " + FAR + "\\boxed{4}", "5", "incorrect", "incorrect"),
        # An operand that does not parse is compared as it stands:
        ("so \\boxed{}", "5", "unparsable", "unparsable"),
        ("so \\boxed{}", "", "correct", "unparsable"),
        ("", "5", "unparsable", "unparsable"),
    ],
)
def test_verdicts_of_the_last_box_and_of_the_whole_completion(
    scorers, completion, answer, boxed, whole
):
    found = [scorer.score([(completion, answer, None)])[0] for scorer in scorers]
    assert [verdict.status for verdict in found] == [boxed, whole]
    assert [verdict.reward for verdict in found] == [
        1.0 if status == "correct" else -1.0 for status in (boxed, whole)
    ]


def test_a_box_must_lie_entirely_within_the_last_500_characters():
    grader = SymbolicGrader(boxed=True)
    for length, status in ((491, "correct"), (492, "unparsable")):
        completion = "so \\boxed{5}" + "." * length  # the box has 9 characters
        assert grader.grade(completion, "5") == (status, True)


def test_an_unparsable_reference_answer_is_reported_with_and_without_a_box():
    grader = SymbolicGrader(boxed=True)
    assert grader.grade("no box", "")[1] is grader.grade("\\boxed{5}", "")[1] is False
