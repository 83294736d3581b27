"""`grpo-replay train --dry-run` on the terminal."""

import json
from collections.abc import Iterable
from typing import Any

from rich.markup import escape

from grpo_replay.lab.dry_run.dry_run_report import DryRun
from grpo_replay.lab.dry_run.planner import Alternative
from grpo_replay.terminal.console import open_console, printable
from grpo_replay.terminal.text_table import TextTable

EXCERPT_CHARACTERS = 300
"""Longest text of a prompt or completion that is shown in full."""


def print_dry_run(report: DryRun) -> None:
    """Print problems and notes, one table of all rows, what was seen, and last the answer."""
    console = open_console(markup=True, soft_wrap=True)
    findings = report.findings
    for problem in findings.problems:
        console.print(f"[red]problem[/]: {escape(problem)}")
    for notice in report.notices:
        console.print(f"[yellow]note[/]: {escape(notice.text)}")
    rows: list[tuple[str, str, str]] = []
    for section in report.sections:
        if shown := section.shown():
            rows += [(section.title, "", ""), *(row.cells() for row in shown)]
    TextTable((report.recipe, "expected", "at most"), rows).print(console)
    texts = {"first prompt": report.prompt} if report.look is None else report.look.example
    for name, value in (texts or {}).items():
        if value is not None:
            console.print(f"[bold]{name}[/]: {_excerpt(value)}")
    for sentence in findings.unchecked:
        console.print(f"[yellow]unchecked[/]: {escape(sentence)}")
    for sentence in findings.assumptions:
        console.print(f"[dim]assumption[/]: {escape(sentence)}")
    for line in _verdict(report):
        console.print(line)


def _excerpt(value: Any) -> str:
    """The value in one line, escaped as in JSON; of a long text the end, where the answer is."""
    text = value if isinstance(value, str) else str(value)
    shown = escape(printable(json.dumps(text[-EXCERPT_CHARACTERS:], ensure_ascii=False)))
    more = len(text) - EXCERPT_CHARACTERS
    return f"{more:,} characters … {shown}" if more > 0 else shown


def _verdict(report: DryRun) -> Iterable[str]:
    """What a first look says, what else would fit, and last the answer."""
    memory, look = report.memory, report.look
    if look is not None:
        colour = "green" if look.can_learn and look.correct else "yellow"
        yield f"[bold {colour}]first look[/]: {look.verdict}"
    yield from map(_alternative, report.advice)
    for problem in report.findings.problems:
        yield f"[bold red]would not start[/]: {escape(problem)}"
    if report.findings.problems:
        return
    if memory is None:
        yield "[bold yellow]cannot say whether it fits[/]: see what is unchecked"
    elif memory.tight:
        yield f"[bold yellow]fits, tight[/]: {memory.peak_text}"
    else:
        yield f"[bold green]fits[/]: {memory.peak_text}"


def _alternative(tried: Alternative) -> str:
    words = " ".join(f"--set {escape(each)}" for each in tried.overrides)
    fits = "it fits" if tried.plan.fits else "it does not fit"
    return f"with {words} {fits}: {tried.plan.peak_text}"
