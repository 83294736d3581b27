"""Single rollouts out of a run or a snapshot, filtered: for the list, one life, and export."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay.buffer.snapshot import read_snapshot_facts
from grpo_replay.inspection.column_reader import Kind, iter_columns, list_lengths, schema_of
from grpo_replay.inspection.rebuild import find_rows, rebuild_stored
from grpo_replay.inspection.rollout_columns import NEVER, DrawColumns, read_draws, read_stored
from grpo_replay.inspection.source import Source
from grpo_replay.inspection.where import Filter
from grpo_replay.terminal.progress import tracked

DERIVED = (
    ("age_steps", pa.int64()),  # training steps since birth, at the inspected step
    ("completion_tokens", pa.int32()),
    ("prompt_tokens", pa.int32()),
    ("abs_advantage", pa.float32()),
)
USES = (
    ("times_used", pa.int32()),
    ("last_used_step", pa.int64()),
    ("stored", pa.bool_()),  # in the buffer after the inspected step
)
_NEEDS = {
    "age_steps": "birth_step",
    "completion_tokens": "completion_token_ids",
    "prompt_tokens": "prompt_token_ids",
    "abs_advantage": "advantage",
    **{name: "rollout_id" for name, _ in USES},
}


@dataclass(frozen=True, slots=True, eq=False)
class RowSource:
    """The rollouts behind a source: the whole log of a run, or what a snapshot stores."""

    kind: Kind
    files: tuple[Path, ...]
    step: int
    schema: pa.Schema  # of the rows: the file's columns and the derived ones
    draws: DrawColumns | None
    stored_ids: np.ndarray | None


def open_rows(source: Source) -> RowSource:
    """All generated rollouts of a run (with their uses), or the stored ones of a checkpoint or
    snapshot. Raises SnapshotError for files that cannot be read."""
    if source.kind != "run" and source.snapshot is not None:
        step = source.step
        if step is None:
            step = read_snapshot_facts(source.snapshot)["step"]
        schema = pa.schema([*schema_of("buffer"), *DERIVED])
        return RowSource("buffer", (source.snapshot,), step, schema, None, None)
    schema = pa.schema([*schema_of("rollouts"), *DERIVED, *USES])
    return RowSource(
        kind="rollouts",
        files=tuple(path for _, path in source.rollout_files),
        step=source.step or 0,
        schema=schema,
        draws=read_draws(source.draw_files),
        stored_ids=_stored_ids(source),
    )


def _stored_ids(source: Source) -> np.ndarray:
    if source.snapshot is not None:
        return read_stored(source.snapshot).rollout_id
    recipe = source.recipe
    if recipe is None or not recipe.replays or not source.rollout_files:
        return np.zeros(0, dtype=np.int64)
    return rebuild_stored(source, recipe.replay, recipe.sampling.group_size).rollout_id


def iter_rows(
    rows: RowSource, columns: Sequence[str], where: Filter | None = None
) -> Iterator[pa.Table]:
    """Tables of `columns` (in this order) of the rollouts that pass the filter, file by file."""
    wanted = [*columns, *(sorted(where.columns - set(columns)) if where else ())]
    present = set(schema_of(rows.kind).names)
    read = list(dict.fromkeys(n if n in present else _NEEDS[n] for n in wanted))
    for path in tracked(rows.files, "reading rollouts"):
        for batch in iter_columns(path, rows.kind, read):
            table = pa.table({name: _column(rows, batch, name, present) for name in wanted})
            if where is not None:
                table = table.filter(where.expression)
            if table.num_rows:
                yield table.select(list(columns))


def _column(rows: RowSource, batch: pa.RecordBatch, name: str, present: set[str]) -> pa.Array:
    if name in present:
        return batch.column(name)
    base = batch.column(_NEEDS[name])
    if name == "age_steps":
        return pc.subtract(rows.step, base)
    if name in ("completion_tokens", "prompt_tokens"):
        return list_lengths(base)
    if name == "abs_advantage":
        return pc.abs(base)
    ids = base.to_numpy()
    if name == "stored":
        return pa.array(np.isin(ids, rows.stored_ids))
    return _use_column(rows.draws, ids, name)


def _use_column(draws: DrawColumns, ids: np.ndarray, name: str) -> pa.Array:
    rows = find_rows(ids, draws.rollout_id)
    hit = rows >= 0
    if name == "times_used":
        return pa.array(np.bincount(rows[hit], minlength=len(ids)).astype(np.int32))
    last = np.full(len(ids), NEVER, dtype=np.int64)
    np.maximum.at(last, rows[hit], draws.step[hit])
    return pa.array(last, mask=last == NEVER)
