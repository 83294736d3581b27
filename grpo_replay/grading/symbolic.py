"""The `math_verify` verifier: math-verify's default extractor on both sides (paper A, evaluation).

Gold answer and prediction are each wrapped in a math environment if they are not in one, parsed,
and compared with `verify(gold, prediction)`, in that order; the raw strings are compared if either
fails to parse. Nothing here changes a verdict of math-verify: it is only asked less often. Runs in
the main thread of a worker, where math-verify's own five-second alarms work.
"""

import logging
import re
from functools import lru_cache
from typing import Any

import math_verify

_ENVIRONMENT = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed\{")
"""What opens a math environment for math-verify: $, \\(, \\[ and \\boxed{."""


def in_environment(text: str) -> str:
    """`text`, wrapped in $…$ if nothing in it opens a math environment."""
    return text if _ENVIRONMENT.search(text) else f"${text}$"


class _Troubles(logging.Handler):
    """Remembers what math-verify swallows: time-outs and exhausted memory."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.timed_out = False
        self.out_of_memory = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING and str(record.msg).startswith("Timeout during"):
            self.timed_out = True
        if record.exc_info and isinstance(record.exc_info[1], MemoryError):
            self.out_of_memory = True


class SymbolicGrader:
    """math-verify with parsed gold answers remembered."""

    def __init__(self) -> None:
        self._troubles = _Troubles()
        logger = logging.getLogger("math_verify")
        logger.addHandler(self._troubles)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False

    def grade(self, completion: str, answer: str) -> tuple[str, bool]:
        """The status of a verdict, and whether the gold answer could be parsed."""
        self._troubles.timed_out = self._troubles.out_of_memory = False
        gold = _parse_gold(answer)
        prediction = math_verify.parse(in_environment(completion))
        if gold and prediction:
            correct = math_verify.verify(list(gold), prediction)
        else:
            correct = completion == answer
        return self._status(correct, bool(prediction)), bool(gold)

    def _status(self, correct: bool, parsed: bool) -> str:
        if correct:
            return "correct"
        if self._troubles.out_of_memory:
            return "memory"
        if self._troubles.timed_out:
            return "timeout"
        return "incorrect" if parsed else "unparsable"


@lru_cache(maxsize=4096)
def _parse_gold(answer: str) -> tuple[Any, ...]:
    return tuple(math_verify.parse(in_environment(answer)))
