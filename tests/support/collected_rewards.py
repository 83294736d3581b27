"""A reward of random digits that gives most groups a signal."""

import os
import zlib


def even(completion: str, answer: str, row: dict) -> float:
    """1 if the digits' sum is even, else -1."""
    return 1.0 if sum(int(c) for c in completion if c.isdigit()) % 2 == 0 else -1.0


def even_unless_it_fails(completion: str, answer: str, row: dict) -> float | None:
    """As `even`, but raises on about one completion in five, and returns None on as many."""
    kind = zlib.crc32(completion.encode()) % 5
    if completion.startswith("The answer is") or kind > 1:  # what a function is tried with
        return even(completion, answer, row)
    if kind == 0:
        raise ConnectionError("the judge is not reachable")
    return None


def even_while_the_judge_is_up(completion: str, answer: str, row: dict) -> float:
    """As `even`; raises while the file that JUDGE_IS_DOWN names is there."""
    if os.path.exists(os.environ["JUDGE_IS_DOWN"]):
        raise ConnectionError("the judge is not reachable")
    return even(completion, answer, row)
