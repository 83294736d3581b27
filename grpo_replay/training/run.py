"""Runs a recipe from start to end: open, step, evaluate, record, checkpoint, summarise."""

import faulthandler
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.distributed.failures import run_collectively
from grpo_replay.engine.processes import initialize_processes
from grpo_replay.errors import ServersLost
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.recipe import Recipe
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.completion_text import decoded
from grpo_replay.stop import StopToken
from grpo_replay.storage.atomic import write_text_whole
from grpo_replay.storage.checkpoint import checkpoint_name, model_cards
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.storage.tracking import Tracker, open_trackers
from grpo_replay.training import Notice, Observer
from grpo_replay.training.checkpoint_writer import write_checkpoint
from grpo_replay.training.opening import OpenedRun, RunOpener
from grpo_replay.training.run_evaluation import (
    NOT_EVALUATED,
    RunEvaluation,
    model_card,
    summarise_run,
)
from grpo_replay.training.trainer import Trainer
from grpo_replay.types import Rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `summary` is the content of summary.json; None if it was interrupted."""

    run_dir: Path
    step: int
    interrupted: bool
    summary: dict[str, Any] | None


def run_training(
    recipe: Recipe,
    run_path: Path,
    resume: bool,
    observer: Observer,
    scorer: RewardScorer | None = None,
    stop: StopToken | None = None,
) -> RunResult:
    """Train by the recipe, in `run_path`. Called on every rank. A caller that has already opened
    the recipe's scorer passes it as `scorer`, and closes it. `stop` can end the run, as signals do.
    """
    stop = stop or StopToken()
    with ExitStack() as stack, stop.on_signals():
        comm, device = initialize_processes(recipe)
        # Ranks name a new directory after the time, which differs if a launcher starts them apart.
        run_dir = RunDirectory(Path(comm.broadcast(str(run_path))))
        opener = RunOpener(recipe, comm, device, run_dir, stack, scorer, stop, resume)
        run = Run(opener.open(), observer, stack)
        stop.can_save = True
        return run.train()


WARNINGS_SHOWN = ("grpo_replay.sampling", "grpo_replay.collection", "grpo_replay.rewards")
"""Loggers whose warnings are shown to the user at once: a server or a collector is lost or back, a
reward function has failed for the first time."""


class _ShownWarnings(logging.Handler):
    """Passes warnings to the observer. An error of the observer must not end the threads of
    servers, which log these warnings."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(logging.WARNING)
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._observer.on_notice(record.getMessage())
        except Exception:
            self.handleError(record)


