"""`***` in the place of secrets: in logs, on the screen and in recorded commands."""

import logging
import os
import re

SHORTEST_SECRET = 8
"""Characters: shorter values of variables may be words that occur anywhere."""

_SECRET_VARIABLE = re.compile(r"(^|_)(API_?KEY|ACCESS_KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.I)
_USERINFO = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
_TOKEN = re.compile(
    r"\b(?:hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|AKIA[A-Z0-9]{16})"
)


def without_secrets(text: str) -> str:
    """The text with `***` for user names and passwords in URLs, for words that look like tokens of
    well-known services, and for the values of environment variables that are named as secrets."""
    for value in _secrets_of_environment():
        text = text.replace(value, "***")
    return _TOKEN.sub("***", _USERINFO.sub("***", text))


def _secrets_of_environment() -> list[str]:
    """Longest first, as one may contain another. A path is no secret."""
    named = {value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)}
    found = [each for each in named if len(each) >= SHORTEST_SECRET and not each.startswith("/")]
    return sorted(found, key=len, reverse=True)


class RedactingFormatter(logging.Formatter):
    """Log lines, tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))
