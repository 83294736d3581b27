"""Findings of a dry run.

A finding is a problem (the run would fail there) or unchecked (not visible from this machine).
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Findings:
    """Sentences for the report, by kind."""

    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
