"""Scalar columns of many rollouts as numpy arrays, from which every summary is computed.

Files are read one batch of rows at a time: memory holds the scalars (about 100 bytes per rollout)
and one batch of token ids.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.errors import SnapshotError
from grpo_replay.replay import snapshot
from grpo_replay.storage.parquet import open_parquet
from grpo_replay.storage.rollout_log import DRAW_SCHEMA, ROLLOUT_FILE_SCHEMA, ROLLOUT_LOG_VERSION
from grpo_replay.terminal.console import tracked

Kind = Literal["rollouts", "draws", "buffer"]

BATCH_ROWS = 8_192
"""Rows decoded at a time. At 1,000 tokens per rollout, one list column takes 32 MiB."""

NEVER = -1
"""The value of `last_used_step` for a rollout that was never drawn."""

NO_ROW = -1
"""Returned by `find_rows` for an unknown id."""

_FORMATS = {
    "rollouts": (ROLLOUT_LOG_VERSION, ROLLOUT_FILE_SCHEMA),
    "draws": (ROLLOUT_LOG_VERSION, DRAW_SCHEMA),
    "buffer": (snapshot.SNAPSHOT_VERSION, snapshot.SNAPSHOT_SCHEMA),
}


def schema_of(kind: Kind) -> pa.Schema:
    return _FORMATS[kind][1]


def iter_columns(
    path: Path, kind: Kind, names: Sequence[str], batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Record batches of the named columns, with columns in this order and rows in file order.

    Raises SnapshotError if the file is missing, empty, truncated, damaged or of another kind.
    """
    version, schema = _FORMATS[kind]
    with open_parquet(path, kind, version, schema) as file:
        for batch in file.iter_batches(batch_size=batch_rows, columns=list(names)):
            # Parquet returns columns in file order.
            yield batch.select(list(names))


def list_lengths(column: pa.Array) -> pa.Array:
    """Lengths of the lists in a column, int32."""
    return pc.cast(pc.list_value_length(column), pa.int32())


@dataclass(frozen=True, slots=True, eq=False)
class RolloutColumns:
    """Aligned arrays [N], in file order. `prompt` indexes `prompt_ids`."""

    rollout_id: np.ndarray  # int64
    group_id: np.ndarray  # int64
    birth_step: np.ndarray  # int64
    logged_step: np.ndarray  # int64, that took it from the sampler; after its birth if asynchronous
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


_SCALARS: dict[str, tuple[str, type]] = {
    "rollout_id": ("rollout_id", np.int64),
    "group_id": ("group_id", np.int64),
    "birth_step": ("birth_step", np.int64),
    "reward": ("reward", np.float64),
    "advantage": ("advantage", np.float64),
    "group_std": ("group_reward_std", np.float64),
    "group_correct": ("group_correct", np.int32),
    "kept": ("kept", np.bool_),
}
"""Column and type of the fields that are read as they are."""
_READ = (*(name for name, _ in _SCALARS.values()), "finish_reason", "completion_token_ids")
_USES = ("priority", "times_used", "last_used_step")


def _from_batch(batch: pa.RecordBatch, path: Path, step: int | None) -> RolloutColumns:
    """The rows of one batch; of a snapshot, which has uses, if there is no `step`."""
    part: dict[str, np.ndarray] = {
        field: np.asarray(batch.column(name).to_numpy(zero_copy_only=False)).astype(dtype)
        for field, (name, dtype) in _SCALARS.items()
    }
    count = batch.num_rows
    encoded = batch.column("prompt_id").dictionary_encode()
    uses = {
        "priority": np.full(count, np.nan),
        "times_used": np.zeros(count, np.int32),
        "last_used_step": np.full(count, NEVER, np.int64),
    }
    if step is None:
        uses = {
            name: pc.fill_null(batch.column(name), NEVER).to_numpy(zero_copy_only=False)
            for name in _USES
        }
    _refuse_non_numbers(path, part, batch)
    return RolloutColumns(
        **part,
        **uses,
        logged_step=part["birth_step"] if step is None else np.full(count, step, np.int64),
        tokens=list_lengths(batch.column("completion_token_ids")).to_numpy(zero_copy_only=False),
        truncated=pc.equal(batch.column("finish_reason"), "length").to_numpy(zero_copy_only=False),
        prompt=encoded.indices.to_numpy(zero_copy_only=False),
        prompt_ids=tuple(encoded.dictionary.to_pylist()),
    )


