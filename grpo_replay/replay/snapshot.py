"""The buffer as a Parquet file: buffer.parquet in a checkpoint (schema version 1).

One row per stored rollout, oldest first: the columns of rollouts/ without `completion_text` and
`reward_scores`, then `priority`, `times_used` and `last_used_step` (null if never drawn), then
`completion_mask` and `extra_<name>` if a stored rollout has them. The file's metadata contain the
step, the replay settings and the counters as JSON. `ReplayBuffer.save` adds `library`: the seed and
the next ids, which a run of this package has elsewhere. Nothing is pickled.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from grpo_replay.errors import RecipeError, SnapshotError
from grpo_replay.recipe import ReplayConfig
from grpo_replay.replay.replay_buffer import NEVER_USED, ReplayBuffer
from grpo_replay.storage.parquet import open_parquet, refuse_nulls, write_parquet
from grpo_replay.storage.rollout_log import (
    LOG_ONLY,
    ROLLOUT_SCHEMA,
    optional_fields,
    optional_fields_of,
    rollouts_to_table,
    table_to_rollouts,
)
from grpo_replay.types import Rollout

SNAPSHOT_VERSION = 1
_FACTS_KEY = b"grpo_replay.buffer"
_CHUNK_ROLLOUTS = 4096  # rows converted at once, and rows per row group: limits memory
_COUNTERS = ("evicted_by_age", "evicted_by_capacity", "evicted_at")
_LIBRARY_FACTS = ("seed", "next_rollout_id", "next_group_id")

_USE_FIELDS = [
    pa.field("priority", pa.float64()),
    pa.field("times_used", pa.int32()),
    pa.field("last_used_step", pa.int64()),
]
SNAPSHOT_SCHEMA = pa.schema(
    [*(field for field in ROLLOUT_SCHEMA if field.name not in LOG_ONLY), *_USE_FIELDS]
)
_NEVER_NULL = frozenset(SNAPSHOT_SCHEMA.names) - {"last_used_step"}


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A buffer read from a file. `state` is for `ReplayBuffer.set_state`, `settings` is the replay
    section of its run, and `step` the last training step before it was written."""

    step: int
    group_size: int
    settings: Mapping[str, Any]
    state: Mapping[str, Any]


def write_snapshot(
    path: Path, buffer: ReplayBuffer, step: int, library: Mapping[str, Any] | None = None
) -> None:
    """Write the buffer after `step`. Reading the file gives the same state bit for bit."""
    state = buffer.get_state()
    facts = {
        "step": step,
        "group_size": buffer.group_size,
        "settings": buffer.settings.model_dump(mode="json"),
        **{name: state[name] for name in _COUNTERS},
        **({} if library is None else {"library": library}),
    }
    metadata = {_FACTS_KEY: json.dumps(facts).encode()}
    optional = optional_fields_of(state["rollouts"])
    schema = pa.schema([*SNAPSHOT_SCHEMA, *optional])
    write_parquet(path, "buffer", SNAPSHOT_VERSION, schema, _tables(state, optional), metadata)


def read_snapshot_facts(path: Path) -> dict[str, Any]:
    """A snapshot's metadata, without its rollouts: `step`, `group_size`, `settings` (the replay
    section, with the keys of today) and the counters of `get_state`. Raises SnapshotError."""
    with open_parquet(path, "buffer", SNAPSHOT_VERSION, SNAPSHOT_SCHEMA) as file:
        return _read_facts(path, file.schema_arrow.metadata)


