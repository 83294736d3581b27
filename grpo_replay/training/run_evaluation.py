"""Evaluates a run before, during and after training, and writes the results: summary.json, and the
README of a checkpoint's model."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from grpo_replay.evaluation.benchmarks import EvaluationPlan
from grpo_replay.evaluation.cache import sampler_facts
from grpo_replay.evaluation.evaluate import evaluate
from grpo_replay.evaluation.evaluation_report import EvaluationReport, are_comparable, read_report
from grpo_replay.recipe import BUILTIN_VERIFIERS, Recipe
from grpo_replay.recipe.layers import is_on_hub
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.storage.checkpoint import RunState, checkpoint_name
from grpo_replay.storage.rollout_log import mean_over_steps
from grpo_replay.storage.stored_recipe import shareable, shareable_yaml
from grpo_replay.training import Observer
from grpo_replay.training.rollout_source import Parts
from grpo_replay.training.shadow import summarise_replay
from grpo_replay.training.weight_sync import sync_weights
from grpo_replay.version import __version__

logger = logging.getLogger(__name__)


class RunEvaluation:
    """Evaluates the policy of a run into its eval/ folder. Without a plan it does nothing."""

    def __init__(
        self, parts: Parts, state: RunState, plan: EvaluationPlan | None, observer: Observer
    ) -> None:
        self.parts, self.state, self.plan, self.observer = parts, state, plan, observer
        self.recipe, self.comm, self.run_dir = parts.recipe, parts.comm, parts.run_dir

    def is_due(self, step: int) -> bool:
        """Returns whether the policy after `step` (0: the base model) is evaluated."""
        if self.plan is None:
            return False
        if step == 0:
            return self.recipe.eval.at_start
        return step == self.recipe.run.steps or self.recipe.eval.is_due(step)

    def evaluate(self, step: int) -> EvaluationReport | None:
        """Evaluate the current policy into eval/, or read the report if it exists. A sampler with
        older weights gets the policy's first. Returns the report on rank 0; None without a plan, or
        if a stop was requested on any rank first. Collective."""
        if self.plan is None:
            return None
        path = self.run_dir.path / "eval" / f"step_{step:06d}.json"
        if self.comm.broadcast(path.exists()):
            return read_report(path, with_samples=False) if self.comm.is_main else None
        if self.comm.is_main:
            self.observer.on_status(f"evaluating step {step}")
        started = time.perf_counter()
        parts = self.parts
        self._push_if_lagging()
        with self._scorer() as scorer:
            report = evaluate(
                parts.sampler,
                parts.tokenizer,
                self.plan,
                self.comm,
                scorer,
                model=self._model_facts(step),
                # Ranks that sample together cannot stop one by one.
                stop=None if parts.sampler.ranks_sample_together else parts.stop,
            )
            parts.sampler.sleep()  # keep weights: the next step samples before any push
        if report is None:
            return None
        report.write(path)
        logger.info("evaluation of step %d: %.1f s", step, time.perf_counter() - started)
        self.observer.on_evaluation(step, report)
        return report

    def _model_facts(self, step: int) -> dict[str, Any]:
        """Returns the `model` section of a report."""
        sampled = {"dtype": self.recipe.sampled_dtype, **sampler_facts(self.recipe.sampling)}
        return {"run": self.run_dir.path.name, "step": step, **sampled}

    def _push_if_lagging(self) -> None:
        """Push the policy to a sampler that lags: after the last step, which pushes nothing (see
        `recipe.find_contradictions`), and while an asynchronous run repeats journalled steps."""
        parts, version = self.parts, self.state.policy_version
        if parts.sampler.policy_version != version:
            sync_weights(parts.engine, parts.sampler, version)

    def _scorer(self) -> AbstractContextManager[RewardScorer]:
        """Returns the run's own scorer if it grades as evaluations do, else one with its limits."""
        reward, function = self.recipe.reward, self.recipe.eval.reward
        if function in BUILTIN_VERIFIERS and reward == reward.with_single_function(function):
            return nullcontext(self.parts.scorer)
        return RewardScorer.open(reward.with_single_function(function), as_verdicts=True)

    def base_and_last(self) -> tuple[EvaluationReport | None, EvaluationReport | None]:
        """Returns the reports of the base model and of the current step; None if missing. If a
        resume changed the recipe, the two may not be comparable."""
        folder = self.run_dir.path / "eval"
        paths = (folder / f"step_{step:06d}.json" for step in (0, self.state.step))
        first, last = (read_report(p, with_samples=False) if p.exists() else None for p in paths)
        return first, last


