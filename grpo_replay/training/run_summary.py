"""summary.json: what came of a run."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from grpo_replay.evaluation.comparison import are_comparable
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.recipe import Recipe
from grpo_replay.storage.checkpoint import RunState, checkpoint_name

RUN_MEANS = (
    *("fresh/rollouts", "fresh/clip_fraction", "replay/clip_fraction"),
    *("groups/all_correct_fraction", "groups/all_wrong_fraction", "reward/missing_fraction"),
)
"""Metrics of which the summary has the mean over the run (paper A, tables 2 and 8)."""


def summarise_run(
    recipe: Recipe,
    state: RunState,
    base: EvaluationReport | None,
    final: EvaluationReport | None,
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Totals, held-out accuracy before and after (null where nothing was evaluated), and means over
    the training steps, whose `metrics` these are. `comparable` is false if the two evaluations have
    other settings, null if one is missing."""
    return {
        "recipe": recipe.name,
        "preset": recipe.replay.preset,
        "steps": state.step,
        "wall_seconds": state.wall_seconds,
        "base": _of(base, EvaluationReport.accuracies),
        "final": _of(final, EvaluationReport.accuracies),
        "base_stderr": _of(base, EvaluationReport.standard_errors),
        "final_stderr": _of(final, EvaluationReport.standard_errors),
        "base_greedy": _of(base, EvaluationReport.greedy_accuracies),
        "final_greedy": _of(final, EvaluationReport.greedy_accuracies),
        "comparable": are_comparable(base, final) if base and final else None,
        "generated_tokens": state.generated_tokens,
        "trained_tokens": state.trained_tokens,
        "replayed_rollouts": state.replayed_rollouts,
        "means": {name: mean_over_steps(name, metrics) for name in RUN_MEANS},
        "checkpoint": f"checkpoints/{checkpoint_name(state.step)}",
    }


def mean_over_steps(name: str, metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """Over the steps in which the metric is defined, each counted once; None if there is none."""
    values = [step[name] for step in metrics if step.get(name) is not None]
    return fmean(values) if values else None


def _of(report: EvaluationReport | None, read: Callable[[EvaluationReport], Any]) -> Any:
    return None if report is None else read(report)
