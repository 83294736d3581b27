"""A quick proof that a difference is not zero, before sympy is asked to simplify it.

math-verify decides whether two expressions are the same by `simplify(gold - prediction)`, of which
it looks at nothing but whether it is zero. An exact difference that has another value at one point
cannot become zero by simplification, and a value costs far less to find. It is computed in double
precision with a bound on its error (first order, as in Higham 2002, "Accuracy and Stability of
Numerical Algorithms", chapter 3). Expressions with decimal fractions are left to sympy, which reads
0.1 as 1/10, not as the number that a double holds.
"""

import cmath
import math
import random
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import sympy
from sympy.core.numbers import NumberSymbol

CERTAIN = 1000.0
"""A value counts as other than zero if it is so many times as large as the bound on its error."""

_EPSILON = 4 * sys.float_info.epsilon
_LINEAR = 1e-3
"""Errors beyond this are not propagated: first order would not do."""


class _Value(NamedTuple):
    value: complex
    error: float  # bound on the absolute error

    @property
    def relative_error(self) -> float:
        return self.error / abs(self.value)


class _Unknown(Exception):
    """Cannot be told."""


def simplify_unless_not_zero(difference: Any) -> Any:
    """`sympy.simplify(difference)`; the number 1 instead where `difference` is plainly not zero."""
    return sympy.Integer(1) if not_zero_at_a_point(difference) else sympy.simplify(difference)


def not_zero_at_a_point(expression: Any) -> bool:
    """Whether an exact, elementary expression in real or complex symbols is other than zero where
    each symbol is some number between 1 and 2. False also where that cannot be told."""
    if not isinstance(expression, sympy.Expr):
        return False
    symbols = sorted(expression.free_symbols, key=str)
    if not all(_may_be_any_number(symbol) for symbol in symbols):
        return False
    point = {symbol: random.Random(index).uniform(1, 2) for index, symbol in enumerate(symbols)}
    try:
        value, error = _evaluate(expression, point)
    except (_Unknown, ArithmeticError, ValueError, RecursionError):
        return False
    return CERTAIN * error < abs(value) < math.inf


def _may_be_any_number(symbol: Any) -> bool:
    # sin(pi n) is zero for every integer n, and nowhere between.
    return symbol in (sympy.Symbol(symbol.name), sympy.Symbol(symbol.name, real=True))


def _evaluate(node: Any, point: Mapping[Any, float]) -> _Value:
    if node in point:
        return _Value(complex(point[node]), 0.0)
    if isinstance(node, sympy.Rational | NumberSymbol):
        value = float(node)
        return _Value(complex(value), _EPSILON * abs(value))
    if node is sympy.I:
        return _Value(1j, 0.0)
    parts = [_evaluate(part, point) for part in node.args]
    if type(node) is sympy.Pow:
        return _power(*parts, whole=bool(node.exp.is_Integer))
    if type(node) not in _RULES:
        raise _Unknown
    return _RULES[type(node)](*parts)


def _sum(*parts: _Value) -> _Value:
    size = sum(abs(part.value) for part in parts)
    error = sum(part.error for part in parts) + len(parts) * _EPSILON * size
    return _Value(sum(part.value for part in parts), error)


def _product(*parts: _Value) -> _Value:
    value = reduce(lambda product, part: product * part.value, parts, 1 + 0j)
    relative = sum(part.relative_error + _EPSILON for part in parts)
    return _Value(value, abs(value) * relative)


def _power(base: _Value, exponent: _Value, whole: bool) -> _Value:
    if not whole:
        _refuse_unless_positive(base)
    size = abs(cmath.log(base.value))
    relative = (
        abs(exponent.value) * base.relative_error
        + size * exponent.error
        + _EPSILON * (1 + abs(exponent.value) * size)
    )
    value = base.value**exponent.value
    return _Value(value, abs(value) * _small(relative))


def _exp(power: _Value) -> _Value:
    value = cmath.exp(power.value)
    return _Value(value, abs(value) * _small(power.error + _EPSILON * (1 + abs(power.value))))


def _log(number: _Value) -> _Value:
    _refuse_unless_positive(number)
    value = cmath.log(number.value)
    return _Value(value, _small(number.relative_error) + _EPSILON * (1 + abs(value)))


def _abs(number: _Value) -> _Value:
    return _Value(complex(abs(number.value)), number.error + _EPSILON * abs(number.value))


def _wave(function: Callable[[complex], complex]) -> Callable[[_Value], _Value]:
    def rule(angle: _Value) -> _Value:
        slope = math.exp(abs(angle.value.imag) + _LINEAR)  # at least that of sine and cosine
        return _Value(function(angle.value), slope * (_small(angle.error) + _EPSILON))

    return rule


def _tan(angle: _Value) -> _Value:
    sine, cosine = _RULES[sympy.sin](angle), _RULES[sympy.cos](angle)
    return _product(sine, _power(cosine, _Value(-1 + 0j, 0.0), whole=True))


def _refuse_unless_positive(number: _Value) -> None:
    """Roots and logarithms of other numbers have branches: on the cut a rounding error decides, and
    off it sympy's own rewriting is not always right (`radsimp` of (x + I)**(-3/2), sympy 1.14)."""
    if number.value.real <= number.error or abs(number.value.imag) > number.error:
        raise _Unknown


def _small(error: float) -> float:
    if not error < _LINEAR:
        raise _Unknown
    return error


_RULES: dict[Any, Callable[..., _Value]] = {
    sympy.Add: _sum,
    sympy.Mul: _product,
    sympy.exp: _exp,
    sympy.log: _log,
    sympy.Abs: _abs,
    sympy.sin: _wave(cmath.sin),
    sympy.cos: _wave(cmath.cos),
    sympy.tan: _tan,
}
