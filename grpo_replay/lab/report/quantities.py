"""What else is compared between arms: lengths, clipping, tokens, time, compute and AES."""

from collections.abc import Sequence

import numpy as np

from grpo_replay.evaluation.aes import accuracy_efficiency_score
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.lab.report.costs import Axis, mu_of
from grpo_replay.lab.report.finished_run import FinishedRun
from grpo_replay.lab.report.report_findings import Spread
from grpo_replay.lab.report.scores import Pairs
from grpo_replay.training.run_summary import mean_over_steps

STEP_MEANS = {
    "clip_fraction_fresh": "fresh/clip_fraction",
    "clip_fraction_replayed": "replay/clip_fraction",
    "age_mean": "replay/age_mean",
    "replay_ratio": "replay/ratio",
}
STEP_SUMS = {
    "generated_tokens": "cost/generated_tokens",
    "trained_tokens": "cost/trained_tokens",
    "training_seconds": "step_time",
}
LENGTHS = {
    "tokens": "mean_tokens",
    "tokens_correct": "mean_tokens_correct",
    "tokens_incorrect": "mean_tokens_incorrect",
    "truncation_rate": "truncation_rate",
}

Columns = dict[str, Sequence[float | None]]
"""Values by name, one per run; None where a run does not have it."""


def measure_quantities(
    runs: Sequence[FinishedRun], pairs: Pairs, costs: Sequence[Axis]
) -> dict[str, Spread]:
    """Spreads over the runs that have a quantity; one that no run has is left out.

    `pairs` are with the baseline, and empty for the baseline itself.
    """
    trained = [run for run in runs if run.recipe is not None]
    found = _lengths(runs, pairs) | _means_and_sums(trained)
    for axis in costs:
        if axis.key.startswith("compute"):
            found[axis.key] = [float(axis.total(run)[-1]) for run in trained]
    found["wall_seconds"] = [run.wall_seconds for run in trained]
    found["mu"] = [mu_of(run) for run in trained]
    found["base"] = [run.base.sampled.mean.avg_at_k if run.base else None for run in trained]
    found["best_step"] = [run.best_step for run in trained]
    found["aes_base"] = [_aes(run.final, run.base) for run in trained]
    found["aes_baseline"] = [_aes(a.final, b.final) for a, b in pairs]
    return {
        name: Spread.of(known)
        for name, values in found.items()
        if (known := [value for value in values if value is not None])
    }


def _lengths(runs: Sequence[FinishedRun], pairs: Pairs) -> Columns:
    found: Columns = {}
    for name, key in LENGTHS.items():
        found[name] = [getattr(run.final.sampled.mean, key) for run in runs]
        if name != "truncation_rate":
            found[f"{name}_change"] = [_change(a, b, key) for a, b in pairs]
    return found


def _means_and_sums(trained: Sequence[FinishedRun]) -> Columns:
    found: Columns = {}
    for name, metric in STEP_MEANS.items():
        found[name] = [mean_over_steps(metric, run.log.lines) for run in trained]
    for name, metric in STEP_SUMS.items():
        totals = [float(run.log.running_total(metric)[-1]) for run in trained]
        found[name] = [None if np.isnan(total) else total for total in totals]
    return found


def _change(a: FinishedRun, b: FinishedRun, key: str) -> float | None:
    """The relative change of a length from the baseline's to the arm's."""
    ours, theirs = (getattr(run.final.sampled.mean, key) for run in (a, b))
    return (ours - theirs) / theirs if theirs and ours is not None else None


def _aes(report: EvaluationReport, reference: EvaluationReport | None) -> float | None:
    """AES of a run against a reference; None if the reference has accuracy or length 0."""
    if reference is None:
        return None
    ours, theirs = report.sampled.mean, reference.sampled.mean
    if not (theirs.avg_at_k and theirs.mean_tokens):
        return None
    return accuracy_efficiency_score(
        ours.avg_at_k, ours.mean_tokens, theirs.avg_at_k, theirs.mean_tokens
    )[2]
