"""`grpo-replay report`: compare runs, sweeps and evaluation files."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from grpo_replay.errors import UsageError
from grpo_replay.evaluation.evaluation_tables import plain_table
from grpo_replay.lab.report.collect import collect
from grpo_replay.lab.report.costs import PAPER_MU
from grpo_replay.lab.report.document import document
from grpo_replay.lab.report.measure import measure
from grpo_replay.lab.report.report_findings import Findings
from grpo_replay.lab.report.report_tables import report_tables
from grpo_replay.lab.report.texts import facts_of, warnings_of
from grpo_replay.terminal.console import open_console
from grpo_replay.terminal.tables import print_table


def run(
    paths: Sequence[str],
    baseline: str | None = None,
    output: str | None = None,
    targets: Sequence[float] = (),
    given_mu: Sequence[float] = (),
    as_json: bool = False,
) -> None:
    """Print the report of `paths`; with `output`, also write it to that folder.

    `targets` are accuracies in percent; `given_mu` replaces the papers' μ. Raises UsageError and
    DataError as `collect` does.
    """
    _check_numbers(targets, given_mu)
    if output is not None:
        from grpo_replay.lab.report.write import check_folder

        check_folder(Path(output))
    experiment = collect(paths, baseline)
    findings = measure(experiment, [each / 100 for each in targets], given_mu or PAPER_MU)
    if output is not None:
        from grpo_replay.lab.report.write import write_report

        write_report(experiment, findings, Path(output))
        open_console(stderr=True, soft_wrap=True).print(f"wrote {output}/report.html")
    if as_json:
        print(json.dumps(document(findings), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_report(findings, open_console())


def _check_numbers(targets: Sequence[float], given_mu: Sequence[float]) -> None:
    for target in targets:
        if not 0 < target <= 100:
            raise UsageError(f"--reach {target:g}: expected an accuracy in percent, 0 to 100")
    for mu in given_mu:
        if not 0 <= mu < math.inf:
            raise UsageError(f"--mu {mu:g}: expected a finite number of at least 0")


def print_report(findings: Findings, console: Console) -> None:
    """Print what is compared, warnings, and the brief tables with their legends."""
    console.print(findings.name, style="bold", soft_wrap=True)
    console.print(" · ".join(facts_of(findings)), style="dim")
    for warning in warnings_of(findings):
        console.print(f"! {warning}", style="yellow")
    for table in report_tables(findings):
        if table.brief:
            console.print()
            print_table(console, plain_table(table.title, table.header, table.rows))
            console.print(table.legend, style="dim")
