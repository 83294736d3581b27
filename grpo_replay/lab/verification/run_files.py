"""The files of a run as arrays: rollouts/, draws/, metrics.jsonl, its recipes, checkpoints; and the
tally of a check."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.errors import CheckpointError, SnapshotError
from grpo_replay.recipe import Recipe
from grpo_replay.replay.snapshot import SNAPSHOT_SCHEMA, SNAPSHOT_VERSION, read_snapshot_facts
from grpo_replay.storage.checkpoint import list_checkpoints, step_of, verify_checkpoint
from grpo_replay.storage.parquet import open_parquet, refuse_nulls
from grpo_replay.storage.recipe_history import RecipeHistory, read_history
from grpo_replay.storage.rollout_log import (
    UPDATE_COLUMNS,
    read_draw_table,
    read_metrics,
    read_rollout_table,
    step_path,
)

_COLUMNS = (
    *("rollout_id", "group_id", "prompt_id", "completion_index", "birth_step", "reward"),
    *("policy_version", "policy_version_end"),
    *("advantage", "group_reward_mean", "group_reward_std", "group_correct", "kept"),
    *("completion_token_ids", "behavior_logprobs", "tokens"),
    *("prompt_token_ids", "finish_reason", "verdict"),
    *("clip_fraction", "ratio_mean", "ratio_max", "approx_kl", "entropy"),
)
_COMPUTED = ("advantage_is_null", "first_score", "truncated", "trainable")
_DRAW_COLUMNS = (
    *("step", "rollout_id", "age_steps", "probability"),
    *("clip_fraction", "ratio_mean", "ratio_max", "approx_kl", "entropy"),
)
_NEVER_NULL = (
    *("rollout_id", "group_id", "prompt_id", "completion_index", "birth_step", "kept"),
    *("policy_version", "policy_version_end", "group_correct"),
    *("prompt_token_ids", "completion_token_ids", "finish_reason", "verdict"),
)
_LISTS = ("prompt_token_ids", "completion_token_ids", "behavior_logprobs")
_USES = ("priority", "times_used", "last_used_step")

Columns = Mapping[str, np.ndarray]


_NAMED_FAILURES = 5


@dataclass(frozen=True, slots=True, eq=False)
class RunFiles:
    """One run. `rollouts` has the columns of all steps, in file order. A list column contains the
    lengths of the lists (-1 if null). Null numbers are NaN, or -1 in columns of counts.
    `first_score` is the score of the first reward function; `truncated`, whether it was cut off;
    `trainable`, the number of its tokens that are not masked.
    `rows_of_step[t]` is the slice of step t. A recipe that was changed at a resume holds from the
    next step on: `recipe_at`. What was written after the last line of its metrics is left out."""

    folder: Path
    recipes: RecipeHistory
    metrics: tuple[Mapping[str, Any], ...]
    rollouts: Columns
    rows_of_step: Mapping[int, slice]
    draws_of_step: Mapping[int, Columns]

    @property
    def recipe(self) -> Recipe:
        """The recipe of the last step. Checks of single steps use `recipe_at`."""
        return self.recipes.latest

    def recipe_at(self, step: int) -> Recipe:
        """The recipe under which a step was trained."""
        return self.recipes.at(step)

    def groups(self, rows: slice) -> dict[int, np.ndarray]:
        """The rows of each group of a step, by its id."""
        ids = self.rollouts["group_id"][rows]
        return {int(i): rows.start + np.flatnonzero(ids == i) for i in np.unique(ids)}

    def is_too_old(self, step: int, birth_step: int) -> bool:
        """True if what was born then is too old to be trained on at `step`."""
        limit = self.recipe_at(step).replay.max_age_steps
        return limit is not None and step - birth_step > limit

    def is_dropped(self, step: int, row: int) -> bool:
        """True if an asynchronous step does not train on a rollout although its group has a signal:
        too old, or it straddles an update and the recipe drops such."""
        recipe = self.recipe_at(step)
        if not recipe.run.is_async:
            return False
        first, last = (self.rollouts[n][row] for n in ("policy_version", "policy_version_end"))
        straddles = recipe.sampling.collection.straddlers == "drop" and first != last
        return bool(straddles) or self.is_too_old(step, int(self.rollouts["birth_step"][row]))

    def draws_per_step(self, step: int) -> int:
        """Draws of the step: one for each update, if its file says so."""
        draws = self.draws_of_step.get(step, {})
        if "update" not in draws and len(draws.get("step", ())):
            return 1
        return self.recipe_at(step).draws_per_step

    @property
    def steps(self) -> list[int]:
        return [int(line["step"]) for line in self.metrics]

    def checkpoints(self) -> list[Path]:
        """Those up to the last step, ascending."""
        found = list_checkpoints(self.folder / "checkpoints")
        return [path for path in found if (step_of(path) or 0) <= self.steps[-1]]

    def checkpoint_steps(self) -> list[int]:
        """The steps whose checkpoint holds the weights, ascending."""
        found = self.checkpoints()
        return [step_of(path) or 0 for path in found if (path / "model" / "config.json").exists()]

    def snapshots(self) -> dict[int, Path]:
        """The buffer.parquet of each checkpoint, by the step after which it was written; of a run
        in TRL, whose checkpoints are named by updates, that of checkpoint-N/."""
        of_trl = self.folder.glob("checkpoint-*/buffer.parquet")
        found = {read_snapshot_facts(path)["step"]: path for path in of_trl}
        paths = [path / "buffer.parquet" for path in self.checkpoints()]
        return found | {step_of(path.parent) or 0: path for path in paths if path.exists()}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `checked` is the number of comparisons; with none the check has
    passed."""

    name: str
    passed: bool
    checked: int
    detail: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All checks of a run, in order."""

    steps: int
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object: `passed`, `steps` and `checks`."""
        return {"passed": self.passed, **asdict(self)}


