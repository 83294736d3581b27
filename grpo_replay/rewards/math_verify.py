"""The verifiers that use math-verify, with its default extractor on both sides (paper A,
evaluation).

`math_verify_boxed` takes the last box of the trailing 500 characters for the prediction,
`math_verify` the whole completion. Gold answer and prediction are each wrapped in a math
environment if they are not in one, parsed, and compared with `verify(gold, prediction)`, in that
order; the raw strings are compared if either fails to parse. Nothing here decides a verdict that
math-verify would decide otherwise: it is asked less often, because equal LaTeX is parsed once and
equal pairs are compared once, and it takes less time (`two_stage`, `difference`). What differs is
what math-verify gives up: a formula that exhausts its stack or its five seconds may be judged here.
Runs in the main thread of a worker, where math-verify's own five-second alarms work.
"""

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import math_verify
import math_verify.grader
import math_verify.parser

from grpo_replay.rewards import two_stage
from grpo_replay.rewards.boxes import boxed_answer
from grpo_replay.rewards.difference import simplify_unless_not_zero

REMEMBERED = 20_000
"""Parsed LaTeX strings, and compared pairs, that a worker remembers."""

STARVED_SECONDS = 2.5
"""An alarm of five seconds that left a worker less processor time than this is tried again."""

_ENVIRONMENT = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed\{")
"""What opens a math environment for math-verify: $, \\(, \\[ and \\boxed{."""


def in_environment(text: str) -> str:
    """`text`, wrapped in $…$ if nothing in it opens a math environment."""
    return text if _ENVIRONMENT.search(text) else f"${text}$"


class _Troubles(logging.Handler):
    """Remembers what math-verify swallows: time-outs and exhausted memory."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.clear()

    def clear(self) -> None:
        self.timed_out = False
        self.out_of_memory = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING and str(record.msg).startswith("Timeout during"):
            self.timed_out = True
        if record.exc_info and isinstance(record.exc_info[1], MemoryError):
            self.out_of_memory = True

    def __bool__(self) -> bool:
        return self.timed_out or self.out_of_memory


class SymbolicGrader:
    """math-verify that remembers what it parsed and compared, and that wastes less time. One per
    process: what it changes in math-verify's modules holds for all of it.

    With `boxed`, the prediction is `boxed_answer(completion)`, and a completion without one is
    unparsable; otherwise it is the whole completion.
    """

    def __init__(self, boxed: bool = False) -> None:
        self._boxed = boxed
        self._troubles = _Troubles()
        logger = logging.getLogger("math_verify")
        logger.addHandler(self._troubles)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        _enlarge_latex_cache()
        two_stage.install()
        math_verify.grader.simplify = simplify_unless_not_zero
        self._parse_gold = lru_cache(maxsize=REMEMBERED)(_parse)
        self._compared: OrderedDict[tuple[Any, ...], tuple[list[Any], bool]] = OrderedDict()

    def grade(self, completion: str, answer: str) -> tuple[str, bool]:
        """The status of a verdict, and whether the gold answer could be parsed."""
        started = time.process_time()
        verdict = self._grade(completion, answer)
        # math-verify's alarms go by the clock on the wall. One that rang while other programs had
        # the processor says nothing about the answer.
        if self._troubles.timed_out and time.process_time() - started < STARVED_SECONDS:
            verdict = self._grade(completion, answer)
        return verdict

    def _grade(self, completion: str, answer: str) -> tuple[str, bool]:
        self._troubles.clear()
        gold = self._parse_gold(answer)
        if self._troubles:  # an answer that could not be parsed in time may be the next time
            self._parse_gold.cache_clear()
        operand = boxed_answer(completion) if self._boxed else completion
        if operand is None:
            return "unparsable", bool(gold)
        prediction = _parse(operand)
        if gold and prediction:
            correct = self._verify(answer, gold, prediction)
        else:
            correct = operand == answer
        return self._status(correct, bool(prediction)), bool(gold)

    def _verify(self, answer: str, gold: list[Any], prediction: list[Any]) -> bool:
        # Parsed LaTeX is remembered, so equal LaTeX is the same object; an object is its own key,
        # and the entry keeps it alive. What is merely equal is compared again.
        key = (answer, *(part if isinstance(part, str) else id(part) for part in prediction))
        known = self._compared.get(key)
        if known is not None:
            return known[1]
        correct = math_verify.verify(gold, prediction)
        if not self._troubles:
            self._compared[key] = (prediction, correct)
            if len(self._compared) > REMEMBERED:
                self._compared.popitem(last=False)
        return correct

    def _status(self, correct: bool, parsed: bool) -> str:
        if correct:
            return "correct"
        if self._troubles.out_of_memory:
            return "memory"
        if self._troubles.timed_out:
            return "timeout"
        return "incorrect" if parsed else "unparsable"


def _parse(text: str) -> list[Any]:
    return math_verify.parse(in_environment(text))


def _enlarge_latex_cache() -> None:
    """Let math-verify remember `REMEMBERED` parsed LaTeX strings instead of 20."""
    cached = math_verify.parser.parse_latex_cached
    uncached: Callable[[str], Any] = cached.__wrapped__
    if cached.cache_parameters()["maxsize"] != REMEMBERED:
        math_verify.parser.parse_latex_cached = lru_cache(maxsize=REMEMBERED)(uncached)
