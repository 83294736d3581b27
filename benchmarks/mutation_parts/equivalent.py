"""Mutants that no test can notice, and why: (path, old lines, new lines, reason)."""

EQUIVALENT: tuple[tuple[str, str, str, str], ...] = ()
