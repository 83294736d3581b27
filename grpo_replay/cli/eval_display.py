"""What `grpo-replay eval` prints: the tables of a report, or its JSON document."""

import json
from pathlib import Path

from grpo_replay.evaluation.evaluation_report import EvaluationReport, samples_path
from grpo_replay.evaluation.evaluation_tables import heading, legend, terminal_tables
from grpo_replay.evaluation.output_files import page_path
from grpo_replay.terminal.console import open_console
from grpo_replay.terminal.tables import print_table


def print_report(report: EvaluationReport, output: Path, as_json: bool) -> None:
    """Print the tables, or the JSON document, to stdout."""
    if as_json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    console = open_console()
    console.print(heading(report), soft_wrap=True)
    for table in terminal_tables(report):
        print_table(console, table)
    console.print(legend(report))
    for name, result in report.sampled.benchmarks.items():
        if result.unparsable_answers:
            bad = ", ".join(result.unparsable_answers)
            console.print(f"{name}: the reference answers of {bad} cannot be parsed")
    if missing := report.missing_verdicts():
        console.print(missing, soft_wrap=True)
    console.print(
        f"written: {output}, {samples_path(output).name}, {page_path(output).name}", soft_wrap=True
    )
