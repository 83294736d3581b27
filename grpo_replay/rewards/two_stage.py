"""Two-stage parsing of LaTeX: ANTLR's cheap SLL prediction first, full LL only if that fails.

ANTLR's own recipe: a parse that SLL finishes without a syntax error is the parse that LL finds, and
after an error LL decides (Parr, Harwell and Fisher 2014, "Adaptive LL(*) Parsing", section 3.3; the
documentation of `PredictionMode.SLL`). LL spends most of its time on predictions in full context.
SLL also needs less stack: a formula nested some 55 levels deep, at which LL runs into Python's
recursion limit and math-verify finds no answer, may be read here.
"""

from typing import Any

from antlr4 import CommonTokenStream
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended.antlr_parser import PSParser  # of the ANTLR that is installed

_parse_ll = PSParser.math


def install() -> None:
    """Let latex2sympy, and so math-verify, parse in two stages in this process."""
    PSParser.math = _parse_in_two_stages


def _parse_in_two_stages(parser: PSParser) -> Any:
    """The rule `math`, from the start of the parser's input. Its listener raises at any error."""
    parser._interp.predictionMode = PredictionMode.SLL
    try:
        return _parse_ll(parser)
    except Exception:
        _rewind(parser)
        parser._interp.predictionMode = PredictionMode.LL
        return _parse_ll(parser)


def _rewind(parser: PSParser) -> None:
    lexer = parser.getTokenStream().tokenSource
    lexer.reset()
    parser.setTokenStream(CommonTokenStream(lexer))
