"""Scalar columns of rollouts and draws as numpy records, the input of every inspection."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.lab.inspection.source import Source
from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.snapshot import SNAPSHOT_VERSION
from grpo_replay.storage.parquet import open_parquet
from grpo_replay.storage.rollout_log import read_draw_table, read_rollout_table
from grpo_replay.terminal.console import tracked

BATCH_ROWS = 8_192
"""Number of snapshot rows read at a time; they take 32 MiB at 1,000 tokens per rollout."""

NO_ROW = -1
"""Returned by `find_rows` for an unknown id."""

OUTCOMES = (
    *("tokens", "clip_fraction", "log_ratio_mean", "log_ratio_var", "approx_kl"),
    *("ratio_mean", "ratio_squared_mean"),
)
"""Columns of a use in rollouts/ and draws/; null in the files, NaN here, if not trained on."""

ROLLOUT = np.dtype(
    [
        ("rollout_id", np.int64),
        ("group_id", np.int64),
        ("birth_step", np.int64),
        ("logged_step", np.int64),  # the step that took it; in asynchronous runs after its birth
        ("reward", np.float64),  # NaN if it is missing
        ("advantage", np.float64),  # NaN if the rollout was dropped
        ("group_reward_std", np.float64),  # 0 if all are equal, NaN if fewer than two have a reward
        ("group_correct", np.int32),  # correct rollouts of the group
        ("kept", np.bool_),
        ("prompt_id", np.object_),
        ("length", np.int32),  # tokens of the completion
        ("truncated", np.bool_),
        ("behavior_logprob_mean", np.float64),  # NaN in a snapshot
        *((name, np.float64) for name in OUTCOMES),
    ]
)
Rollouts = np.recarray
"""Records of `ROLLOUT`, in file order."""

DRAW = np.dtype(
    [
        ("rollout_id", np.int64),
        ("step", np.int64),
        ("age", np.int64),  # training steps; updates if the run draws for each update
        ("update", np.int64),  # over the run; the step if a step makes one draw
        ("row", np.int64),  # of the rollout in the log; NO_ROW without one
        ("probability", np.float64),  # of its first draw
        *((name, np.float64) for name in OUTCOMES),
    ]
)
Draws = np.recarray
"""Records of `DRAW`, in draw order."""

_READ = ("rollout_id", "group_id", "birth_step", "reward", "advantage", "group_reward_std",
         "group_correct", "kept", "prompt_id", "finish_reason", "completion_token_ids")  # fmt: skip


def _joined(dtype: np.dtype, parts: Iterable[np.recarray]) -> np.recarray:
    return np.concatenate([np.recarray(0, dtype), *parts]).view(np.recarray)


def _records(dtype: np.dtype, columns: dict[str, pa.ChunkedArray | pa.Array]) -> np.recarray:
    rows = np.recarray(len(columns["rollout_id"]), dtype)
    for name in {"tokens", "behavior_logprob_mean"} & set(rows.dtype.names or ()):
        rows[name] = np.nan
    for name, column in columns.items():
        rows[name] = column.to_numpy(zero_copy_only=False)
    return rows


def read_stored(path: Path) -> Rollouts:
    """Returns the rollouts of a snapshot (buffer.parquet). Raises SnapshotError."""
    with open_parquet(path, "buffer", SNAPSHOT_VERSION) as file:
        batches = file.iter_batches(batch_size=BATCH_ROWS, columns=list(_READ))
        tables = (pa.Table.from_batches([batch]) for batch in batches)
        return _joined(ROLLOUT, map(_rollouts, tables))


def read_log(files: Sequence[tuple[int, Path]]) -> Rollouts:
    """Read every rollout of the rollout log, including dropped ones. Raises SnapshotError."""
    parts = []
    for step, path in tracked(files, "reading rollouts"):
        names = (*_READ, "behavior_logprob_mean", *OUTCOMES)
        parts.append(_rollouts(read_rollout_table(path, names)))
        parts[-1].logged_step = step
    return _joined(ROLLOUT, parts)


def _rollouts(table: pa.Table) -> Rollouts:
    """Converts a table of rollouts; the step that took them is set to that of their birth."""
    columns = {name: table[name] for name in table.column_names if name in (ROLLOUT.names or ())}
    columns |= {
        "logged_step": table["birth_step"],
        "length": pc.list_value_length(table["completion_token_ids"]),
        "truncated": pc.equal(table["finish_reason"], "length"),
    }
    return _records(ROLLOUT, columns)


def read_draws(files: Sequence[tuple[int, Path]]) -> Draws:
    """Read every draw; its row in the rollout log is not set yet. Raises SnapshotError."""
    parts = []
    for _, path in tracked(files, "reading draws"):
        table = read_draw_table(path)
        columns = {name: table[name] for name in ("rollout_id", "step", "probability", *OUTCOMES)}
        by_update = "update" in table.column_names
        columns["age"] = table["age_updates" if by_update else "age_steps"]
        columns["update"] = table["update" if by_update else "step"]
        parts.append(_records(DRAW, columns))
        parts[-1].row = NO_ROW
    return _joined(DRAW, parts)


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
