"""The `math_verify` verifier returns math-verify's verdicts with fewer calls."""

import json
import logging
import random
import subprocess
import sys

import math_verify
import pytest

from grpo_replay.rewards.math_verify import SymbolicGrader, in_environment, is_too_expensive

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


DIRECT_CALLS = """
import json, sys
import math_verify
from grpo_replay.rewards.math_verify import in_environment

def directly(completion, answer):
    gold = math_verify.parse(in_environment(answer))
    prediction = math_verify.parse(in_environment(completion))
    return math_verify.verify(gold, prediction) if gold and prediction else completion == answer

print(json.dumps([directly(*pair) for pair in json.load(sys.stdin)]))
"""


def directly(pairs: list[tuple[str, str]]) -> list[bool]:
    """Verdicts of math-verify itself, in a process where its caches are unchanged."""
    program = [sys.executable, "-c", DIRECT_CALLS]
    text = subprocess.run(
        program, input=json.dumps(pairs), capture_output=True, text=True, check=True
    ).stdout
    return json.loads(text)


@pytest.mark.slow
def test_verdicts_equal_those_of_direct_calls_in_any_order(grader):
    pairs = [(frame.format(a), b) for frame in FRAMES for a in PIECES for b in PIECES]
    random.Random(0).shuffle(pairs)
    pairs = pairs[:700]
    ours = [grader.grade(*pair)[0] == "correct" for pair in pairs + pairs[::-1]]
    expected = directly(pairs)
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
def test_bare_text_is_wrapped_in_a_math_environment(text, wrapped):
    assert in_environment(text) == wrapped


def test_statuses_distinguish_wrong_from_missing_answers(grader):
    assert grader.grade("\\boxed{57}", "57") == ("correct", True)
    assert grader.grade("\\boxed{58}", "57") == ("incorrect", True)
    assert grader.grade("", "57") == ("unparsable", True)
    assert grader.grade("", "") == ("correct", False)  # raw text decides where nothing parses


def test_a_timeout_of_a_worker_without_processor_time_is_retried(monkeypatch):
    """math-verify's alarm uses wall time; here the process used no processor time."""
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


def test_a_comparison_that_timed_out_is_not_remembered(monkeypatch):
    original, calls = math_verify.verify, []

    def late_at_first(*pair):
        calls.append(pair)
        if len(calls) == 1:
            logging.getLogger("math_verify.grader").warning("Timeout during comparison")
            return False
        return original(*pair)

    monkeypatch.setattr(math_verify, "verify", late_at_first)
    assert SymbolicGrader().grade("\\boxed{57}", "57") == ("correct", True)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "answer",
    [
        "9999999999^{9999999999^{99999}}", "10^{10^{10}}", "{9}^{{9}^{{9}^{9}}}",
        "2^{100{,}000{,}000}", "15!!", "(10!)!", "300000!", "10^{50!}",
        "(" * 13 + "1" + ")" * 13, "a" * 10_001,
    ],
)  # fmt: skip
def test_what_math_verify_would_work_on_without_end_is_not_given_to_it(grader, answer, monkeypatch):
    assert is_too_expensive(answer)
    monkeypatch.setattr("math_verify.parse", lambda *_: pytest.fail("parsed"))
    grader._parse_gold.cache_clear()
    assert grader.grade(f"so \\boxed{{{answer}}}", answer) == ("unparsable", False)


def test_what_a_completion_says_beside_its_last_box_may_cost_anything(grader):
    completion = "Of course $10^{10^{10}}$ is far too large, so the answer is $\\boxed{57}$."
    assert is_too_expensive(completion)
    assert grader.grade(completion, "57") == ("correct", True)


@pytest.mark.parametrize(
    "answer",
    [
        "2^{2^{2^2}}", "2^{999999999^{0}}", "10^{30000}", "2^{1000000}", "20!", "2^{10!}",
        "\\frac{1}{2}^{3}", "1,000,000",
        "x^{2023}+1", "\\left(\\frac{1}{2}\\right)^{100}", "0^{999999999999}", "1^{99999999999}",
        "2^{3}^{4}", "(((x+1)(x+2))+3)", *PIECES,
    ],
)  # fmt: skip
def test_ordinary_answers_are_not_too_expensive(answer):
    assert not is_too_expensive(answer)
