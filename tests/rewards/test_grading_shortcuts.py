"""The verifier's two shortcuts never say what the long way would not."""

import re
import subprocess
import sys

import math_verify.grader
import pytest
import sympy
from antlr4.atn.PredictionMode import PredictionMode
from hypothesis import given, settings
from hypothesis import strategies as st
from latex2sympy2_extended.antlr_parser import PSParser

from grpo_replay.rewards import two_stage
from grpo_replay.rewards.difference import not_zero_at_a_point, simplify_unless_not_zero
from grpo_replay.rewards.math_verify import SymbolicGrader

x, y = sympy.Symbol("x", real=True), sympy.Symbol("y")
whole = sympy.Symbol("n", integer=True)
matrix = sympy.MatrixSymbol("M", 2, 2)


@pytest.mark.parametrize(
    "expression",
    [
        sympy.Integer(3) - 2 * sympy.sqrt(2),
        x - y,
        x * y - 2,
        sympy.log(3, 2) - sympy.Rational(8, 5),
        sympy.Mul(*sympy.symbols("a:z"), sympy.E, evaluate=False) - 27648,
        sympy.sqrt(x**2) + x,  # zero for x < 0 only
        (x - 1) * (x - 2),  # zero at two points
        sympy.I * x - 1,
        sympy.Rational(1, 10**20),
        sympy.tan(1) - sympy.Rational(3, 2),
        sympy.exp(sympy.I * x) - 1,
    ],
)
def test_what_has_another_value_at_a_point_is_not_zero(expression):
    assert not_zero_at_a_point(expression)
    assert simplify_unless_not_zero(expression) == 1
    assert not sympy.simplify(expression).is_zero


@pytest.mark.parametrize(
    "expression",
    [
        sympy.Integer(0),
        sympy.sin(x) ** 2 + sympy.cos(x) ** 2 - 1,
        (x - 1) * (x + 1) - x**2 + 1,
        sympy.sqrt(3 - 2 * sympy.sqrt(2)) - sympy.sqrt(2) + 1,
        sympy.log(x**2) - 2 * sympy.log(sympy.Abs(x)),
        sympy.sqrt(x**2) - sympy.Abs(x),
        sympy.Rational(1, 10) * 2**40 - sympy.Float("0.1") * 2**40,  # simplify reads 1/10
        sympy.Float("0.5"),
        x**400 - (x**200) ** 2,
        (x**30 + 1) ** 2 - x**60 - 2 * x**30 - 1,
        sympy.cos(10**15 * sympy.pi) - 1,
        sympy.sqrt(-x) - sympy.I * sympy.sqrt(x),  # on the branch cut
        sympy.sqrt((-x) ** 2 - 2 * x**2) - sympy.I * x,
        sympy.log(-x) - sympy.log(x) - sympy.I * sympy.pi,
        (x + sympy.I) ** sympy.Rational(-3, 2)
        - sympy.radsimp((x + sympy.I) ** sympy.Rational(-3, 2)),
        sympy.exp(x) ** 700 - sympy.exp(700 * x),  # no double holds it
        sympy.sin(x**1000000),  # would take a minute in full precision
        sympy.exp(sympy.exp(x**100000)),
        (x**10000000 + 1) ** 10000000,
        1 / (sympy.sin(x) ** 2 + sympy.cos(x) ** 2 - 1),
        # Zero for the numbers that its symbol stands for, and for no others.
        sympy.sin(sympy.pi * whole, evaluate=False),
        sympy.nan,
        sympy.zoo,
        sympy.oo,
        sympy.Integer(10) ** 400,  # no double
        sympy.Function("f")(x) - 1,
        sympy.Integral(x, x) - 1,
        matrix - sympy.eye(2),
        sympy.Matrix([[1, 2]]),
        "a text",
    ],
)
def test_what_cannot_be_told_is_left_to_sympy(expression):
    assert not not_zero_at_a_point(expression)


