"""Grade the completions of a report with other verifiers, without sampling."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay import __version__
from grpo_replay.errors import EvaluationFileError
from grpo_replay.evaluation.aggregate import summarise_both
from grpo_replay.evaluation.comparison import VERIFIER_PACKAGES
from grpo_replay.evaluation.evaluate import PROGRESS_SECONDS, Progress
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.results import OtherGrading
from grpo_replay.evaluation.sample_table import graded_by, with_verdicts
from grpo_replay.recipe import RewardSection
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.storage.versions import installed_versions


def add_gradings(
    report: EvaluationReport,
    verifiers: Sequence[str],
    limits: RewardSection,
    on_progress: Callable[[Progress], None] | None = None,
) -> EvaluationReport:
    """The report with added results and verdicts of other verifiers; its own are unchanged.

    `limits` gives workers, time and memory. Earlier verdicts of the same verifier are replaced.
    Raises EvaluationFileError if the report has no per-sample rows, which contain the completions.
    """
    if verifiers and report.samples is None:
        raise EvaluationFileError(
            "the per-sample file (.parquet), which contains the completions, is missing: keep the "
            "two files of an evaluation together, or evaluate again"
        )
    for verifier in verifiers:
        report = _with_grading(report, limits.alone(verifier), on_progress)
    return report


def _with_grading(
    report: EvaluationReport, section: RewardSection, on_progress: Callable[[Progress], None] | None
) -> EvaluationReport:
    verifier = section.function
    verdicts, bad_answers = _grade(report.samples, section, on_progress)
    samples = with_verdicts(report.samples, verifier, verdicts)
    rows = graded_by(samples, verifier)
    resamples = report.settings["bootstrap_samples"]
    sampled, greedy = summarise_both(rows, resamples, bad_answers)
    versions = {"grpo-replay": __version__} | installed_versions(VERIFIER_PACKAGES)
    names = sampled.benchmarks
    other = OtherGrading(
        sampled,
        greedy,
        gained={name: _only_in_first(name, rows, samples) for name in names},
        lost={name: _only_in_first(name, samples, rows) for name in names},
        versions=versions,
    )
    gradings = {**report.other_gradings, verifier: other}
    return replace(report, other_gradings=gradings, samples=samples)


def _grade(
    samples: pa.Table, section: RewardSection, on_progress: Callable[[Progress], None] | None
) -> tuple[list[str], set[str]]:
    """The verdict of every row, and the reference answers that could not be parsed."""
    columns = (samples[name].to_pylist() for name in ("completion_text", "answer"))
    with RewardScorer.open(section) as scorer:
        for index, (text, answer) in enumerate(zip(*columns, strict=True)):
            scorer.submit(index, text, answer)
        while not scorer.wait(PROGRESS_SECONDS):
            if on_progress is not None:
                on_progress(Progress(len(samples), Counter(scorer.statuses())))
        verdicts = [verdict.status for verdict in scorer.results().values()]
        return verdicts, scorer.unparsable_answers


def _only_in_first(benchmark: str, first: pa.Table, second: pa.Table) -> int:
    """The number of sampled rows of a benchmark that are correct only in the first table."""
    chosen = pc.and_(pc.equal(first["benchmark"], benchmark), pc.invert(first["greedy"]))
    found = pc.and_(chosen, pc.and_not(first["correct"], second["correct"]))
    return int(pc.sum(found).as_py() or 0)