TAGS = ["grpo", "grpo-replay", "rollout-replay"]
NOT_EVALUATED = "This step was not evaluated."

RUN_MEANS = (
    *("fresh/rollouts", "fresh/clip_fraction", "replay/clip_fraction"),
    *("groups/all_correct_fraction", "groups/all_wrong_fraction", "reward/missing_fraction"),
)
"""Metrics whose mean over the run is in the summary (paper A, tables 2 and 8)."""


def summarise_run(
    recipe: Recipe,
    state: RunState,
    base: EvaluationReport | None,
    final: EvaluationReport | None,
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Compute the content of summary.json: totals, accuracy before and after training (null if not
    evaluated), and means over the training steps (`metrics`). `comparable` is false if the settings
    of the two evaluations differ, null if one is missing."""
    return {
        "recipe": recipe.name,
        "preset": recipe.replay.preset,
        "steps": state.step,
        "wall_seconds": state.wall_seconds,
        "base": _read_if_given(base, EvaluationReport.accuracies),
        "final": _read_if_given(final, EvaluationReport.accuracies),
        "base_stderr": _read_if_given(base, EvaluationReport.standard_errors),
        "final_stderr": _read_if_given(final, EvaluationReport.standard_errors),
        "base_greedy": _read_if_given(base, EvaluationReport.greedy_accuracies),
        "final_greedy": _read_if_given(final, EvaluationReport.greedy_accuracies),
        "comparable": are_comparable(base, final) if base and final else None,
        "generated_tokens": state.generated_tokens,
        "trained_tokens": state.trained_tokens,
        "replayed_rollouts": state.replayed_rollouts,
        "means": {name: mean_over_steps(name, metrics) for name in RUN_MEANS},
        "replay": summarise_replay(metrics, recipe.replay),
        "checkpoint": f"checkpoints/{checkpoint_name(state.step)}",
    }


def _read_if_given(report: EvaluationReport | None, read: Callable[[EvaluationReport], Any]) -> Any:
    return None if report is None else read(report)


def model_card(
    recipe: Recipe,
    state: RunState,
    reports: tuple[EvaluationReport | None, EvaluationReport | None],
) -> str:
    """Write the model card, in Markdown with Hugging Face metadata. `reports` are those of the base
    model and of this step, None if not evaluated."""
    replay = recipe.replay
    limit = "none" if replay.max_age_steps is None else f"{replay.max_age_steps} steps"
    metadata = _metadata(recipe.model.path, recipe.prompts.source_names)
    return f"""{metadata}# {recipe.name}, step {state.step}

Post-trained from `{shareable(recipe.model.path)}` with GRPO by grpo-replay {__version__}, recipe
`{recipe.name}`, replay preset `{replay.preset}` (unit {replay.unit}, priority {replay.priority},
composition {replay.composition}, ratio {replay.ratio}, age limit {limit}).

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
    """Returns the metadata at the top of a card, between lines of dashes. The hub links base model
    and data sets, so those that are not on the hub are left out."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS,
        base_model=base if is_on_hub(base) else None,
        datasets=list(filter(is_on_hub, prompts)) or None,
    )
    return f"---\n{data.to_yaml()}\n---\n\n"


def _results(base: EvaluationReport | None, current: EvaluationReport | None) -> str:
    """Returns the card's table of accuracies; the base model's only if settings were the same."""
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
