"""Scalar columns of many rollouts as numpy arrays, from which every summary is computed.

Files are read one batch of rows at a time: memory holds the scalars (about 100 bytes per rollout)
and one batch of token ids.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.errors import SnapshotError
from grpo_replay.lab.inspection.column_reader import iter_columns, list_lengths
from grpo_replay.terminal.progress import tracked

SCALARS = (
    "rollout_id",
    "group_id",
    "prompt_id",
    "birth_step",
    "reward",
    "advantage",
    "group_reward_std",
    "group_correct",
    "finish_reason",
    "completion_token_ids",
)
NEVER = -1
"""The value of `last_used_step` for a rollout that was never drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutColumns:
    """Aligned arrays [N], in file order. `prompt` indexes `prompt_ids`."""

    rollout_id: np.ndarray  # int64
    group_id: np.ndarray  # int64
    birth_step: np.ndarray  # int64
    logged_step: (
        np.ndarray
    )  # int64, that took it from the sampler; later than birth if asynchronous
    reward: np.ndarray  # float64, NaN if it did not come
    advantage: np.ndarray  # float64, NaN if the rollout was dropped
    group_std: np.ndarray  # float64, 0 if the group's rewards are equal, NaN if fewer than two came
    group_correct: np.ndarray  # int32, correct rollouts of the group
    tokens: np.ndarray  # int32, of the completion
    truncated: np.ndarray  # bool
    kept: np.ndarray  # bool
    prompt: np.ndarray  # int32
    priority: np.ndarray  # float64, NaN outside a buffer
    times_used: np.ndarray  # int32, draws
    last_used_step: np.ndarray  # int64, NEVER if it was not drawn
    prompt_ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rollout_id)

    @property
    def correct(self) -> np.ndarray:
        """bool [N]: better than its group, or of a group that is all correct; False for the rest
        of what was dropped."""
        return (self.advantage > 0) | ((self.group_std == 0) & (self.group_correct > 0))

    def take(self, rows: np.ndarray) -> "RolloutColumns":
        """The rows selected by a mask or an index array."""
        arrays = {
            field.name: getattr(self, field.name)[rows]
            for field in fields(self)
            if field.name != "prompt_ids"
        }
        return replace(self, **arrays)


class _Collector:
    """Collects batches into RolloutColumns. Prompt ids are coded in order of appearance."""

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = [
            {name: np.zeros(0, dtype) for name, dtype in _DTYPES.items()}
        ]
        self._codes: dict[str, int] = {}

    def add(self, part: dict[str, np.ndarray], prompt_ids: pa.Array) -> None:
        part["prompt"] = self._encode(prompt_ids)
        self._parts.append(part)

    def _encode(self, prompt_ids: pa.Array) -> np.ndarray:
        encoded = prompt_ids.dictionary_encode()
        codes = [
            self._codes.setdefault(text, len(self._codes))
            for text in encoded.dictionary.to_pylist()
        ]
        return np.array(codes, dtype=np.int32)[encoded.indices.to_numpy(zero_copy_only=False)]

    def columns(self) -> RolloutColumns:
        arrays = {name: np.concatenate([part[name] for part in self._parts]) for name in _DTYPES}
        return RolloutColumns(prompt_ids=tuple(self._codes), **arrays)


_DTYPES = {
    "rollout_id": np.int64,
    "group_id": np.int64,
    "birth_step": np.int64,
    "logged_step": np.int64,
    "reward": np.float64,
    "advantage": np.float64,
    "group_std": np.float64,
    "group_correct": np.int32,
    "tokens": np.int32,
    "truncated": np.bool_,
    "kept": np.bool_,
    "prompt": np.int32,
    "priority": np.float64,
    "times_used": np.int32,
    "last_used_step": np.int64,
}


def _scalars(batch: pa.RecordBatch) -> dict[str, np.ndarray]:
    def array(name: str, dtype: type) -> np.ndarray:
        return np.asarray(batch.column(name).to_numpy(zero_copy_only=False)).astype(dtype)

    count = batch.num_rows
    return {
        "rollout_id": array("rollout_id", np.int64),
        "group_id": array("group_id", np.int64),
        "birth_step": array("birth_step", np.int64),
        "logged_step": array("birth_step", np.int64),
        "reward": array("reward", np.float64),
        "advantage": array("advantage", np.float64),
        "group_std": array("group_reward_std", np.float64),
        "group_correct": array("group_correct", np.int32),
        "tokens": list_lengths(batch.column("completion_token_ids")).to_numpy(zero_copy_only=False),
        "truncated": pc.equal(batch.column("finish_reason"), "length").to_numpy(
            zero_copy_only=False
        ),
        "kept": array("kept", np.bool_),
        "priority": np.full(count, np.nan),
        "times_used": np.zeros(count, dtype=np.int32),
        "last_used_step": np.full(count, NEVER, dtype=np.int64),
    }


