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
    """Print problems and notices, a table of all sections, the example of a first look (else the
    first prompt), what is unchecked and assumed, and last whether the run would start and fit."""
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
    """Returns a value as one line, escaped as in JSON; of a long text the end, where the answer is,
    after the number of characters left out."""
    text = value if isinstance(value, str) else str(value)
    shown = escape(printable(json.dumps(text[-EXCERPT_CHARACTERS:], ensure_ascii=False)))
    left_out = len(text) - EXCERPT_CHARACTERS
    return f"{left_out:,} characters … {shown}" if left_out > 0 else shown


def _verdict(report: DryRun) -> Iterable[str]:
    """Yields the last lines: the first look's verdict, alternatives that save memory, and either
    each problem ("would not start") or whether the run fits."""
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


def _alternative(alternative: Alternative) -> str:
    options = " ".join(f"--set {escape(override)}" for override in alternative.overrides)
    fits = "it fits" if alternative.plan.fits else "it does not fit"
    return f"with {options} {fits}: {alternative.plan.peak_text}"
