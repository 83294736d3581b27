"""The report of a verification: checks, number of comparisons, failures."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_NAMED_FAILURES = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `checked` is the number of comparisons; with none the check has
    passed."""

    name: str
    passed: bool
    checked: int
    detail: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All checks of a run, in order, and what was not checked, one sentence each."""

    steps: int
    checks: tuple[Check, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object: `passed`, `steps`, `checks` and `unchecked`."""
        return {"passed": self.passed, **asdict(self)}


class Tally:
    """Counts the comparisons of one check and keeps the first failures."""

    def __init__(self, name: str, statement: str) -> None:
        self.name = name
        self.statement = statement
        self.checked = 0
        self.failed = 0
        self.notes: list[str] = []
        self._failures: list[str] = []

    def expect(self, holds: bool, failure: str) -> bool:
        """Count one comparison. Returns `holds`."""
        self.checked += 1
        if not holds:
            self.failed += 1
            if len(self._failures) < _NAMED_FAILURES:
                self._failures.append(failure)
        return bool(holds)

    def expect_all(self, holds_N: np.ndarray, failure: Callable[[int], str]) -> None:
        """Count N comparisons. `failure(i)` is the message for the i-th."""
        self.checked += len(holds_N)
        wrong = np.flatnonzero(~holds_N)
        self.failed += len(wrong)
        for i in wrong[: max(_NAMED_FAILURES - len(self._failures), 0)]:
            self._failures.append(failure(int(i)))

    def result(self) -> Check:
        detail = self.statement
        if self.failed:
            more = self.failed - len(self._failures)
            detail = "; ".join(self._failures) + (f"; and {more} more" if more else "")
        return Check(self.name, not self.failed, self.checked, "; ".join([detail, *self.notes]))
