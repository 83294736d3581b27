"""`grpo-replay eval --regrade`: grade the completions of an evaluation with other verifiers."""

from collections.abc import Sequence
from pathlib import Path

from grpo_replay.cli.eval_display import print_report
from grpo_replay.errors import UsageError, did_you_mean
from grpo_replay.evaluation.evaluation_progress import open_progress
from grpo_replay.evaluation.evaluation_report import EvaluationReport, read_report
from grpo_replay.evaluation.output_files import check_output, write_output
from grpo_replay.evaluation.regrading import add_gradings
from grpo_replay.recipe import BUILTIN_VERIFIERS, RewardSection


def run_regrading(
    path: str, verifiers: Sequence[str], output: str | None = None, as_json: bool = False
) -> None:
    """Add the verdicts of other verifiers to an evaluation file and print it; nothing is sampled.

    With `output`, the result is written there and the file at `path` is left unchanged.
    """
    report = read_report(Path(path))
    _check_verifiers(verifiers, report)
    target = Path(output or path)
    check_output(target)
    with open_progress(1, "grading") as on_progress:
        report = add_gradings(report, verifiers, RewardSection(), on_progress)
    write_output(report, target)
    print_report(report, target, as_json)


def _check_verifiers(verifiers: Sequence[str], report: EvaluationReport) -> None:
    for verifier in verifiers:
        if verifier == report.verifier or verifiers.count(verifier) > 1:
            raise UsageError(
                f"--grade-with {verifier}: it already grades the report, or is named twice; name "
                "each other verifier once"
            )
        if verifier not in BUILTIN_VERIFIERS:
            hint = did_you_mean(verifier, BUILTIN_VERIFIERS)
            raise UsageError(
                f"--grade-with {verifier}: no such verifier{hint}; known verifiers are "
                f"{', '.join(BUILTIN_VERIFIERS)}"
            )
