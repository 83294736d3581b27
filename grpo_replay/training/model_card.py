"""The README of a checkpoint's model: what it is, how it was trained, what it scored."""

from grpo_replay import __version__
from grpo_replay.evaluation.comparison import are_comparable
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.hub_card import card_metadata
from grpo_replay.recipe import Recipe, recipe_to_yaml
from grpo_replay.storage.checkpoint import RunState

NOT_EVALUATED = "This step was not evaluated."


def model_card(
    recipe: Recipe,
    state: RunState,
    reports: tuple[EvaluationReport | None, EvaluationReport | None],
) -> str:
    """Markdown with Hugging Face metadata. `reports` are of the base model and of this step."""
    replay = recipe.replay
    return f"""{card_metadata(recipe)}# {recipe.name}, step {state.step}

Post-trained from `{recipe.model.path}` with GRPO by grpo-replay {__version__}, recipe
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
{recipe_to_yaml(recipe)}```
"""


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
