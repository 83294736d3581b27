"""Pieces of the sentences that tell a user what is wrong."""

import difflib
from collections.abc import Iterable


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the error's class if it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'ratio'?)`, or nothing if no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