class Tally:
    """Counts the comparisons of one check and keeps the first failures."""

    def __init__(self, name: str, statement: str) -> None:
        self.name = name
        self.statement = statement
        self.checked = 0
        self.failed = 0
        self.notes: list[str] = []
        self._failures: list[str] = []

    def expect(self, holds: bool, failure: str) -> bool:
        """Count one comparison. Returns `holds`."""
        self.checked += 1
        if not holds:
            self.failed += 1
            if len(self._failures) < _NAMED_FAILURES:
                self._failures.append(failure)
        return bool(holds)

    def expect_all(self, holds_N: np.ndarray, failure: Callable[[int], str]) -> None:
        """Count N comparisons. `failure(i)` is the message for the i-th."""
        self.checked += len(holds_N)
        wrong = np.flatnonzero(~holds_N)
        self.failed += len(wrong)
        for i in wrong[: max(_NAMED_FAILURES - len(self._failures), 0)]:
            self._failures.append(failure(int(i)))

    def result(self) -> Check:
        detail = self.statement
        if self.failed:
            more = self.failed - len(self._failures)
            detail = "; ".join(self._failures) + (f"; and {more} more" if more else "")
        return Check(self.name, not self.failed, self.checked, "; ".join([detail, *self.notes]))


def read_run_files(folder: Path) -> RunFiles:
    """Read the files of a run. Raises SnapshotError if they are missing or damaged.

    Files of steps that metrics.jsonl does not list are skipped: the run was interrupted there.
    """
    recipe_path, metrics_path = folder / "recipe.yaml", folder / "metrics.jsonl"
    for path in (recipe_path, metrics_path, folder / "rollouts"):
        if not path.exists():
            raise SnapshotError(
                f"{path}: missing; verification needs a run directory with recipe.yaml, "
                "metrics.jsonl and rollouts/"
            )
    recipes = read_history(folder)
    metrics = read_metrics(metrics_path)
    steps = sorted({int(line["step"]) for line in metrics})
    rollouts, rows_of_step = _read_rollouts(folder / "rollouts", steps)
    draws = {
        step: _read_draws(step_path(folder / "draws", step))
        for step in steps
        if step_path(folder / "draws", step).exists()
    }
    return RunFiles(folder, recipes, metrics, rollouts, rows_of_step, draws)


def queries(rows: list[int], rollouts: Columns) -> list[list[int]]:
    """The rows of each group. Groups are in the order of their first row."""
    by_group: dict[int, list[int]] = {}
    for row in rows:
        by_group.setdefault(int(rollouts["group_id"][row]), []).append(row)
    return list(by_group.values())


