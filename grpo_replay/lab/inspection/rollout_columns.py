"""Scalar columns of many rollouts as numpy arrays, from which every summary is computed.

Files are read one batch of rows at a time: memory holds the scalars (about 100 bytes per rollout)
and one batch of token ids.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.recipe import ReplaySection
from grpo_replay.replay import snapshot
from grpo_replay.storage.parquet import open_parquet
from grpo_replay.storage.rollout_log import (
    DRAW_SCHEMA,
    ROLLOUT_FILE_SCHEMA,
    ROLLOUT_LOG_VERSION,
)
from grpo_replay.terminal.console import tracked

Kind = Literal["rollouts", "draws", "buffer"]

BATCH_ROWS = 8_192
"""Rows decoded at a time. At 1,000 tokens per rollout, one list column takes 32 MiB."""

NO_ROW = -1
"""Returned by `find_rows` for an unknown id."""

_FORMATS = {
    "rollouts": (ROLLOUT_LOG_VERSION, ROLLOUT_FILE_SCHEMA),
    "draws": (ROLLOUT_LOG_VERSION, DRAW_SCHEMA),
    "buffer": (snapshot.SNAPSHOT_VERSION, snapshot.SNAPSHOT_SCHEMA),
}


def schema_of(kind: Kind) -> pa.Schema:
    return _FORMATS[kind][1]


def iter_columns(path: Path, kind: Kind, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Record batches of the named columns that the file has, in this order; rows in file order.

    Raises SnapshotError if the file is missing, empty, truncated, damaged or of another kind.
    """
    version, schema = _FORMATS[kind]
    with open_parquet(path, kind, version, schema) as file:
        names = [name for name in names if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=names):
            # Parquet returns columns in file order.
            yield batch.select(names)


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
    prompt_ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rollout_id)

    @property
    def positive(self) -> np.ndarray:
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


_SCHEMA = pa.schema(
    [
        *((name, pa.int64()) for name in ("rollout_id", "group_id", "birth_step", "logged_step")),
        *((name, pa.float64()) for name in ("reward", "advantage", "group_std")),
        *((name, pa.int32()) for name in ("group_correct", "tokens")),
        *((name, pa.bool_()) for name in ("truncated", "kept")),
        ("prompt", pa.dictionary(pa.int32(), pa.string())),
        ("priority", pa.float64()),
        ("times_used", pa.int32()),
    ]
)
_SCALARS = ("rollout_id", "group_id", "birth_step", "reward", "advantage", "group_reward_std",
            "group_correct", "kept")  # fmt: skip
_READ = (*_SCALARS, "prompt_id", "finish_reason", "completion_token_ids")
_USES = ("priority", "times_used")


def _from_batch(batch: pa.RecordBatch, step: int | None) -> pa.Table:
    """The rows of one batch; of a snapshot, which has uses, if there is no `step`."""
    count = batch.num_rows
    columns = {name.replace("group_reward_std", "group_std"): batch[name] for name in _SCALARS}
    columns |= {
        "logged_step": batch["birth_step"] if step is None else pa.array(np.full(count, step)),
        "tokens": list_lengths(batch["completion_token_ids"]),
        "truncated": pc.equal(batch["finish_reason"], "length"),
        "prompt": batch["prompt_id"].dictionary_encode(),
        "priority": pa.nulls(count, pa.float64()),
        "times_used": pa.array(np.zeros(count, np.int32)),
    }
    if step is None:
        columns |= {name: batch[name] for name in _USES}
    return pa.table([columns[name] for name in _SCHEMA.names], _SCHEMA.names).cast(_SCHEMA)


def _columns(parts: Iterable[pa.Table]) -> RolloutColumns:
    """All rows of the parts."""
    table = pa.concat_tables([_SCHEMA.empty_table(), *parts]).unify_dictionaries()
    prompts = table["prompt"].combine_chunks()
    arrays = {name: table[name].to_numpy() for name in _SCHEMA.names if name != "prompt"}
    return RolloutColumns(
        **arrays,
        prompt=prompts.indices.to_numpy(),
        prompt_ids=tuple(prompts.dictionary.to_pylist()),
    )


