"""`grpo-replay report`: compare runs, sweeps and evaluation files."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from grpo_replay.cli.options import ReportOptions
from grpo_replay.errors import UsageError
from grpo_replay.lab.report.collect import collect
from grpo_replay.lab.report.finished_run import Outcome
from grpo_replay.lab.report.measure import Document, default_outcome, measure
from grpo_replay.lab.report.report_files import as_json, refuse_other_files, write_report
from grpo_replay.lab.report.report_tables import facts_of, report_table, verdict, warnings_of
from grpo_replay.recipe.base import MOST_COST_RATIO
from grpo_replay.terminal.console import open_console, plain_table, print_json, print_table


def run(options: ReportOptions) -> int:
    """Print the report of `paths`; with --output, also write it to that folder.

    Raises UsageError and DataError as `collect` does.
    """
    _check_numbers(options.reach, options.mu)
    output = None if options.output is None else Path(options.output)
    if output is not None:
        refuse_other_files(output)
    experiment = collect(options.paths, options.baseline)
    targets = [each / 100 for each in options.reach]
    outcome = _outcome(options, default_outcome(experiment))
    found = measure(experiment, targets, options.mu, outcome)
    if output is not None:
        write_report(experiment, found, output)
        open_console(stderr=True, soft_wrap=True).print(f"wrote {output}/report.html")
    if options.as_json:
        print_json(as_json(found))
    else:
        print_report(found, open_console())
    return 0


def _outcome(options: ReportOptions, first: Outcome) -> Outcome:
    metrics = {"avg@k": "avg_at_k", "pass@k": "pass_at_k"}
    if options.metric not in metrics:
        raise UsageError(f"--metric {options.metric}: choose {' or '.join(metrics)}")
    return Outcome(options.benchmark or first.benchmark, metrics[options.metric])


def _check_numbers(targets: Sequence[float], given_mu: Sequence[float]) -> None:
    for target in targets:
        if not 1 <= target <= 100:
            meant = f"; for {target:.0%} write {target * 100:g}" if 0 < target < 1 else ""
            raise UsageError(
                f"--reach {target:g}: expected an accuracy in percent, from 1 to 100{meant}"
            )
    for mu in given_mu:
        if not 0 <= mu <= MOST_COST_RATIO:
            raise UsageError(f"--mu {mu:g}: expected a number from 0 to {MOST_COST_RATIO:,.0f}")


def print_report(found: Document, console: Console) -> None:
    """Print the verdict, what is compared, warnings, and the table with its legend."""
    console.print(verdict(found), style="bold", soft_wrap=True)
    console.print(" · ".join([found["name"], *facts_of(found)]), style="dim")
    for warning in warnings_of(found):
        console.print(f"! {warning}", style="yellow")
    console.print()
    table = report_table(found)
    print_table(console, plain_table("", table.header, table.rows))
    console.print(table.legend, style="dim")