leaves = st.sampled_from([x, y, sympy.pi, sympy.E, sympy.I, *map(sympy.Integer, range(-3, 4))])
expressions = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.builds(lambda a, b: a + b, parts, parts),
        st.builds(lambda a, b: a * b, parts, parts),
        st.builds(lambda a, n: (a + 1) ** n, parts, st.sampled_from([2, 3, -1, sympy.S.Half])),
        st.builds(lambda f, a: f(a), st.sampled_from([sympy.sin, sympy.exp, sympy.Abs]), parts),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(expressions, st.sampled_from([sympy.expand, sympy.factor, sympy.together, sympy.trigsimp]))
def test_one_expression_written_in_two_ways_is_never_told_apart(expression, rewrite):
    if not expression.has(sympy.nan, sympy.zoo, sympy.oo):
        assert not not_zero_at_a_point(expression - rewrite(expression))


def test_math_verify_simplifies_in_the_one_place_that_the_shortcut_replaces():
    """A version of math-verify that simplifies elsewhere, or looks at more, needs another look."""
    with open(math_verify.grader.__file__, encoding="utf-8") as file:
        calls = [line.strip() for line in file if re.search(r"\bsimplify\(", line)]
    assert calls == ["a_b_diff = simplify((a - b))  # type: ignore"]
    SymbolicGrader()
    assert math_verify.grader.simplify is simplify_unless_not_zero


FORMULAS = [
    *(
        "57",
        "-\\frac{11}{2}",
        "2\\frac{1}{3}",
        "12,345",
        "(1,-2)",
        "[0,1)",
        "\\{1,2\\pm\\sqrt{3}\\}",
    ),
    *("(-\\infty,-1)\\cup(2,\\infty)", "x=1,y=-2", "0<(x+1)^2<9", "|x-2|+|3x+1|", "e^{i\\pi}"),
    *("\\log_2{3}\\cdot\\log_3{4}=\\frac{\\log 4}{\\log 2}", "\\sin^2\\frac{\\theta}{2}", "5!"),
    *("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\int_0^1 x^2\\,dx", "13 \\pmod{17}", "asy"),
    *("a_1+a_2+\\dots+a_n", "A and B, or C", "\\frac{-1\\pm\\sqrt{5}}{2}", "\\frac{1}{", "(", ""),
    *("The sum of the first", "3x=", "x^", "\\sqrt", "1:2:3", "\\text{east}", "7\\text{ cm}^2"),
]
PARSE = """
import sys
from latex2sympy2_extended import latex2sympy
from sympy import srepr
if sys.argv[1] == "two stages":
    from grpo_replay.rewards import two_stage
    two_stage.install()
for text in sys.argv[2:]:
    try:
        print(text, "->", srepr(latex2sympy(text, is_real=True, normalization_config=None)))
    except Exception as error:
        print(text, "->", repr(error))
"""


def test_two_stages_find_the_tree_or_the_refusal_that_one_finds():
    outcomes = [
        subprocess.run(
            [sys.executable, "-c", PARSE, how, *FORMULAS],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for how in ("two stages", "one")
    ]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].count("Exception") in range(5, 15)


def test_full_prediction_is_asked_after_an_error_only(monkeypatch):
    modes = []

    def parse(parser):
        modes.append(parser._interp.predictionMode)
        return whole_rule(parser)

    whole_rule = two_stage._parse_ll
    monkeypatch.setattr(two_stage, "_parse_ll", parse)
    monkeypatch.setattr(PSParser, "math", two_stage._parse_in_two_stages)
    from latex2sympy2_extended import latex2sympy

    assert latex2sympy("1+2").doit() == 3
    assert modes == [PredictionMode.SLL]
    with pytest.raises(Exception, match="expected"):
        latex2sympy("1+")
    assert modes[1:] == [PredictionMode.SLL, PredictionMode.LL]