def no_rollouts() -> RolloutColumns:
    """Columns without rows."""
    return _columns(())


def read_stored(path: Path) -> RolloutColumns:
    """The rollouts of a snapshot (buffer.parquet). Raises SnapshotError."""
    batches = iter_columns(path, "buffer", (*_READ, *_USES))
    return _columns(_from_batch(batch, None) for batch in batches)


def read_log(files: Sequence[tuple[int, Path]]) -> RolloutColumns:
    """Every rollout of the rollout log, including dropped ones. Raises SnapshotError."""
    return _columns(
        _from_batch(batch, step)
        for step, path in tracked(files, "reading rollouts")
        for batch in iter_columns(path, "rollouts", _READ)
    )


@dataclass(frozen=True, slots=True, eq=False)
class DrawColumns:
    """All draws of a run: aligned arrays [M], in draw order."""

    rollout_id: np.ndarray  # int64
    age: np.ndarray  # int64, training steps; updates if the run draws for each update
    update: np.ndarray  # int64, over the run; the step if a step makes one draw

    def __len__(self) -> int:
        return len(self.rollout_id)

    def replayed(self, settings: ReplaySection) -> "DrawColumns":
        """Those of stored rollouts: of a pool of fresh and stored ones, draws of age 0 are not."""
        if not settings.pools_fresh:
            return self
        old = self.age > 0
        return DrawColumns(self.rollout_id[old], self.age[old], self.update[old])


def counts_updates(path: Path) -> tuple[str, str] | None:
    """The columns of ages and updates of a draws/ file, if its step made several draws."""
    with open_parquet(path, "draws", ROLLOUT_LOG_VERSION, DRAW_SCHEMA) as file:
        found = file.schema_arrow.names
    return ("age_updates", "update") if "update" in found else None


def updates_of_a_step(draws_per_step: int, files: Sequence[tuple[int, Path]]) -> int:
    """Optimizer updates per step in which a run counts ages, of which a step makes
    `draws_per_step`; 1 if it counts them in steps."""
    return 1 if files and counts_updates(files[-1][1]) is None else draws_per_step


def read_draws(files: Sequence[tuple[int, Path]]) -> DrawColumns:
    """Every draw of the draw log. Raises SnapshotError."""
    parts: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(3)]
    for _, path in tracked(files, "reading draws"):
        names = ("rollout_id", *(counts_updates(path) or ("age_steps", "step")))
        for batch in iter_columns(path, "draws", names):
            for part, column in zip(parts, batch.columns, strict=True):
                part.append(column.to_numpy())
    return DrawColumns(*(np.concatenate(part) for part in parts))


def uses_of(ids_N: np.ndarray, draws: DrawColumns) -> np.ndarray:
    """How often each of the rollouts was drawn, int32 [N]."""
    rows = find_rows(ids_N, draws.rollout_id)
    return np.bincount(rows[rows >= 0], minlength=len(ids_N)).astype(np.int32)


def find_rows(ids_N: np.ndarray, wanted_M: Sequence[int] | np.ndarray) -> np.ndarray:
    """Row of each wanted id in `ids_N` (distinct, in any order); NO_ROW for an unknown id."""
    wanted = np.asarray(wanted_M, dtype=np.int64)
    if len(ids_N) == 0:
        return np.full(wanted.shape, NO_ROW, dtype=np.int64)
    order = np.argsort(ids_N, kind="stable")
    places = np.minimum(np.searchsorted(ids_N, wanted, sorter=order), len(ids_N) - 1)
    rows = order[places]
    return np.where(ids_N[rows] == wanted, rows, NO_ROW)
