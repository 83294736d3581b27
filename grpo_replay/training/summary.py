"""summary.json: what came of a run."""

from collections.abc import Callable
from typing import Any

from grpo_replay.evaluation.report import EvaluationReport
from grpo_replay.recipe import Recipe
from grpo_replay.storage.checkpoint import RunState, checkpoint_name


def summarise_run(
    recipe: Recipe,
    state: RunState,
    base: EvaluationReport | None,
    final: EvaluationReport | None,
) -> dict[str, Any]:
    """Totals, and held-out accuracy before and after; null where nothing was evaluated."""
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
        "generated_tokens": state.generated_tokens,
        "trained_tokens": state.trained_tokens,
        "replayed_rollouts": state.replayed_rollouts,
        "checkpoint": f"checkpoints/{checkpoint_name(state.step)}",
    }


def _of(report: EvaluationReport | None, read: Callable[[EvaluationReport], Any]) -> Any:
    return None if report is None else read(report)
