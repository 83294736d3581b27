"""The verifiers built on math-verify and its default extractor (paper A, evaluation).

`math_verify_boxed` grades the last box of the trailing 500 characters, `math_verify` the whole
completion. The reference answer and the graded text are each wrapped in a math environment unless
they contain one, parsed, and compared with `verify(gold, prediction)`, in that order. If either
does not parse, or would take math-verify until its time-out, the raw strings are compared. Every
other verdict is math-verify's own; each LaTeX string is parsed once and each pair is compared once.
Runs in the main thread of a worker, because math-verify's five-second alarms work only there.
"""

import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import math_verify
import math_verify.parser

from grpo_replay.rewards.minerva import boxed_answer, last_box

REMEMBERED = 2_000
"""Number of parsed LaTeX strings, and of compared pairs, that a worker caches: more than the
different answers that it gets in a step."""

STARVED_SECONDS = 2.5
"""A timeout is retried if the worker got less processor time than this before the alarm rang."""

_ENVIRONMENT = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed\{")
"""Openers of a math environment in math-verify: $, \\(, \\[ and \\boxed{."""


LONGEST_ANSWER = 10_000
"""Longest answer that is parsed, in characters."""
LONGEST_COMPLETION = 1_000_000
DEEPEST_NESTING = 12
"""Deepest nesting of brackets. Beyond it, math-verify's parser may exceed its time-out."""
MOST_BITS = 10_000_000
LARGEST_FACTORIAL = 200_000
"""Limits of numbers in an answer. sympy takes a quarter of a second for numbers of this size."""

_SPACING = re.compile(r"\\left|\\right|\{,\}|\\[,;! ]|(?<=\d),(?=\d{3})")
_BRACKETED_NUMBER = re.compile(r"[({]\s*(\d+)\s*[)}]")
_FACTORIAL_OF_NUMBER = re.compile(r"(\d+)\s*!")
_POWER_OF_NUMBERS = re.compile(r"(\d+)\s*\^\s*(\d+)(?![\d]|\s*[\^!])")
_BEYOND = "9" * 9


def is_too_expensive(answer: str) -> bool:
    """Return whether math-verify would exceed its time-out on an answer: very long text, deeply
    nested brackets, and numbers too large for memory, such as towers of powers and factorials of
    factorials, which are evaluated from the inside."""
    if len(answer) > LONGEST_ANSWER:
        return True
    depth = 0
    for character in answer:
        depth += (character in "([{") - (character in ")]}")
        if depth > DEEPEST_NESTING:
            return True
    text, previous = _SPACING.sub("", answer), ""
    while text != previous:  # innermost numbers first
        previous = text
        text = _BRACKETED_NUMBER.sub(r" \1 ", text)
        for pattern, evaluate in ((_FACTORIAL_OF_NUMBER, _factorial), (_POWER_OF_NUMBERS, _power)):
            if match := pattern.search(text):
                value = evaluate(*match.groups())
                if value is None:
                    return True
                text = f"{text[: match.start()]} {value} {text[match.end() :]}"
                break
    return False


def _factorial(number: str) -> str | None:
    """The factorial as text, `_BEYOND` if it is larger than that, None if it is too expensive."""
    if len(number) > 6 or int(number) > LARGEST_FACTORIAL:
        return None
    return str(math.factorial(int(number))) if int(number) < 13 else _BEYOND


def _power(base: str, exponent: str) -> str | None:
    """Computes a power as text: `_BEYOND` if it has over 30 bits, None if it is too expensive."""
    base, exponent = base.lstrip("0"), exponent.lstrip("0")
    if not exponent:
        return "1"
    if base in ("", "1"):
        return base or "0"
    base_bits = math.log2(int(base[:15])) + 3.33 * max(len(base) - 15, 0)
    if len(exponent) > 8 or int(exponent) * base_bits > MOST_BITS:
        return None
    return str(int(base) ** int(exponent)) if int(exponent) * base_bits < 30 else _BEYOND


def in_environment(text: str) -> str:
    """Wrap `text` in $…$ unless it opens a math environment itself."""
    return text if _ENVIRONMENT.search(text) else f"${text}$"


class _SwallowedErrors(logging.Handler):
    """Detects timeouts and exhausted memory, which math-verify catches and only logs."""

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
    """math-verify with caches of parsed LaTeX (shared by the process), golds and compared pairs.

    With `boxed`, `boxed_answer(completion)` is graded, and a completion without a box is
    unparsable; otherwise the whole completion is graded.
    """

    def __init__(self, boxed: bool = False) -> None:
        """Reads math-verify's log, which alone tells of a time-out, and enlarges its cache."""
        self._boxed = boxed
        self._swallowed = _SwallowedErrors()
        logger = logging.getLogger("math_verify")
        logger.addHandler(self._swallowed)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        _enlarge_latex_cache()
        self._parse_gold = lru_cache(maxsize=REMEMBERED)(_parse)
        self._compared: OrderedDict[tuple[Any, ...], tuple[list[Any], bool]] = OrderedDict()

    def grade(self, completion: str, answer: str) -> tuple[str, bool]:
        """Grade a completion. Returns the status of the verdict, and whether the reference answer
        could be parsed. A timeout while other programs had the processor is tried once more."""
        started = time.process_time()
        verdict = self._grade(completion, answer)
        # math-verify's alarms use wall time. If other programs had the processor meanwhile, the
        # timeout says nothing about the answer.
        if self._swallowed.timed_out and time.process_time() - started < STARVED_SECONDS:
            verdict = self._grade(completion, answer)
        return verdict

    def _grade(self, completion: str, answer: str) -> tuple[str, bool]:
        """Parses and compares once, as raw strings if one of them does not parse. Returns the
        status, and whether the reference answer could be parsed."""
        self._swallowed.clear()
        gold = [] if is_too_expensive(answer) else self._parse_gold(answer)
        if self._swallowed:  # parsing may succeed in time on the next attempt
            self._parse_gold.cache_clear()
        operand = boxed_answer(completion) if self._boxed else completion
        if operand is None:
            return "unparsable", bool(gold)
        prediction = [] if self._is_too_expensive(operand) else _parse(operand)
        if gold and prediction:
            correct = self._verify(answer, gold, prediction)
        else:
            correct = operand == answer
        return self._status(correct, bool(prediction)), bool(gold)

    def _is_too_expensive(self, operand: str) -> bool:
        """Whether to skip parsing. For a whole completion its last box decides, not the rest."""
        if self._boxed:
            return is_too_expensive(operand)
        return len(operand) > LONGEST_COMPLETION or is_too_expensive(last_box(operand) or "")

    def _verify(self, answer: str, gold: list[Any], prediction: list[Any]) -> bool:
        """Compares parsed expressions by math-verify, with a cache unless it timed out."""
        # The parse cache returns the same object for equal LaTeX, so its id is a valid key as long
        # as the entry keeps it alive. Equal expressions from different LaTeX are compared again.
        key = (answer, *(part if isinstance(part, str) else id(part) for part in prediction))
        cached = self._compared.get(key)
        if cached is not None:
            return cached[1]
        correct = math_verify.verify(gold, prediction)
        if not self._swallowed:
            self._compared[key] = (prediction, correct)
            if len(self._compared) > REMEMBERED:
                self._compared.popitem(last=False)
        return correct

    def _status(self, correct: bool, parsed: bool) -> str:
        """Returns the status: a swallowed failure counts only if the answer is not correct."""
        if correct:
            return "correct"
        if self._swallowed.out_of_memory:
            return "memory"
        if self._swallowed.timed_out:
            return "timeout"
        return "incorrect" if parsed else "unparsable"


def _parse(text: str) -> list[Any]:
    return math_verify.parse(in_environment(text))


def _enlarge_latex_cache() -> None:
    """Enlarge math-verify's own cache of parsed LaTeX from 20 strings to `REMEMBERED`.

    math-verify has no setting for it. Only the size changes, never the result.
    """
    cached = math_verify.parser.parse_latex_cached
    uncached: Callable[[str], Any] = cached.__wrapped__
    if cached.cache_parameters()["maxsize"] != REMEMBERED:
        math_verify.parser.parse_latex_cached = lru_cache(maxsize=REMEMBERED)(uncached)
