"""What every command does with code that a recipe brings: name it before it runs, or refuse it."""

import sys
from collections.abc import Sequence

from grpo_replay.errors import UsageError
from grpo_replay.terminal.console import printable


def consider_code(code: Sequence[str], whose: str, refuse: bool, announce: bool) -> None:
    """Print the `code` of a recipe on stderr, with `announce`. Raises UsageError to `refuse` it."""
    if not code:
        return
    named = "; ".join(code)
    if refuse:
        raise UsageError(
            f"--no-code: {whose} brings code that would run: {named}. Read it, then leave "
            "--no-code out, or choose something else with --set"
        )
    if announce:
        text = f"{whose} brings code that will run: {named} (--no-code refuses it)"
        print(printable(text), file=sys.stderr, flush=True)
