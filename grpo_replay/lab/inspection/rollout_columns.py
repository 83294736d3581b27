"""The files of rollouts and draws as numpy records, for inspection and verification."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.lab.inspection.source import Source
from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.snapshot import SNAPSHOT_SCHEMA, SNAPSHOT_VERSION
from grpo_replay.storage.parquet import open_parquet
from grpo_replay.storage.rollout_log import (
    DRAW_SCHEMA,
    ROLLOUT_FILE_SCHEMA,
    read_draw_table,
    read_rollout_table,
)
from grpo_replay.terminal.console import tracked

BATCH_ROWS = 8_192
"""Number of snapshot rows read at a time; they take 32 MiB at 1,000 tokens per rollout."""

NO_ROW = -1
"""Returned by `find_rows` for an unknown id."""

OUTCOMES = (
    *("tokens", "clip_fraction", "log_ratio_mean", "log_ratio_var", "approx_kl"),
    *("ratio_mean", "ratio_squared_mean"),
)
"""Columns of a use in rollouts/ and draws/; null in the files if not trained on."""

Rollouts = np.recarray
"""Records of rollouts in file order: those columns of rollouts/ that were read, and

- `logged_step`: the step that took it; in asynchronous runs after its birth;
- `completion_tokens` in place of `completion_token_ids`, and `truncated`.

A list is its length. Null counts and lengths are -1, other null numbers NaN."""

Draws = np.recarray
"""Records of draws in the order drawn: the columns of draws/, with nulls as in `Rollouts`, and

- `age`: in training steps; in updates if the run draws for each update;
- `update`: over the run; the step if a step makes one draw;
- `row` of the rollout in the log; NO_ROW without one."""

_READ = ("rollout_id", "group_id", "birth_step", "reward", "advantage", "group_reward_std",
         "group_correct", "kept", "prompt_id", "finish_reason", "completion_token_ids")  # fmt: skip


def joined(parts: Iterable[np.recarray]) -> np.recarray:
    """Concatenate records, of which there is at least one part."""
    return np.concatenate(list(parts)).view(np.recarray)


def _records(table: pa.Table, **further: np.ndarray) -> np.recarray:
    """Converts lists to their lengths, null to -1 or NaN, floats to float64."""
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_list(column.type):
            column = pc.list_value_length(column)
        if pa.types.is_integer(column.type):
            column = pc.fill_null(column, -1)
        if pa.types.is_floating(column.type):
            column = column.cast(pa.float64())
        columns[name] = column.to_numpy()
    columns |= further
    dtype = [(name, column.dtype) for name, column in columns.items()]
    return np.rec.fromarrays(list(columns.values()), dtype)


def rollout_records(table: pa.Table, step: int | None = None, **further: np.ndarray) -> Rollouts:
    """Convert a table of rollouts that `step` took (None: the step of birth), and add columns."""
    births = table["birth_step"].to_numpy()
    return _records(
        table.rename_columns({"completion_token_ids": "completion_tokens"}),
        logged_step=births if step is None else np.full(len(table), step),
        truncated=pc.equal(table["finish_reason"], "length").to_numpy(),
        **further,
    )


def stored_tables(path: Path, names: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the columns `names` of a snapshot, those that it has. Raises SnapshotError."""
    with open_parquet(path, "buffer", SNAPSHOT_VERSION) as file:
        available = [name for name in names if name in file.schema_arrow.names]
        for batch in file.iter_batches(BATCH_ROWS, columns=available):
            yield pa.Table.from_batches([batch])


def read_stored(path: Path) -> Rollouts:
    """Read a snapshot (buffer.parquet), with `times_used`. Raises SnapshotError."""
    names = (*_READ, "times_used")
    empty = pa.schema(map(SNAPSHOT_SCHEMA.field, names)).empty_table()
    return joined(map(rollout_records, chain([empty], stored_tables(path, names))))


def read_log(files: Sequence[tuple[int, Path]]) -> Rollouts:
    """Read every rollout of the rollout log, including dropped ones. Raises SnapshotError."""
    names = (*_READ, "behavior_logprob_mean", *OUTCOMES)
    parts = (
        rollout_records(read_rollout_table(path, names), step)
        for step, path in tracked(files, "reading rollouts")
    )
    empty = pa.schema(map(ROLLOUT_FILE_SCHEMA.field, names)).empty_table()
    return joined([rollout_records(empty), *parts])


def read_draws(files: Sequence[tuple[int, Path]]) -> Draws:
    """Read every draw; its row in the rollout log is not set yet. Raises SnapshotError."""
    parts = (draw_records(read_draw_table(path)) for _, path in tracked(files, "reading draws"))
    return joined([NO_DRAWS, *parts])


def draw_records(table: pa.Table) -> Draws:
    """Convert the table of a draws/ file."""
    by_update = "update" in table.column_names
    return _records(
        table.select(DRAW_SCHEMA.names),
        age=table["age_updates" if by_update else "age_steps"].to_numpy(),
        update=table["update" if by_update else "step"].to_numpy(),
        row=np.full(len(table), NO_ROW),
    )


NO_DRAWS = draw_records(DRAW_SCHEMA.empty_table())


def read_log_and_draws(source: Source) -> tuple[Rollouts, Draws]:
    """Returns the rollout log, and the draws whose rollouts are in it. Raises SnapshotError."""
    log, draws = read_log(source.rollout_files), read_draws(source.draw_files)
    rows = find_rows(log.rollout_id, draws.rollout_id)
    draws.row = rows
    return log, draws.compress(rows >= 0).view(np.recarray)


def draws_of_stored(draws: Draws, settings: ReplaySection) -> Draws:
    """The draws of stored rollouts: all, but in a pool those of age 0 are draws of fresh ones."""
    return draws[draws.age > 0] if settings.pools_fresh else draws


def find_rows(ids_N: np.ndarray, wanted_M: Sequence[int] | np.ndarray) -> np.ndarray:
    """Find the row of each wanted id in `ids_N` (distinct, in any order); NO_ROW if unknown."""
    wanted = np.asarray(wanted_M, dtype=np.int64)
    if len(ids_N) == 0:
        return np.full(wanted.shape, NO_ROW, dtype=np.int64)
    order = np.argsort(ids_N, kind="stable")
    positions = np.minimum(np.searchsorted(ids_N, wanted, sorter=order), len(ids_N) - 1)
    rows = order[positions]
    return np.where(ids_N[rows] == wanted, rows, NO_ROW)
