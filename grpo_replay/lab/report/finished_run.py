"""A finished run, as read by a report."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.errors import DataError, EvaluationFileError
from grpo_replay.evaluation.evaluation_report import (
    EvaluationReport,
    are_comparable,
    read_report,
)
from grpo_replay.recipe import Recipe
from grpo_replay.storage.rollout_log import read_metrics
from grpo_replay.storage.run_directory import (
    LOCK,
    is_locked,
    is_of_another_trainer,
    read_summary,
)
from grpo_replay.storage.stored_recipe import read_recipe_file


@dataclass(frozen=True, slots=True)
class Outcome:
    """The accuracy to show: `avg_at_k` or `pass_at_k` of one benchmark or the `mean` of all."""

    benchmark: str = "mean"
    metric: str = "avg_at_k"

    def of(self, report: EvaluationReport) -> float:
        """Returns the outcome of an evaluation, a fraction."""
        numbers = {"mean": report.sampled.mean, **report.sampled.benchmarks}
        return float(getattr(numbers[self.benchmark], self.metric))


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRun:
    """The parts of a run that a report uses.

    `lines` has the metrics of its steps. `final` is the last evaluation, with per-sample rows if
    their file exists; `evaluations`, by training step, are those comparable with it.
    """

    path: Path
    recipe: Recipe
    final: EvaluationReport
    evaluations: dict[int, EvaluationReport]
    lines: tuple[Mapping[str, Any], ...]
    wall_seconds: float

    @property
    def seed(self) -> int:
        return self.recipe.run.seed

    def column(self, name: str) -> np.ndarray:
        """float64 [T]: a metric of every step; NaN where it is undefined."""
        values = [line.get(name) for line in self.lines]
        return np.array([np.nan if value is None else value for value in values], dtype=float)

    def running_total(self, name: str) -> np.ndarray:
        """float64 [T + 1]: the sum of a metric up to the end of each step; step 0 is first."""
        return np.concatenate([[0.0], np.cumsum(self.column(name))])

    @property
    def base(self) -> EvaluationReport | None:
        """The evaluation of the base model, before the first step."""
        return self.evaluations.get(0)

    def curve(self, outcome: Outcome) -> tuple[list[int], list[float]]:
        """Returns the evaluated steps in order, and the outcome at each."""
        steps = list(self.evaluations)
        return steps, [outcome.of(self.evaluations[step]) for step in steps]


@functools.cache
def evaluation_at(run: FinishedRun, step: int) -> EvaluationReport:
    """Returns the evaluation after a step, with per-sample rows if their file exists."""
    return run.final if step == len(run.lines) else _without_texts(_evaluation(run.path, step))


class UnfinishedRun(DataError):
    """Raised for a run without a result; `reason` has its progress."""

    def __init__(self, path: Path, reason: str, remedy: str) -> None:
        super().__init__(f"{path}: {reason}; a report needs finished runs: {remedy}, or omit it")
        self.reason = reason


def read_finished_run(path: Path) -> FinishedRun:
    """Read a finished run. Raises UnfinishedRun, and DataError for one that cannot be read."""
    if not (path / "recipe.yaml").exists():
        raise UnfinishedRun(path, "not started", "start it")
    recipe = read_recipe_file(path / "recipe.yaml")
    lines = tuple(map(_timed, read_metrics(path / "metrics.jsonl")))
    summary = _summary(path, f"step {len(lines)} of {recipe.run.steps}")
    last = _evaluation(path, len(lines))
    if not last.exists():
        raise EvaluationFileError(
            f"{path}: no evaluation of its last step ({last.name}): name held-out problems in "
            "eval.benchmarks before training, or omit the run"
        )
    final, seconds = _without_texts(last), summary["wall_seconds"]
    evaluations = {
        int(file.stem.removeprefix("step_")): report
        for file in sorted(last.parent.glob("step_*.json"))
        if are_comparable(report := read_report(file, with_samples=False), final)
    }
    return FinishedRun(path, recipe, final, evaluations, lines, seconds)


def _timed(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a step's metrics, without time if it was repeated from a journal."""
    repeated = "async/sampler_idle" in line and line.get("cost/generation_seconds") is None
    return {**line, "step_time": None} if repeated else line


def _summary(path: Path, progress: str) -> dict[str, Any]:
    """Read summary.json. Raises UnfinishedRun, with the `progress`, if there is none yet."""
    if is_locked(path / LOCK):
        raise UnfinishedRun(path, f"still running, {progress}", "wait for it")
    summary = read_summary(path)
    if summary is None and is_of_another_trainer(path):
        remedy = "evaluate its checkpoints, and compare those files (grpo-replay eval --compare)"
        raise UnfinishedRun(path, "a run of another trainer, which has no evaluations", remedy)
    if summary is None:
        remedy = f"continue it with grpo-replay train --resume --output-dir {path}"
        raise UnfinishedRun(path, f"stopped after {progress}", remedy)
    return summary


def _without_texts(file: Path) -> EvaluationReport:
    """Read an evaluation without completions, which no number needs."""
    return read_report(file, with_texts=False)


def _evaluation(path: Path, step: int) -> Path:
    return path / "eval" / f"step_{step:06d}.json"
