"""The files of a run as arrays (rollouts/, draws/, metrics.jsonl, recipe), and the checks that they
are complete."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from grpo_replay.errors import CheckpointError, SnapshotError
from grpo_replay.lab.inspection.rollout_columns import (
    NO_DRAWS,
    Rollouts,
    draw_records,
    find_rows,
    joined,
    rollout_records,
)
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.recipe import Recipe
from grpo_replay.storage.checkpoint import list_checkpoints, step_of, verify_checkpoint
from grpo_replay.storage.rollout_log import (
    ROLLOUT_FILE_SCHEMA,
    read_draw_table,
    read_rollout_table,
)
from grpo_replay.storage.run_directory import is_of_another_trainer
from grpo_replay.storage.starts import STARTS_FILE, Start, read_starts, start_of
from grpo_replay.types import first_score

_COLUMNS = (*(n for n in ROLLOUT_FILE_SCHEMA.names if n != "completion_text"), "completion_mask")
_NAMED_FAILURES = 5


def describe_row(
    context: str, columns: np.ndarray, *names: str, **further: np.ndarray
) -> Callable[[int], str]:
    """Return a function that describes row i for a failure message: its rollout id, and its values
    in the columns `names` (of lists, their lengths) and in `further` ones."""
    shown = {name: columns[name] for name in names} | further

    def describe(i: int) -> str:
        values = ", ".join(f"{name} {column[i]}" for name, column in shown.items())
        return f"{context}: rollout {columns['rollout_id'][i]} has {values}"

    return describe


@dataclass(frozen=True, slots=True, eq=False)
class RunFiles:
    """The files of one run, up to the last line of metrics.jsonl.

    `rollouts` has the columns of all steps, in file order; `rows_of_step[t]` is the slice of step
    t. Column `first_score` is the score of the first reward function that gave one, `trainable` the
    number of tokens that are not masked."""

    folder: Path
    recipe: Recipe
    starts: tuple[Start, ...]
    metrics: tuple[Mapping[str, Any], ...]
    rollouts: np.ndarray
    rows_of_step: Mapping[int, slice]
    draws_of_step: Mapping[int, np.ndarray]

    @property
    def steps(self) -> list[int]:
        return [int(line["step"]) for line in self.metrics]

    def rollouts_of(self, step: int) -> np.ndarray:
        return self.rollouts[self.rows_of_step[step]]

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the row of each rollout id; -1 for unknown ids."""
        return find_rows(self.rollouts["rollout_id"], ids)

    def draws_of(self, step: int) -> np.ndarray:
        """Returns the draws of the step's draws/ file; empty if there is none."""
        return self.draws_of_step.get(step, NO_DRAWS)

    def start_of(self, step: int) -> Start | None:
        """The settings of `step` that a resume may change; None in a run of another trainer."""
        return start_of(self.starts, step)

    def checkpoints(self) -> dict[int, Path]:
        """Returns the checkpoints up to the last step, by step."""
        paths = list_checkpoints(self.folder / "checkpoints")
        by_step = {step_of(path) or 0: path for path in paths}
        return {step: path for step, path in by_step.items() if step <= self.steps[-1]}


@dataclass
class Check:
    """One line of the report: the number of comparisons, of failures, and the first failures as
    messages. A check without comparisons passes."""

    name: str
    statement: str
    checked: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)

    def expect(self, holds: bool, failure: str) -> None:
        """Count one comparison."""
        self.expect_all(np.array([holds]), lambda _: failure)

    def expect_all(self, holds_N: np.ndarray, failure: Callable[[int], str]) -> None:
        """Count N comparisons. `failure(i)` is the message for the i-th."""
        failing = np.flatnonzero(~holds_N)
        self.checked += len(holds_N)
        self.failed += len(failing)
        self.failures += [failure(int(i)) for i in failing[: _NAMED_FAILURES - len(self.failures)]]

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def detail(self) -> str:
        others = self.failed - len(self.failures)
        ending = [f"and {others} more"] if others else []
        return "; ".join([*self.failures, *ending]) or self.statement


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All checks of a run, in order."""

    steps: int
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a JSON object: `passed`, `steps` and `checks`."""
        names = ("name", "passed", "checked", "detail")
        checks = [{name: getattr(check, name) for name in names} for check in self.checks]
        return {"passed": self.passed, "steps": self.steps, "checks": checks}


def read_run_files(folder: Path) -> RunFiles:
    """Read a run's files up to its last metrics. Raises SnapshotError if missing or damaged."""
    source = open_source(folder)
    steps = {int(line["step"]) for line in source.metrics}
    files = [(step, path) for step, path in source.rollout_files if step in steps]
    if source.recipe is None or not files:
        raise SnapshotError(
            f"{folder}: verification needs a run directory with recipe.yaml, metrics.jsonl and "
            "rollouts/"
        )
    rollouts = joined(_rollouts(step, path) for step, path in files).view(np.ndarray)
    rows_of_step = {
        step: slice(*np.searchsorted(rollouts["logged_step"], [step, step + 1]))
        for step, _ in files
    }
    draws = {
        step: draw_records(read_draw_table(path)).view(np.ndarray)
        for step, path in source.draw_files
        if step in steps
    }
    starts = read_starts(folder)
    return RunFiles(folder, source.recipe, starts, source.metrics, rollouts, rows_of_step, draws)


def _rollouts(step: int, path: Path) -> Rollouts:
    """Reads a file of rollouts, with the columns `first_score` and `trainable`."""
    table = read_rollout_table(path, _COLUMNS)
    scores, masks = (table[name].to_pylist() for name in ("reward_scores", "completion_mask"))
    lengths = pc.list_value_length(table["completion_token_ids"]).to_numpy()
    first_scores = list(map(first_score, scores, table["reward"].to_numpy()))
    trainable = [n if mask is None else sum(mask) for n, mask in zip(lengths, masks, strict=True)]
    return rollout_records(
        table,
        step,
        first_score=np.array(first_scores, np.float32),
        trainable=np.array(trainable, np.int64),
    )


def check_files(run: RunFiles) -> Check:
    """Check that metrics.jsonl has steps 1, 2, 3, …, to the last of a finished run, and that every
    step has its file in rollouts/, and in draws/ if it replays."""
    check = Check("files", "steps without gaps or duplicates, each with its rollouts and draws")
    is_known = is_of_another_trainer(run.folder) or run.start_of(1) is not None
    check.expect(is_known, f"{STARTS_FILE} has no start of the first step")
    for position, step in enumerate(run.steps, start=1):
        check.expect(step == position, f"metrics.jsonl line {position} is step {step}")
        check.expect(step in run.rows_of_step, f"rollouts/step_{step:06d}.parquet is missing")
        check.expect(
            step in run.draws_of_step or not run.recipe.replays,
            f"draws/step_{step:06d}.parquet is missing",
        )
    summary = run.folder / "summary.json"
    if summary.exists():
        steps = json.loads(summary.read_text(encoding="utf-8"))["steps"]
        check.expect(steps == len(run.steps), f"metrics.jsonl lacks some of the {steps} steps")
    return check


def check_checkpoints(run: RunFiles) -> list[Check]:
    """Check every checkpoint against its manifest; none for a run in another trainer."""
    if not (run.folder / "checkpoints").is_dir():
        return []
    check = Check("checkpoints", "every file as its manifest says")
    for path in run.checkpoints().values():
        try:
            verify_checkpoint(path)
            check.expect(True, "")
        except CheckpointError as error:
            check.expect(False, str(error))
    return [check]