class Run:
    """One attempt at a run: steps, evaluations, records and checkpoints."""

    def __init__(self, opened: OpenedRun, observer: Observer, stack: ExitStack) -> None:
        """Builds trainer and evaluation of an opened run; rank 0 announces it."""
        parts, state = opened.parts, opened.state
        self.recipe, self.comm, self.run_dir = parts.recipe, parts.comm, parts.run_dir
        self.stop, self.observer, self.state = parts.stop, observer, state
        self.trainer = Trainer(parts, state, opened.source)
        self.evaluation = RunEvaluation(parts, state, opened.evaluation, observer)
        self.trackers: list[Tracker] = []
        self._stop_is_logged = False
        self._started = 0.0
        stack.callback(faulthandler.cancel_dump_traceback_later)
        if self.comm.is_main:
            self._announce(opened.notices, stack)

    def _announce(self, notices: Sequence[Notice], stack: ExitStack) -> None:
        """Opens trackers, logs the notices of the opening, tells the observer that the run starts,
        and from now on shows it warnings of `WARNINGS_SHOWN`. `stack` undoes it. On rank 0."""
        step = self.state.step
        first_step = step + 1 if step else 0  # the evaluation of the base model is at step 0
        self.trackers = open_trackers(self.recipe, self.run_dir.path, first_step)
        for tracker in self.trackers:
            stack.callback(tracker.close)
        for notice in notices:
            logger.info(notice.text)
        self.observer.on_start(self.recipe, self.run_dir.path, self.state, notices)
        shown = _ShownWarnings(self.observer)
        for name in WARNINGS_SHOWN:
            logging.getLogger(name).addHandler(shown)
            stack.callback(logging.getLogger(name).removeHandler, shown)

    def train(self) -> RunResult:
        """Train until the recipe's last step or a request to stop. Raises the error that ended the
        source of rollouts on any rank, after a checkpoint."""
        state, recipe = self.state, self.recipe
        self._started = time.perf_counter() - state.wall_seconds
        continues = self._evaluate_pending()
        while continues and state.step < recipe.run.steps:
            continues = self._step()
        if not continues:
            run_collectively(self.comm, self.stop.raise_error)
            return RunResult(self.run_dir.path, state.step, True, None)
        summary = None
        if self.comm.is_main:
            steps = self.run_dir.read_metrics()
            summary = summarise_run(recipe, state, *self.evaluation.base_and_last(), steps)
            self.run_dir.write_summary(summary)
        return RunResult(self.run_dir.path, state.step, False, summary)

    def _step(self) -> bool:
        """Makes one step, with its record, and an evaluation and a checkpoint if they are due.
        Returns whether to continue: False after a request to stop, unless the run is complete
        anyway. A due evaluation is then left to the resume."""
        state, recipe = self.state, self.recipe
        if self.comm.world_size > 1:
            log_stacks_after(recipe.engine.timeout_seconds * HANG_SHARE)
        metrics = self.trainer.train_step()
        if metrics is None:
            self._save_last_step()
            return False
        step, is_last = state.step, state.step == recipe.run.steps
        report, is_evaluated = self._evaluate(step)
        stop = self._is_asked_to_stop()
        state.wall_seconds = time.perf_counter() - self._started
        if self.comm.is_main:
            self._record(metrics, report)
        if is_last or stop or step % recipe.checkpoint.every_steps == 0:
            self._checkpoint()
        run_is_complete = is_last and is_evaluated
        return run_is_complete or not stop

    def _evaluate(self, step: int) -> tuple[EvaluationReport | None, bool]:
        """Evaluate if an evaluation is due, into eval/step_NNNNNN.json. Returns the report (on rank
        0), and whether no evaluation is pending."""
        if not self.evaluation.is_due(step):
            return None, True
        if self._is_asked_to_stop():
            return None, False
        try:
            report = self.evaluation.evaluate(step)
        except ServersLost as error:
            if self.comm.world_size > 1:  # other ranks still evaluate
                raise
            self.stop.end(error)
            return None, False
        return report, self.comm.broadcast(report is not None)

    def _evaluate_pending(self) -> bool:
        """Evaluate the base model, or after a resume the step that was saved without its
        evaluation. Returns whether to continue."""
        step = self.state.step
        report, is_evaluated = self._evaluate(step)
        if report is not None and (step == 0 or self._complete_step(step, report)):
            for tracker in self.trackers:
                tracker.log(step, _accuracies(report))
        return is_evaluated

    def _complete_step(self, step: int, report: EvaluationReport) -> bool:
        """Add a late evaluation to its step's model card and metrics; returns if it was missing."""
        for card in model_cards(self.run_dir.checkpoints / checkpoint_name(step)):
            if card.exists() and NOT_EVALUATED in card.read_text(encoding="utf-8"):
                write_text_whole(card, self._model_card())
        if not self.run_dir.add_to_last_metrics(_accuracies(report)):
            return False
        self.state.wall_seconds = time.perf_counter() - self._started
        return True

    def _model_card(self) -> str:
        return model_card(self.recipe, self.state, self.evaluation.base_and_last())

    def _is_asked_to_stop(self) -> bool:
        """Returns whether any rank was asked to stop, and logs it the first time. Collective."""
        requested = any(self.comm.all_gather(self.stop.requested))
        if requested and not self._stop_is_logged:
            self._stop_is_logged = True
            reason = self.stop.reason or "another rank"
            logger.warning("stopping, asked by %s, with a checkpoint first", reason)
        return requested

    def _save_last_step(self) -> None:
        """Write the checkpoint of the last step that was made, unless it exists."""
        step = self.state.step
        checkpoint = self.run_dir.checkpoints / checkpoint_name(step)
        if not self.comm.broadcast(step == 0 or checkpoint.is_dir()):
            self._checkpoint()

    def _record(self, metrics: dict[str, Any], report: EvaluationReport | None) -> None:
        """Writes the metrics of a step, with the accuracies of its evaluation, to metrics.jsonl,
        observer and trackers; shows samples if due, and the trainer's notices. On rank 0."""
        if report is not None:
            metrics |= _accuracies(report)
        self.run_dir.append_metrics(metrics)
        self.observer.on_step(metrics)
        for tracker in self.trackers:
            tracker.log(metrics["step"], metrics)
        if samples_are_due(metrics["step"], self.recipe.run.steps):
            self._show_samples(metrics["step"])
        for notice in self.trainer.notices:
            logger.warning(notice)
            self.observer.on_notice(notice)
        self.trainer.notices.clear()

    def _show_samples(self, step: int) -> None:
        rows = sample_rows(self.trainer.generated, SAMPLES, self.trainer.parts.tokenizer)
        if not rows:  # nothing has arrived since the last step (`buffer_only`, asynchronous)
            return
        for tracker in self.trackers:
            tracker.log_samples(step, rows)
        self.observer.on_samples(step, rows)

    def _checkpoint(self) -> None:
        state = self.state
        started = time.perf_counter()
        parts, source = self.trainer.parts, self.trainer.source
        write_checkpoint(parts, source, state, self._model_card)
        seconds = time.perf_counter() - started
        logger.info("checkpoint of step %d: %.1f s", state.step, seconds)


HANG_SHARE = 1 / 6
"""Fraction of the time-out of collectives after which a step logs the stacks of all threads."""


def log_stacks_after(seconds: float) -> None:
    """Write the stacks of all threads to this rank's log every `seconds` until this is called
    again. They show where a rank waits for another one."""
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream:
            faulthandler.dump_traceback_later(seconds, repeat=True, file=handler.stream)


def _accuracies(report: EvaluationReport) -> dict[str, float]:
    """Returns the metrics of an evaluation."""
    return {f"eval/{name}": value for name, value in report.accuracies().items()}


SAMPLES, SAMPLES_EVERY_STEPS = 2, 50


def samples_are_due(step: int, last_step: int) -> bool:
    """Whether completions are shown after this step: the first, the last, and every 50th."""
    return step in (1, last_step) or step % SAMPLES_EVERY_STEPS == 0


def sample_rows(rollouts: Sequence[Rollout], count: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Describe up to `count` rollouts, evenly spaced so that their prompts differ if possible."""
    indices = np.linspace(0, len(rollouts) - 1, min(count, len(rollouts))).round().astype(int)
    return [
        {
            "rollout_id": rollout.rollout_id,
            "prompt": decoded(tokenizer, rollout.prompt_token_ids, skip_special_tokens=True),
            "completion": rollout.completion_text,
            "reward": rollout.reward,
            "verdict": rollout.verdict,
            "tokens": len(rollout.completion_token_ids),
        }
        for rollout in (rollouts[index] for index in indices)
    ]
