"""The evaluations of a run, before, during and after training."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from grpo_replay.errors import EvaluationFileError
from grpo_replay.evaluation.evaluate import EvaluationStopped, add_gradings, evaluate
from grpo_replay.evaluation.evaluation_report import EvaluationReport, read_report
from grpo_replay.evaluation.sampling_plan import EvaluationPlan
from grpo_replay.recipe import BUILTIN_VERIFIERS
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.training.observer import Observer
from grpo_replay.training.rollout_source import Parts
from grpo_replay.training.weight_sync import sync_weights

logger = logging.getLogger(__name__)


class RunEvaluation:
    """Evaluates the policy of a run into its eval/ folder. Without a plan it does nothing."""

    def __init__(
        self, parts: Parts, state: RunState, plan: EvaluationPlan | None, observer: Observer
    ) -> None:
        self.parts, self.state, self.plan, self.observer = parts, state, plan, observer
        self.recipe, self.comm, self.run_dir = parts.recipe, parts.comm, parts.run_dir

    def is_due(self, step: int) -> bool:
        """Whether the policy after `step` (0: the base model) is evaluated."""
        every, last = self.recipe.eval.every_steps, step == self.recipe.run.steps
        if self.plan is None:
            return False
        if step == 0:
            return self.recipe.eval.at_start
        return last or (every is not None and step % every == 0)

    def evaluate(self, step: int, should_stop: Callable[[], bool]) -> EvaluationReport | None:
        """Evaluate the current policy into eval/, or read the report if it is there already.
        Returns the report on rank 0. Collective. Raises EvaluationStopped on every rank if
        `should_stop` becomes true on any."""
        if self.plan is None:
            return None
        path = self.run_dir.path / "eval" / f"step_{step:06d}.json"
        if self.comm.broadcast_json(path.exists()):
            return read_report(path, with_samples=False) if self.comm.is_main else None
        if self.comm.is_main:
            self.observer.on_status(f"evaluating step {step}")
        started = time.perf_counter()
        parts = self.parts
        self._catch_up()
        with self.comm.position.stage("evaluation"), self._scorer() as scorer:
            try:
                report = evaluate(
                    parts.sampler,
                    parts.tokenizer,
                    self.plan,
                    self.comm,
                    scorer,
                    model={"run": self.run_dir.path.name, "step": step},
                    # Ranks that sample together: none can leave alone.
                    should_stop=None if parts.sampler.ranks_sample_together else should_stop,
                )
            except EvaluationStopped:
                parts.sampler.sleep()  # makes room for the checkpoint
                raise
            parts.sampler.sleep()  # with its weights: the next step samples before any push
        if report is None:
            return None
        report = add_gradings(report, self.recipe.eval.other_rewards, self.recipe.reward)
        report.write(path)
        logger.info("evaluation of step %d: %.1f s", step, time.perf_counter() - started)
        self.observer.on_evaluation(step, report)
        return report

    def _catch_up(self) -> None:
        """Push the policy to a sampler that lags. It can lag only after the last step (see
        `recipe.contradictions`), when no more training rollouts are sampled."""
        parts, version = self.parts, self.state.policy_version
        if parts.sampler.policy_version != version:
            sync_weights(parts.engine, parts.sampler, version)

    def _scorer(self) -> AbstractContextManager[RewardScorer]:
        """The run's own scorer if it grades as evaluations do, else one with its limits."""
        reward, function = self.recipe.reward, self.recipe.eval.verifier
        if function in BUILTIN_VERIFIERS and reward == reward.alone(function):
            return nullcontext(self.parts.scorer)
        return RewardScorer.open(reward.alone(function), as_verdicts=True)

    def base_and_last(self) -> tuple[EvaluationReport | None, EvaluationReport | None]:
        """The reports of the base model and of the current step; None where there is none, or a
        damaged one. A recipe that was changed at a resume can make the two incomparable."""
        folder = self.run_dir.path / "eval"
        first, last = (
            _read_if_whole(folder / f"step_{step:06d}.json") for step in (0, self.state.step)
        )
        return first, last


def _read_if_whole(path: Path) -> EvaluationReport | None:
    """Training can go on without a report that somebody damaged."""
    if not path.exists():
        return None
    try:
        return read_report(path, with_samples=False)
    except EvaluationFileError as error:
        logger.warning("left out of the summary: %s", error)
        return None