def count_stored(path: Path) -> int:
    """The number of rollouts in a snapshot. Raises SnapshotError."""
    with open_parquet(path, "buffer", SNAPSHOT_VERSION, SNAPSHOT_SCHEMA) as file:
        return file.metadata.num_rows


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot. Raises SnapshotError if it is missing, damaged or another kind of file."""
    with open_parquet(path, "buffer", SNAPSHOT_VERSION, SNAPSHOT_SCHEMA) as file:
        facts = _read_facts(path, file.schema_arrow.metadata)
        columns: dict[str, list[np.ndarray]] = {field.name: [] for field in _USE_FIELDS}
        rollouts = []
        optional = [field.name for field in optional_fields(file.schema_arrow)]
        names = [*SNAPSHOT_SCHEMA.names, *optional]
        for batch in file.iter_batches(_CHUNK_ROLLOUTS, columns=names):
            refuse_nulls(path, batch, _NEVER_NULL)
            rollouts.extend(table_to_rollouts(pa.Table.from_batches([batch])))
            columns["priority"].append(batch.column("priority").to_numpy())
            columns["times_used"].append(batch.column("times_used").to_numpy())
            last_used = batch.column("last_used_step").fill_null(NEVER_USED)
            columns["last_used_step"].append(last_used.to_numpy())
    state: dict[str, Any] = {
        "rollouts": tuple(rollouts),
        "priority": _joined(columns["priority"], np.float64),
        "times_used": _joined(columns["times_used"], np.int32),
        "last_used_step": _joined(columns["last_used_step"], np.int64),
        "priority_kind": facts["settings"]["priority"],
        **{name: facts[name] for name in _COUNTERS},
    }
    state["evicted_at"] = tuple(state["evicted_at"])
    return Snapshot(facts["step"], facts["group_size"], facts["settings"], state)


def restore_snapshot(path: Path, buffer: ReplayBuffer) -> int:
    """Load a snapshot into `buffer` and return its step.

    Raises SnapshotError if the file cannot be read or its content is inconsistent.
    """
    snapshot = read_snapshot(path)
    try:
        buffer.set_state(snapshot.state)
    except ValueError as error:
        raise SnapshotError(f"{path}: {error}; restore the file from a copy") from error
    return snapshot.step


def save_buffer(path: Path, buffer: ReplayBuffer) -> None:
    """`ReplayBuffer.save`."""
    library = {name: getattr(buffer, name) for name in _LIBRARY_FACTS}
    library["payloads"] = any(rollout.payload is not None for rollout in buffer.rollouts())
    write_snapshot(path, buffer, buffer.last_step, library)


def load_buffer(
    path: Path,
    payload_of: Callable[[int], Any] | None = None,
    on_evict: Callable[[tuple[Rollout, ...]], None] | None = None,
) -> ReplayBuffer:
    """`ReplayBuffer.load`."""
    facts = read_snapshot_facts(path)
    library = facts.get("library", {})
    if library.get("payloads") and payload_of is None:
        raise SnapshotError(
            f"{path}: its rollouts had payloads, which are not saved; give load(…, payload_of=…) a "
            "function from a rollout id to its payload"
        )
    try:
        settings = ReplayConfig.model_validate(facts["settings"])
    except RecipeError as error:
        raise SnapshotError(f"{path}: its replay settings are not valid: {error}") from error
    buffer = ReplayBuffer(settings, facts["group_size"], on_evict=on_evict)
    buffer.last_step = restore_snapshot(path, buffer)
    buffer.count_ids(buffer.rollouts())
    for name in _LIBRARY_FACTS:
        setattr(buffer, name, library.get(name, getattr(buffer, name)))
    if payload_of is not None:
        buffer.attach(payload_of)
    return buffer


def _tables(state: Mapping[str, Any], optional: Sequence[pa.Field]) -> Iterator[pa.Table]:
    known = len(ROLLOUT_SCHEMA) - len(LOG_ONLY)
    schema = pa.schema([*SNAPSHOT_SCHEMA, *optional])
    for start in range(0, len(state["rollouts"]), _CHUNK_ROLLOUTS):
        chunk = slice(start, start + _CHUNK_ROLLOUTS)
        whole = rollouts_to_table(state["rollouts"][chunk], optional)
        frozen = whole.drop_columns(list(LOG_ONLY)).columns
        last_used = state["last_used_step"][chunk]
        uses = [
            pa.array(state["priority"][chunk]),
            pa.array(state["times_used"][chunk]),
            pa.array(last_used, mask=last_used == NEVER_USED),
        ]
        yield pa.table([*frozen[:known], *uses, *frozen[known:]], schema=schema)


def _read_facts(path: Path, metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    try:
        facts = json.loads(metadata[_FACTS_KEY])
        missing = {"step", "group_size", "settings", *_COUNTERS} - set(facts)
        missing |= {"priority"} - set(facts.get("settings", ()))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise SnapshotError(
            f"{path}: its metadata has no readable {_FACTS_KEY.decode()} ({error}); restore the "
            "file from a copy"
        ) from error
    if missing:
        raise SnapshotError(
            f"{path}: its metadata lacks {', '.join(sorted(missing))}; restore the file from a copy"
        )
    return facts


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays])