def _join(parts: list[RolloutColumns]) -> RolloutColumns:
    """All rows of the parts. Prompt ids are coded in order of appearance."""
    codes: dict[str, int] = {}
    prompts = [
        np.array([codes.setdefault(text, len(codes)) for text in part.prompt_ids], np.int32)[
            part.prompt
        ]
        for part in parts
    ]
    names = [field.name for field in fields(RolloutColumns)[:-1] if field.name != "prompt"]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return RolloutColumns(**arrays, prompt=np.concatenate(prompts), prompt_ids=tuple(codes))


def no_rollouts() -> RolloutColumns:
    """Columns without rows."""
    empty = {field.name: np.zeros(0) for field in fields(RolloutColumns)[:-1]}
    empty |= {name: np.zeros(0, dtype) for name, (_, dtype) in _SCALARS.items()}
    empty |= {name: np.zeros(0, np.int64) for name in ("logged_step", "last_used_step")}
    empty |= {name: np.zeros(0, np.int32) for name in ("tokens", "prompt", "times_used")}
    return RolloutColumns(**{**empty, "truncated": np.zeros(0, np.bool_)}, prompt_ids=())


def read_stored(path: Path) -> RolloutColumns:
    """The rollouts of a snapshot (buffer.parquet). Raises SnapshotError."""
    batches = iter_columns(path, "buffer", (*_READ, "prompt_id", *_USES))
    return _join([no_rollouts(), *(_from_batch(batch, path, None) for batch in batches)])


def read_log(files: Sequence[tuple[int, Path]]) -> RolloutColumns:
    """Every rollout of the rollout log, including dropped ones. Raises SnapshotError, also for a
    file that holds another step, and for a reward or advantage that is not a number."""
    parts = [no_rollouts()]
    for step, path in tracked(files, "reading rollouts"):
        for batch in iter_columns(path, "rollouts", (*_READ, "prompt_id")):
            part = _from_batch(batch, path, step)
            _refuse_another_step(path, part.birth_step[part.birth_step > step])
            parts.append(part)
    columns = _join(parts)
    ids, counts = np.unique(columns.rollout_id, return_counts=True)
    if (counts > 1).any():
        raise SnapshotError(
            f"{files[0][1].parent}: rollout {ids[counts > 1][0]} is in the files twice: one "
            "of them is the copy of another; restore it from a copy"
        )
    return columns


def _refuse_another_step(path: Path, wrong_steps: np.ndarray) -> None:
    if wrong_steps.size:
        raise SnapshotError(
            f"{path} holds rows of step {wrong_steps[0]}: the file was renamed, swapped or copied; "
            "restore it from a copy"
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

    def take(self, rows: np.ndarray) -> "DrawColumns":
        """The draws selected by a mask."""
        return DrawColumns(self.step[rows], self.rollout_id[rows], self.age[rows])


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


def find_rows(ids_N: np.ndarray, wanted_M: Sequence[int] | np.ndarray) -> np.ndarray:
    """Row of each wanted id in `ids_N` (distinct, in any order); NO_ROW for an unknown id."""
    wanted = np.asarray(wanted_M, dtype=np.int64)
    if len(ids_N) == 0:
        return np.full(wanted.shape, NO_ROW, dtype=np.int64)
    order = np.argsort(ids_N, kind="stable")
    places = np.minimum(np.searchsorted(ids_N, wanted, sorter=order), len(ids_N) - 1)
    rows = order[places]
    return np.where(ids_N[rows] == wanted, rows, NO_ROW)
