"""Which cases of a parametrised test the default suite runs; `pytest -m slow` runs the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize` (tuples for several arguments), those that are not in `quick`
    marked slow."""
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    assert not unknown, f"{unknown}: not among the cases {cases}"
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
