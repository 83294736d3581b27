"""Saves the buffer's store as a Parquet file and loads it: buffer.parquet in a checkpoint (schema
version 1).

One row per stored rollout, oldest first: the columns of rollouts/ without `completion_text` and
`reward_scores`, then `priority`, `times_used` and `last_used_step` (null if never drawn), then
`completion_mask` and `extra_<name>` if a stored rollout has them. The file's metadata contain the
step, the replay settings and the counters as JSON. `ReplayBuffer.save` adds `library`: the seed and
the next ids, which a run of this package has in its checkpoint. Nothing is pickled.

Entries whose payloads are another trainer's handles make a file of another kind (`handles`): it has
the columns of the entries, and no payloads.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from grpo_replay.errors import SnapshotError
from grpo_replay.replay.entry_store import NEVER_USED, EntryStore
from grpo_replay.replay.insertion import entries_of
from grpo_replay.replay.priorities import COLUMNS, ENTRY_FIELDS
from grpo_replay.storage.parquet import kind_of, open_parquet, write_parquet
from grpo_replay.storage.rollout_log import (
    LOG_ONLY,
    ROLLOUT_SCHEMA,
    optional_fields,
    optional_fields_of,
    rollouts_to_table,
    table_to_rollouts,
)
from grpo_replay.types import Entry, Rollout, T

SNAPSHOT_VERSION = 1
_FACTS_KEY = b"grpo_replay.buffer"
_CHUNK_ROLLOUTS = 4096  # rows converted at once, and rows per row group: limits memory
_COUNTERS = ("evicted_by_capacity", "evicted_at")

_USE_FIELDS = [
    pa.field("priority", pa.float64()),
    pa.field("times_used", pa.int32()),
    pa.field("last_used_step", pa.int64()),
]
SNAPSHOT_SCHEMA = pa.schema(
    [*(field for field in ROLLOUT_SCHEMA if field.name not in LOG_ONLY), *_USE_FIELDS]
)
HANDLES = "handles"
_CALLER_COLUMNS = {name: dtype for name, (dtype, _) in COLUMNS.items() if name not in ENTRY_FIELDS}
_HANDLE_SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.int64()) for name in ENTRY_FIELDS),
        *(pa.field(name, pa.from_numpy_dtype(dtype)) for name, dtype in _CALLER_COLUMNS.items()),
        *_USE_FIELDS,
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A buffer read from a file. `state` is for `EntryStore.set_state`, `settings` is the replay
    section of its run, `step` the last training step before it was written, and `library` the
    state that `ReplayBuffer.save` adds."""

    step: int
    group_size: int
    settings: Mapping[str, Any]
    state: Mapping[str, Any]
    library: Mapping[str, Any]

    @property
    def rollouts(self) -> tuple[Any, ...]:
        """The payloads of the entries."""
        return tuple(entry.payload for entry in self.state["entries"])


def write_snapshot(
    path: Path, store: EntryStore, step: int, library: Mapping[str, Any] | None = None
) -> None:
    """Write the store as it is after `step`. Reading the file gives the same state bit for bit, but
    for payloads that are not rollouts. Raises ValueError if only some payloads are rollouts."""
    state = store.get_state()
    facts = {
        "step": step,
        "group_size": store.group_size,
        "settings": store.settings.model_dump(mode="json"),
        **{name: state[name] for name in _COUNTERS},
        **({} if library is None else {"library": library}),
    }
    metadata = {_FACTS_KEY: json.dumps(facts).encode()}
    payloads = [entry.payload for entry in state["entries"]]
    rollouts = [payload for payload in payloads if isinstance(payload, Rollout)]
    if rollouts or not payloads:
        if len(rollouts) < len(payloads):
            raise ValueError(
                f"{path}: {len(rollouts)} of {len(payloads)} stored entries are whole rollouts, "
                "the others have payloads of yours: store one or the other"
            )
        optional = optional_fields_of(rollouts)
        kind, schema = "buffer", pa.schema([*SNAPSHOT_SCHEMA, *optional])
        tables = _tables(rollouts, partial(rollouts_to_table, optional=optional), state, schema)
    else:
        kind, schema = HANDLES, _HANDLE_SCHEMA
        tables = _tables(state["entries"], _handles_to_table, state, schema)
    write_parquet(path, kind, SNAPSHOT_VERSION, schema, tables, metadata)


