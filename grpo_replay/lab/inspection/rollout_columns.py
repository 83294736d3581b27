"""Scalar columns of many rollouts and draws, as numpy records, from which all else is computed.

Files are read one batch of rows at a time: memory holds the scalars (about 150 bytes per rollout)
and one batch of token ids.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.recipe import ReplaySection
from grpo_replay.replay import snapshot
from grpo_replay.storage.parquet import open_parquet
from grpo_replay.storage.rollout_log import DRAW_SCHEMA, ROLLOUT_FILE_SCHEMA, ROLLOUT_LOG_VERSION
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


_OUTCOME = ("clip_fraction", "log_ratio_mean", "log_ratio_var", "approx_kl")
OUTCOME_COLUMNS = ("tokens", *_OUTCOME)
"""Of a use, in rollouts/ (null where it was not trained on as fresh) and in draws/."""
OUTCOMES = ("trained_tokens", *_OUTCOME)
"""The same in records, NaN for null."""

ROLLOUT = np.dtype(
    [
        ("rollout_id", np.int64),
        ("group_id", np.int64),
        ("birth_step", np.int64),
        ("logged_step", np.int64),  # took it from the sampler; after its birth if asynchronous
        ("reward", np.float64),  # NaN if it did not come
        ("advantage", np.float64),  # NaN if the rollout was dropped
        ("group_reward_std", np.float64),  # 0 if all are equal, NaN if fewer than two came
        ("group_correct", np.int32),  # correct rollouts of the group
        ("kept", np.bool_),
        ("prompt_id", np.object_),
        ("tokens", np.int32),  # of the completion
        ("truncated", np.bool_),
        ("priority", np.float64),  # NaN outside a buffer
        ("times_used", np.int32),  # draws
        *((name, np.float64) for name in OUTCOMES),
    ]
)
_LOGGED = ("rollout_id", "group_id", "birth_step", "reward", "advantage", "group_reward_std",
           "group_correct", "kept", "prompt_id")  # fmt: skip
_STORED = ("priority", "times_used")

Rollouts = np.recarray
"""Records of `ROLLOUT`, in file order."""

DRAW = np.dtype(
    [
        ("rollout_id", np.int64),
        ("step", np.int64),
        ("age", np.int64),  # training steps; updates if the run draws for each update
        ("update", np.int64),  # over the run; the step if a step makes one draw
        *((name, np.float64) for name in OUTCOMES),
    ]
)
Draws = np.recarray
"""Records of `DRAW`, in draw order."""


def _records(dtype: np.dtype, parts: Iterable[np.recarray]) -> np.recarray:
    found = list(parts)
    return np.concatenate(found).view(np.recarray) if found else np.recarray(0, dtype)


def no_rollouts() -> Rollouts:
    return np.recarray(0, ROLLOUT)


def read_stored(path: Path) -> Rollouts:
    """The rollouts of a snapshot (buffer.parquet). Raises SnapshotError."""
    return _records(ROLLOUT, _read("buffer", path, None))


def read_log(files: Sequence[tuple[int, Path]]) -> Rollouts:
    """Every rollout of the rollout log, including dropped ones. Raises SnapshotError."""
    with_steps = tracked(files, "reading rollouts")
    return _records(
        ROLLOUT, (part for step, path in with_steps for part in _read("rollouts", path, step))
    )


def _read(kind: Kind, path: Path, step: int | None) -> Iterator[Rollouts]:
    names = (*_LOGGED, *(_STORED if step is None else OUTCOME_COLUMNS))
    for batch in iter_columns(path, kind, (*names, "finish_reason", "completion_token_ids")):
        rows = np.recarray(batch.num_rows, ROLLOUT)
        rows.priority, rows.times_used, rows.trained_tokens = np.nan, 0, np.nan
        for name in names:
            field = "trained_tokens" if name == "tokens" else name
            rows[field] = batch[name].to_numpy(zero_copy_only=False)
        rows.logged_step = rows.birth_step if step is None else step
        rows.tokens = list_lengths(batch["completion_token_ids"]).to_numpy()
        rows.truncated = pc.equal(batch["finish_reason"], "length").to_numpy(zero_copy_only=False)
        yield rows


def is_positive(rows: Rollouts) -> np.ndarray:
    """bool [N]: better than its group, or of a group that is all correct; False for the rest of
    what was dropped."""
    return (rows.advantage > 0) | ((rows.group_reward_std == 0) & (rows.group_correct > 0))


def read_draws(files: Sequence[tuple[int, Path]]) -> Draws:
    """Every draw of the draw log. Raises SnapshotError."""
    parts = []
    for _, path in tracked(files, "reading draws"):
        counted = counts_updates(path) or ("age_steps", "step")
        names = ("rollout_id", "step", *counted, *OUTCOME_COLUMNS)
        for batch in iter_columns(path, "draws", names):
            rows = np.recarray(batch.num_rows, DRAW)
            for field, column in zip(DRAW.names or (), batch.columns, strict=True):
                rows[field] = column.to_numpy(zero_copy_only=False)
            parts.append(rows)
    return _records(DRAW, parts)


def of_stored(draws: Draws, settings: ReplaySection) -> Draws:
    """The draws of stored rollouts: of a pool of fresh and stored ones, those of age 0 are not."""
    return draws[draws.age > 0] if settings.pools_fresh else draws


def counts_updates(path: Path) -> tuple[str, str] | None:
    """The columns of ages and updates of a draws/ file, if its step made several draws."""
    with open_parquet(path, "draws", ROLLOUT_LOG_VERSION, DRAW_SCHEMA) as file:
        found = file.schema_arrow.names
    return ("age_updates", "update") if "update" in found else None


def updates_of_a_step(draws_per_step: int, files: Sequence[tuple[int, Path]]) -> int:
    """Optimizer updates per step in which a run counts ages, of which a step makes
    `draws_per_step`; 1 if it counts them in steps."""
    return 1 if files and counts_updates(files[-1][1]) is None else draws_per_step


def uses_of(ids_N: np.ndarray, draws: Draws) -> np.ndarray:
    """How often each of the rollouts was drawn, int [N]."""
    rows = find_rows(ids_N, draws.rollout_id)
    return np.bincount(rows[rows >= 0], minlength=len(ids_N))


def find_rows(ids_N: np.ndarray, wanted_M: Sequence[int] | np.ndarray) -> np.ndarray:
    """Row of each wanted id in `ids_N` (distinct, in any order); NO_ROW for an unknown id."""
    wanted = np.asarray(wanted_M, dtype=np.int64)
    if len(ids_N) == 0:
        return np.full(wanted.shape, NO_ROW, dtype=np.int64)
    order = np.argsort(ids_N, kind="stable")
    places = np.minimum(np.searchsorted(ids_N, wanted, sorter=order), len(ids_N) - 1)
    rows = order[places]
    return np.where(ids_N[rows] == wanted, rows, NO_ROW)
