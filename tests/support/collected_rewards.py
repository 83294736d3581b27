"""A reward of random digits that gives most groups a signal."""

import time


def even(completion: str, answer: str, row: dict) -> float:
    """1 if the digits' sum is even, else -1."""
    return 1.0 if sum(int(c) for c in completion if c.isdigit()) % 2 == 0 else -1.0


def stalls_on_seven(completion: str, answer: str, row: dict) -> float:
    """As `even`, but never returns if the first digit is a seven."""
    if completion.startswith("7"):
        time.sleep(600)
    return even(completion, answer, row)
