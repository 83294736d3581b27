"""One finished run, or one evaluation file, as a report reads it."""

import functools
import re
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
from grpo_replay.storage.recipe_history import RecipeHistory, differences, read_history
from grpo_replay.storage.rollout_log import read_metrics
from grpo_replay.storage.run_directory import (
    LOCK,
    is_locked,
    is_of_another_trainer,
    read_summary,
)

_EVALUATION_FILE = re.compile(r"step_(\d+)\.json")


@dataclass(frozen=True, slots=True, eq=False)
class StepLog:
    """The metrics of a run, one row per training step."""

    lines: tuple[Mapping[str, Any], ...]

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str) -> np.ndarray:
        """float64 [T]: a metric of every step; NaN where it is undefined."""
        values = [line.get(name) for line in self.lines]
        return np.array([np.nan if value is None else value for value in values], dtype=float)

    def running_total(self, name: str) -> np.ndarray:
        """float64 [T + 1]: the sum of a metric up to the end of each step; step 0 is first."""
        return np.concatenate([[0.0], np.cumsum(self.column(name))])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The accuracy that tables, curves and targets are about: `avg_at_k` or `pass_at_k` of one
    benchmark, or of the `mean` over all."""

    benchmark: str = "mean"
    metric: str = "avg_at_k"

    def of(self, report: EvaluationReport) -> float:
        """The outcome of an evaluation, a fraction."""
        numbers = {"mean": report.sampled.mean, **report.sampled.benchmarks}
        return float(getattr(numbers[self.benchmark], self.metric))


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRun:
    """What a report uses of a run, or of an evaluation file.

    `final` has per-sample rows if their file exists. `evaluations` are those that are comparable
    with `final` and have as many samples, by training step. An evaluation file has no seed, recipe
    or log, and `evaluations` is empty. `recipe` is that of the first step, with the number of steps
    of the last; `recipe_changes` are the keys that a resume changed, apart from that number.
    """

    path: Path
    seed: int | None
    recipe: Recipe | None
    final: EvaluationReport
    evaluations: dict[int, EvaluationReport]
    log: StepLog
    wall_seconds: float | None
    recipe_changes: tuple[str, ...] = ()

    @property
    def untimed_steps(self) -> int:
        """Steps that were repeated from a journal."""
        return int(np.isnan(self.log.column("step_time")).sum())

    @property
    def base(self) -> EvaluationReport | None:
        """The evaluation of the base model, before the first step."""
        return self.evaluations.get(0)

    def curve(self, outcome: Outcome) -> tuple[list[int], list[float]]:
        """The evaluated steps in order, and the outcome at each."""
        steps = list(self.evaluations)
        return steps, [outcome.of(self.evaluations[step]) for step in steps]


@functools.cache
def evaluation_at(run: FinishedRun, step: int) -> EvaluationReport:
    """The evaluation after a step, with per-sample rows if their file exists."""
    return run.final if step == len(run.log) else _without_texts(_evaluation_file(run.path, step))


def read_evaluation(path: Path) -> FinishedRun:
    """An evaluation file. Raises EvaluationFileError if it cannot be read."""
    report = _without_texts(path)
    return FinishedRun(path, None, None, report, {}, StepLog(()), None)


class UnfinishedRun(DataError):
    """A run without a result. `reason` says how far it came."""

    def __init__(self, path: Path, reason: str, remedy: str) -> None:
        super().__init__(f"{path}: {reason}; a report needs finished runs: {remedy}, or omit it")
        self.reason = reason


def read_finished_run(path: Path) -> FinishedRun:
    """A finished run. Raises UnfinishedRun, and DataError for a damaged or newer one."""
    if not (path / "recipe.yaml").exists():
        raise UnfinishedRun(path, "not started", "start it")
    history = read_history(path)
    log = StepLog(tuple(map(_timed, read_metrics(path / "metrics.jsonl"))))
    summary = _summary(path, f"step {len(log)} of {history.latest.run.steps}")
    if len(log) != summary["steps"]:
        raise DataError(
            f"{path}: metrics.jsonl has {len(log)} lines, but summary.json {summary['steps']} "
            "steps: restore the two files together"
        )
    final = _final(path, len(log))
    samples = _samples(final)  # a resume may change them, and pass@k with them
    evaluations = {
        step: report
        for step, report in _read_curve(path / "eval").items()
        if step <= len(log) and are_comparable(report, final) and _samples(report) == samples
    }
    method, changes = _method(history), _recipe_changes(history)
    seed, seconds = method.run.seed, summary["wall_seconds"]
    return FinishedRun(path, seed, method, final, evaluations, log, seconds, changes)


def _timed(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metrics of a step. One that a resume, or a run that replays a journal, repeated from the
    journal waited for no sampler: its time is unknown."""
    repeated = "async/sampler_idle" in line and line.get("cost/generation_seconds") is None
    return {**line, "step_time": None} if repeated else line


def _summary(path: Path, done: str) -> dict[str, Any]:
    """summary.json. Raises UnfinishedRun, which says what is `done`, while there is none."""
    if is_locked(path / LOCK):
        raise UnfinishedRun(path, f"still running, {done}", "wait for it")
    summary = read_summary(path)
    if summary is None and is_of_another_trainer(path):
        remedy = "evaluate its checkpoints (grpo-replay eval --ckpt) and report those files"
        raise UnfinishedRun(path, "a run of another trainer, which has no evaluations", remedy)
    if summary is None:
        remedy = f"continue it with grpo-replay train --resume --output-dir {path}"
        raise UnfinishedRun(path, f"stopped after {done}", remedy)
    return summary


def _samples(report: EvaluationReport) -> dict[str, int]:
    return {name: result.k for name, result in report.sampled.benchmarks.items()}


def _read_curve(folder: Path) -> dict[int, EvaluationReport]:
    """The evaluations in a run's `eval/` by training step, in order, without per-sample rows.
    Raises EvaluationFileError for a damaged file."""
    found = {
        int(match.group(1)): path
        for path in folder.glob("step_*.json")
        if (match := _EVALUATION_FILE.fullmatch(path.name))
    }
    return {step: read_report(found[step], with_samples=False) for step in sorted(found)}


def _method(history: RecipeHistory) -> Recipe:
    """The recipe that a run began with; a resume for more steps is the same method."""
    run = history.first.run.model_copy(update={"steps": history.latest.run.steps})
    return history.first.model_copy(update={"run": run})


def _recipe_changes(history: RecipeHistory) -> tuple[str, ...]:
    """`key: old -> new (after step N)` of every change at a resume, but of `run.steps`."""
    found, before = [], history.first
    for step, recipe in history.changed:
        found += [
            f"{key}: {old!r} -> {new!r} (after step {step})"
            for key, old, new in differences(before, recipe)
            if key != "run.steps"
        ]
        before = recipe
    return tuple(found)


def _final(path: Path, steps: int) -> EvaluationReport:
    file = _evaluation_file(path, steps)
    if not file.exists():
        raise EvaluationFileError(
            f"{path}: no evaluation of its last step ({file.name}): name held-out problems in "
            f"eval.benchmarks before training, or report the file of grpo-replay eval --ckpt {path}"
        )
    return _without_texts(file)


def _without_texts(file: Path) -> EvaluationReport:
    """The completions of all runs would fill the memory, and no number needs them."""
    return read_report(file, with_texts=False)


def _evaluation_file(path: Path, step: int) -> Path:
    return path / "eval" / f"step_{step:06d}.json"