def read_snapshot_facts(path: Path) -> dict[str, Any]:
    """Read a snapshot's metadata, not its rollouts: `step`, `group_size`, `settings` (the replay
    section) and the counters of `get_state`. Raises SnapshotError."""
    with open_parquet(path, "buffer", SNAPSHOT_VERSION) as file:
        facts: dict[str, Any] = json.loads(file.schema_arrow.metadata[_FACTS_KEY])
    return facts


def read_snapshot(path: Path, payload_of: Callable[[int], Any] | None = None) -> Snapshot:
    """Read a snapshot. `payload_of` maps a rollout id to its payload, for a file of another
    trainer's handles. Raises SnapshotError if the file is missing, damaged or of another kind, or
    has handles and there is no `payload_of`."""
    has_handles = kind_of(path) == HANDLES
    if has_handles and payload_of is None:
        raise SnapshotError(
            f"{path}: its entries had payloads, which are not saved; pass load(…, payload_of=…) a "
            "function from a rollout id to its payload"
        )
    kind, schema = (HANDLES, _HANDLE_SCHEMA) if has_handles else ("buffer", SNAPSHOT_SCHEMA)
    with open_parquet(path, kind, SNAPSHOT_VERSION) as file:
        facts = json.loads(file.schema_arrow.metadata[_FACTS_KEY])
        entries: list[Entry] = []
        batches: list[pa.RecordBatch] = []
        optional = [field.name for field in optional_fields(file.schema_arrow)]
        for batch in file.iter_batches(_CHUNK_ROLLOUTS, columns=[*schema.names, *optional]):
            if payload_of is not None and has_handles:
                entries.extend(_handles(batch, payload_of))
            else:
                entries.extend(entries_of(table_to_rollouts(pa.Table.from_batches([batch]))))
            batches.append(batch.select([field.name for field in _USE_FIELDS]))
    uses = pa.Table.from_batches(batches, pa.schema(_USE_FIELDS))
    state: dict[str, Any] = {
        "entries": tuple(entries),
        "priority": uses["priority"].to_numpy(),
        "times_used": uses["times_used"].to_numpy(),
        "last_used_step": uses["last_used_step"].fill_null(NEVER_USED).to_numpy(),
        **{name: facts[name] for name in _COUNTERS},
    }
    state["evicted_at"] = tuple(state["evicted_at"])
    library = facts.get("library", {})
    return Snapshot(facts["step"], facts["group_size"], facts["settings"], state, library)


def restore_snapshot(path: Path, store: EntryStore) -> None:
    """Load a snapshot into `store`. Raises SnapshotError if it is unreadable or inconsistent."""
    load_state(path, read_snapshot(path), store)


def load_state(path: Path, snapshot: Snapshot, store: EntryStore) -> None:
    """Load a snapshot read from `path` into `store`. Raises SnapshotError if inconsistent."""
    try:
        store.set_state(snapshot.state)
    except ValueError as error:
        raise SnapshotError(f"{path}: {error}; restore the file from a copy") from error


def _tables(
    rows: Sequence[T],
    to_table: Callable[[Sequence[T]], pa.Table],
    state: Mapping[str, Any],
    schema: pa.Schema,
) -> Iterator[pa.Table]:
    """Yields the columns of `schema` of the rows and their uses, some at a time to limit memory."""
    for start in range(0, len(rows), _CHUNK_ROLLOUTS):
        chunk = slice(start, start + _CHUNK_ROLLOUTS)
        table, last_used = to_table(rows[chunk]), state["last_used_step"][chunk]
        uses = (
            pa.array(state["priority"][chunk]),
            pa.array(state["times_used"][chunk]),
            pa.array(last_used, mask=last_used == NEVER_USED),
        )
        for field, column in zip(_USE_FIELDS, uses, strict=True):
            table = table.append_column(field, column)
        yield table.select(schema.names).cast(schema)


def _handles_to_table(entries: Sequence[Entry]) -> pa.Table:
    """Converts entries with handles; a column that an entry lacks is null."""
    columns = {name: [getattr(entry, name) for entry in entries] for name in ENTRY_FIELDS}
    columns |= {name: [entry.columns.get(name) for entry in entries] for name in _CALLER_COLUMNS}
    return pa.table(columns)


def _handles(batch: pa.RecordBatch, payload_of: Callable[[int], Any]) -> Iterator[Entry]:
    for row in batch.select([*ENTRY_FIELDS, *_CALLER_COLUMNS]).to_pylist():
        columns = {name: row[name] for name in _CALLER_COLUMNS if row[name] is not None}
        fields = {name: row[name] for name in ENTRY_FIELDS}
        yield Entry(**fields, columns=columns, payload=payload_of(row["rollout_id"]))
