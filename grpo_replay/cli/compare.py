"""`grpo-replay eval --compare`: a paired test of two evaluation files."""

import json
from dataclasses import asdict
from pathlib import Path

from grpo_replay.evaluation.comparison import compare, differences
from grpo_replay.evaluation.evaluation_report import read_report_graded_by
from grpo_replay.evaluation.evaluation_tables import (
    COMPARISON_LEGEND,
    comparison_table,
    length_table,
)
from grpo_replay.terminal.console import open_console
from grpo_replay.terminal.tables import print_table


def run_comparison(
    path_a: str, path_b: str, as_json: bool = False, verifier: str | None = None
) -> None:
    """Print how evaluation B differs from A, with a paired test.

    Both are graded by `verifier`; if None, each by its own verifier.
    """
    a, b = (read_report_graded_by(Path(path), verifier) for path in (path_a, path_b))
    results = compare(path_a, a, path_b, b)
    notes = differences(a, b)
    if as_json:
        document = {
            "a": {"file": path_a, "model": a.model},
            "b": {"file": path_b, "model": b.model},
            "benchmarks": {name: asdict(r) for name, r in results.items() if name != "mean"},
            "mean": asdict(results["mean"]),
            "graded_by": a.settings.get("reward"),
            "differences": notes,
        }
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
        return
    console = open_console()
    console.print(f"A  {path_a}\nB  {path_b}", soft_wrap=True)
    print_table(console, comparison_table(results))
    print_table(console, length_table(results))
    console.print(COMPARISON_LEGEND)
    for sentence in notes:
        console.print(sentence)