def no_rollouts() -> RolloutColumns:
    """Columns without rows."""
    return _Collector().columns()


def read_stored(path: Path) -> RolloutColumns:
    """The rollouts of a snapshot (buffer.parquet). Raises SnapshotError."""
    names = (*SCALARS, "kept", "priority", "times_used", "last_used_step")
    collector = _Collector()
    for batch in iter_columns(path, "buffer", names):
        part = _scalars(batch)
        part["priority"] = batch.column("priority").to_numpy(zero_copy_only=False)
        part["times_used"] = batch.column("times_used").to_numpy(zero_copy_only=False)
        used = pc.fill_null(batch.column("last_used_step"), NEVER)
        part["last_used_step"] = used.to_numpy(zero_copy_only=False)
        _refuse_non_numbers(path, part, batch)
        collector.add(part, batch.column("prompt_id"))
    return collector.columns()


def read_log(files: Sequence[tuple[int, Path]]) -> RolloutColumns:
    """Every rollout of the rollout log, including dropped ones. Raises SnapshotError, also for a
    file that holds another step, and for a reward or advantage that is not a number."""
    collector = _Collector()
    for step, path, batch in _log_batches(files):
        part = _scalars(batch)
        born = part["birth_step"]
        _refuse_another_step(path, born[born > step])
        _refuse_non_numbers(path, part, batch)
        part |= {"logged_step": np.full(batch.num_rows, step, dtype=np.int64)}
        collector.add(part, batch.column("prompt_id"))
    columns = collector.columns()
    _refuse_doubled(files, columns.rollout_id)
    return columns


def _log_batches(files: Sequence[tuple[int, Path]]) -> Iterator[tuple[int, Path, pa.RecordBatch]]:
    for step, path in tracked(files, "reading rollouts"):
        for batch in iter_columns(path, "rollouts", (*SCALARS, "kept")):
            yield step, path, batch


def _refuse_another_step(path: Path, wrong_steps: np.ndarray) -> None:
    if wrong_steps.size:
        raise SnapshotError(
            f"{path} holds rows of step {wrong_steps[0]}: the file was renamed, swapped or copied; "
            "restore it from a copy"
        )


def _refuse_doubled(files: Sequence[tuple[int, Path]], ids_N: np.ndarray) -> None:
    ids, counts = np.unique(ids_N, return_counts=True)
    if (counts > 1).any():
        raise SnapshotError(
            f"{files[0][1].parent}: rollout {ids[counts > 1][0]} is in the files twice: one "
            "of them is the copy of another; restore it from a copy"
        )


def _refuse_non_numbers(path: Path, part: dict[str, np.ndarray], batch: pa.RecordBatch) -> None:
    """A null reward is one that did not come; whatever was kept has one."""
    came_N = batch.column("reward").is_valid().to_numpy(zero_copy_only=False)
    for name, needed_N in (("reward", came_N | part["kept"]), ("advantage", part["kept"])):
        bad = np.flatnonzero(~np.isfinite(part[name]) & needed_N)
        if bad.size:
            raise SnapshotError(
                f"{path}: {name} of rollout {part['rollout_id'][bad[0]]} is "
                f"{part[name][bad[0]]} ({bad.size} of {len(part[name])} rows): the file was "
                "changed; restore it from a copy"
            )


@dataclass(frozen=True, slots=True, eq=False)
class DrawColumns:
    """All draws of a run: aligned arrays [M], in draw order."""

    step: np.ndarray  # int64
    rollout_id: np.ndarray  # int64
    age: np.ndarray  # int64, training steps

    def __len__(self) -> int:
        return len(self.step)

    def replayed(self, composition: str) -> "DrawColumns":
        """The draws that are replays: all draws, or with the pool composition those of age > 0."""
        if composition != "pool":
            return self
        old = self.age > 0
        return DrawColumns(*(getattr(self, field.name)[old] for field in fields(self)))


def read_draws(files: Sequence[tuple[int, Path]]) -> DrawColumns:
    """Every draw of the draw log. Raises SnapshotError."""
    names = ("step", "rollout_id", "age_steps")
    parts: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in names]
    for step, path in tracked(files, "reading draws"):
        for batch in iter_columns(path, "draws", names):
            steps = batch.column(0).to_numpy()
            _refuse_another_step(path, steps[steps != step])
            for part, column in zip(parts, batch.columns, strict=True):
                part.append(column.to_numpy())
    return DrawColumns(*(np.concatenate(part) for part in parts))
