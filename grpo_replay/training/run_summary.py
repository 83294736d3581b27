"""What came of a run: summary.json, and the README of a checkpoint's model."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from grpo_replay import __version__
from grpo_replay.evaluation.comparison import are_comparable
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.recipe import Recipe
from grpo_replay.recipe.paths import is_on_hub
from grpo_replay.storage.checkpoint import RunState, checkpoint_name
from grpo_replay.storage.redaction import shareable, shareable_yaml

TAGS = ["grpo", "grpo-replay", "rollout-replay"]
NOT_EVALUATED = "This step was not evaluated."

RUN_MEANS = (
    *("fresh/rollouts", "fresh/clip_fraction", "replay/clip_fraction"),
    *("groups/all_correct_fraction", "groups/all_wrong_fraction", "reward/missing_fraction"),
)
"""Metrics of which the summary has the mean over the run (paper A, tables 2 and 8)."""


def summarise_run(
    name: str,
    preset: str,
    state: RunState,
    base: EvaluationReport | None,
    final: EvaluationReport | None,
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Totals, held-out accuracy before and after (null where nothing was evaluated), and means over
    the training steps, whose `metrics` these are. `comparable` is false if the two evaluations have
    other settings, null if one is missing."""
    return {
        "recipe": name,
        "preset": preset,
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


def model_card(
    recipe: Recipe,
    state: RunState,
    reports: tuple[EvaluationReport | None, EvaluationReport | None],
) -> str:
    """Markdown with Hugging Face metadata. `reports` are of the base model and of this step."""
    replay = recipe.replay
    metadata = _metadata(recipe.model.path, recipe.prompts.source_names)
    return f"""{metadata}# {recipe.name}, step {state.step}

Post-trained from `{shareable(recipe.model.path)}` with GRPO by grpo-replay {__version__}, recipe
`{recipe.name}`, replay preset `{replay.preset}` (unit {replay.unit}, priority {replay.priority},
composition {replay.composition}, ratio {replay.ratio}, age limit {replay.max_age_steps} steps).

| | |
|---|---|
| training steps | {state.step} |
| generated tokens | {state.generated_tokens:,} |
| trained tokens | {state.trained_tokens:,} |
| replayed rollouts | {state.replayed_rollouts:,} |

{_results(*reports)}
## Recipe

```yaml
{shareable_yaml(recipe)}```
"""


def _metadata(base: str, prompts: Sequence[str]) -> str:
    """The metadata at the top of a card, between lines of dashes. The hub makes links of the names
    of base model and data set; what is not on the hub is left out."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS,
        base_model=base if is_on_hub(base) else None,
        datasets=[each for each in prompts if is_on_hub(each)] or None,
    )
    return f"---\n{data.to_yaml()}\n---\n\n"


def _results(base: EvaluationReport | None, current: EvaluationReport | None) -> str:
    if current is None:
        return f"{NOT_EVALUATED}\n"
    before = base.accuracies() if base and are_comparable(base, current) else {}
    rows = [
        f"| {name} | {_percent(before.get(name))} | {_percent(accuracy)} |"
        for name, accuracy in current.accuracies().items()
    ]
    return "\n".join(["| benchmark | base | this step |", "|---|---|---|", *rows, ""])


def _percent(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{100 * accuracy:.1f} %"
