"""`grpo-replay report`: compare runs and sweeps."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from grpo_replay.cli.options import ReportOptions
from grpo_replay.lab.report.collect import collect
from grpo_replay.lab.report.measure import Document, default_outcome, measure
from grpo_replay.lab.report.report_files import (
    as_json,
    facts_of,
    refuse_other_files,
    report_table,
    verdict,
    warnings_of,
    write_report,
)
from grpo_replay.terminal.console import open_console, print_json


def run(options: ReportOptions) -> int:
    """Print the report of `paths`; with --output, also write it to that folder.

    Raises UsageError and DataError as `collect` does.
    """
    output = None if options.output is None else Path(options.output)
    if output is not None:
        refuse_other_files(output)
    experiment = collect(options.paths, options.baseline)
    targets = [percent / 100 for percent in options.reach]
    outcome = default_outcome(experiment, options.metric.replace("@", "_at_"))
    if options.benchmark:
        outcome = replace(outcome, benchmark=options.benchmark)
    document = measure(experiment, targets, options.mu, outcome)
    if output is not None:
        write_report(experiment, document, output)
        open_console(stderr=True, soft_wrap=True).print(f"wrote {output}/report.html")
    if options.as_json:
        print_json(as_json(document))
    else:
        print_report(document, open_console())
    return 0


def print_report(document: Document, console: Console) -> None:
    """Print the verdict, the facts of the comparison, warnings, and the table with its legend."""
    console.print(verdict(document), style="bold", soft_wrap=True)
    console.print(" · ".join([document["name"], *facts_of(document)]), style="dim")
    for warning in warnings_of(document):
        console.print(f"! {warning}", style="yellow")
    console.print()
    report_table(document).print(console)