def check_files(run: RunFiles) -> Check:
    """metrics.jsonl lists steps 1, 2, 3, …, and every step has its file in rollouts/, and in draws/
    if it replays."""
    tally = Tally("files", "steps without gaps or duplicates, each with its rollouts and draws")
    for position, step in enumerate(run.steps, start=1):
        tally.expect(step == position, f"metrics.jsonl line {position} is step {step}")
        tally.expect(step in run.rows_of_step, f"rollouts/step_{step:06d}.parquet is missing")
        tally.expect(
            step in run.draws_of_step or not run.recipe_at(step).replay.replays,
            f"draws/step_{step:06d}.parquet is missing",
        )
    return tally.result()


def check_checkpoints(run: RunFiles) -> list[Check]:
    """Each checkpoint against its manifest, and whether the one that was due last is there. No
    check of a run in another trainer, whose checkpoints are that trainer's."""
    if not (run.folder / "checkpoints").is_dir():
        return []
    tally = Tally("checkpoints", "every file as its manifest says; the last that was due is there")
    found = run.checkpoints()
    every, last = run.recipe.checkpoint.every_steps, run.steps[-1]
    finished = (run.folder / "summary.json").exists()
    due = last if finished else (last - 1) // every * every
    steps = [step_of(path) or 0 for path in found]
    tally.expect(not due or max(steps, default=0) >= due, f"no checkpoint of step {due}, then due")
    for path in found:
        try:
            verify_checkpoint(path)
            tally.expect(True, "")
        except CheckpointError as error:
            tally.expect(False, str(error))
    return [tally.result()]


def read_buffer_columns(path: Path) -> tuple[Columns, pa.Table, Any]:
    """Priorities and uses of a snapshot (-1: never used), its other columns, and the step after
    which it was written. Raises SnapshotError."""
    step = read_snapshot_facts(path)["step"]
    with open_parquet(path, "buffer", SNAPSHOT_VERSION, SNAPSHOT_SCHEMA) as file:
        table = file.read()
    uses = {name: pc.fill_null(table[name], -1).to_numpy() for name in _USES}
    return uses, table.drop_columns(list(_USES)), step


def _read_rollouts(folder: Path, steps: list[int]) -> tuple[Columns, dict[int, slice]]:
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*_COLUMNS, *_COMPUTED)}
    rows_of_step, total = {}, 0
    for step in steps:
        path = step_path(folder, step)
        if not path.exists():
            continue
        table = read_rollout_table(path, (*_COLUMNS, "reward_scores", "completion_mask"))
        refuse_nulls(path, table, _NEVER_NULL)
        for name in _COLUMNS:
            parts[name].append(_to_numpy(table[name], name))
        parts["advantage_is_null"].append(table["advantage"].is_null().to_numpy())
        parts["first_score"].append(_first_scores(table))
        parts["truncated"].append(pc.equal(table["finish_reason"], "length").to_numpy())
        parts["trainable"].append(_trainable(table))
        rows_of_step[step] = slice(total, total + table.num_rows)
        total += table.num_rows
    if not rows_of_step:
        raise SnapshotError(f"{folder}: no rollouts of any step in metrics.jsonl")
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}, rows_of_step


def _first_scores(table: pa.Table) -> np.ndarray:
    """The score of the first reward function; the reward, if it is the only one."""
    pairs = zip(table["reward_scores"].to_pylist(), table["reward"].to_pylist(), strict=True)
    return np.array([scores[0] if scores else reward for scores, reward in pairs], np.float32)


def _trainable(table: pa.Table) -> np.ndarray:
    lengths = pc.list_value_length(table["completion_token_ids"]).to_numpy()
    masks = enumerate(table["completion_mask"].to_pylist())
    return np.array([lengths[row] if mask is None else sum(mask) for row, mask in masks], np.int64)


def _to_numpy(column: pa.ChunkedArray, name: str) -> np.ndarray:
    if name in _LISTS:
        return pc.fill_null(pc.list_value_length(column), -1).to_numpy()
    if name == "tokens":
        return pc.fill_null(column, -1).to_numpy()
    return column.to_numpy()


def _read_draws(path: Path) -> Columns:
    table = read_draw_table(path)
    by_update = [name for name in UPDATE_COLUMNS.names if name in table.column_names]
    refuse_nulls(path, table, (*_DRAW_COLUMNS[:4], *by_update))
    columns = {name: table[name].to_numpy() for name in (*_DRAW_COLUMNS, *by_update)}
    return {**columns, "tokens": pc.fill_null(table["tokens"], -1).to_numpy()}
