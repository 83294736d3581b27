"""The `math_verify` verifier says what math-verify says, only with fewer questions."""

import logging
import random

import math_verify
import pytest
from sympy import Rational, Symbol

from grpo_replay.grading.symbolic import SymbolicGrader, _obvious, in_environment

PIECES = [
    *(
        "57",
        "-3",
        "0",
        "0.5",
        "50\\%",
        "1,000",
        "1000",
        "\\frac{1}{2}",
        "\\frac12",
        "1/2",
        "0.333333",
    ),
    *("\\sqrt{8}", "2\\sqrt{2}", "x+1", "1+x", "x=5", "5", "(1,2)", "[1,2]", "\\{1,2\\}", "1,2"),
    *("\\text{Evelyn}", "Evelyn", "", "(", "\\frac{1}{0}", "\\pi", "3.14159265", "90^\\circ", "90"),
    *("10^{30}", "10^{30}+1", "x^2-1", "(x-1)(x+1)", "\\infty", "a\\le b", "nan", "-\\frac{11}{2}"),
]
FRAMES = ["{}", "\\boxed{{{}}}", "so $x = {}$.", "The answer is {}", "Thus $\\boxed{{{}}}$ cm."]


@pytest.fixture(scope="module")
def grader():
    return SymbolicGrader()


def directly(completion: str, answer: str) -> bool:
    gold = math_verify.parse(in_environment(answer))
    prediction = math_verify.parse(in_environment(completion))
    return math_verify.verify(gold, prediction) if gold and prediction else completion == answer


def test_every_verdict_is_that_of_a_direct_call_in_any_order(grader):
    pairs = [(frame.format(a), b) for frame in FRAMES for a in PIECES for b in PIECES]
    random.Random(0).shuffle(pairs)
    pairs = pairs[:700]
    ours = [grader.grade(*pair)[0] == "correct" for pair in pairs + pairs[::-1]]
    expected = [directly(*pair) for pair in pairs]
    assert ours == expected + expected[::-1]
    assert 20 < sum(expected) < 300


@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("57", "$57$"),
        ("\\frac{1}{2}", "$\\frac{1}{2}$"),
        ("\\$18.90", "$\\$18.90$"),  # an escaped dollar opens nothing
        ("$57$", "$57$"),
        ("so \\boxed{57}", "so \\boxed{57}"),
        ("\\(57\\)", "\\(57\\)"),
        ("\\[57\\]", "\\[57\\]"),
    ],
)
def test_bare_text_is_put_into_a_math_environment(text, wrapped):
    assert in_environment(text) == wrapped


def test_statuses_tell_wrong_from_missing(grader):
    assert grader.grade("\\boxed{57}", "57") == ("correct", True)
    assert grader.grade("\\boxed{58}", "57") == ("incorrect", True)
    assert grader.grade("", "57") == ("unparsable", True)
    assert grader.grade("", "") == ("correct", False)  # raw text decides where nothing parses


def test_gold_is_the_first_argument(grader):
    """x=1 asked for 1 is accepted, 1 asked for x=1 as well, but 2x+z=1 is not 1."""
    for completion, answer in (
        ("$x=1$", "1"),
        ("$1$", "x=1"),
        ("$1$", "2x+z=1"),
        ("$2x+z=1$", "1"),
    ):
        assert (grader.grade(completion, answer)[0] == "correct") == directly(completion, answer)
    assert directly("$2x+z=1$", "1") != directly("$1$", "2x+z=1")


@pytest.mark.parametrize(
    ("gold", "prediction", "verdict"),
    [
        (["57", Rational(57)], [Rational(57), "57.0"], True),
        ([Rational(1, 2), "a"], [Rational(2, 4), "b"], True),
        ([Rational(10**30), "a"], [Rational(10**30 + 1), "b"], False),
        ([Symbol("x"), "x"], [Symbol("y"), " x "], True),
        ([Symbol("x"), "x"], [Symbol("y"), "y"], None),
        (["", Symbol("x")], ["", Symbol("y")], None),
        (["a"], ["b"], False),
    ],
)
def test_what_is_obvious_is_what_verify_says(gold, prediction, verdict):
    assert _obvious(gold, prediction) is verdict
    if verdict is not None:
        assert math_verify.verify(gold, prediction) is verdict


def test_an_alarm_that_rang_while_the_worker_was_starved_is_not_the_answers_fault(monkeypatch):
    """math-verify's alarm rings by the wall clock; the process used no time of its own."""
    original, calls = math_verify.parse, []

    def starved_at_first(text, **options):
        calls.append(text)
        if len(calls) <= 2:  # gold and prediction of the first try
            logging.getLogger("math_verify.parser").warning(f"Timeout during parsing: {text}")
            return []
        return original(text, **options)

    monkeypatch.setattr(math_verify, "parse", starved_at_first)
    assert SymbolicGrader().grade("\\boxed{57}", "57") == ("correct", True)
    assert len(calls) == 4
