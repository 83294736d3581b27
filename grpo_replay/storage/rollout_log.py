"""Reads and writes the files of training steps: rollouts and draws, as Arrow tables and Parquet
files (schema version 1), and lines of metrics.jsonl, JSON objects of names to numbers or null
(`run_directory.append_metrics` writes these).

The Arrow schema of a rollout is that of the step logs (rollouts/step_000012.parquet,
draws/step_000012.parquet) and of the buffer's snapshot (`replay.snapshot`). Undefined values are
null, never NaN.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from grpo_replay.errors import CheckpointError, SnapshotError
from grpo_replay.storage.parquet import open_parquet, write_parquet
from grpo_replay.types import ComposedBatch, Draw, Rollout, RolloutOutcome

ROLLOUT_LOG_VERSION = 1

ROLLOUT_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.int64()),
        ("group_id", pa.int64()),
        ("prompt_id", pa.string()),
        ("completion_index", pa.int32()),
        ("birth_step", pa.int64()),
        ("policy_version", pa.int64()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("completion_text", pa.string()),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("sampler_logprobs", pa.list_(pa.float32())),
        ("reward", pa.float32()),
        ("advantage", pa.float32()),
        ("group_reward_mean", pa.float32()),
        ("group_reward_std", pa.float32()),
        ("group_correct", pa.int32()),
        ("finish_reason", pa.string()),
        ("verdict", pa.string()),
        ("policy_version_end", pa.int64()),
        ("kept", pa.bool_()),
        ("reward_scores", pa.list_(pa.float32())),
    ]
)
"""Columns of a rollout, frozen at birth. `advantage` and `behavior_logprobs` are null if it was
dropped (`kept` false), `reward` if missing, `group_reward_mean` and `group_reward_std` if the group
has fewer than two rewards. `reward_scores` is empty unless a reward combines several scores."""

MASK = pa.field("completion_mask", pa.list_(pa.bool_()))
EXTRA = "extra_"
"""Optional columns, which a file has if one of its rollouts has a mask or extras; null for other
rollouts. `extra_<name>` has lists of numbers, or of fixed-size lists for arrays of more dimensions.
"""

LOG_ONLY = ("completion_text", "reward_scores")
"""Columns of rollouts/ that the buffer's snapshot does not have."""

OUTCOME_SCHEMA = pa.schema(
    (field.name, pa.int32() if field.name == "tokens" else pa.float64())
    for field in fields(RolloutOutcome)
)
"""Statistics of a rollout in the update that trained on it; null if it was not trained on."""

DRAW_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("rollout_id", pa.int64()),
        ("age_steps", pa.int64()),
        ("probability", pa.float64()),
        *OUTCOME_SCHEMA,
    ]
)
"""One row per drawn rollout, in the order drawn. `probability` is its first-draw probability, or
that of its query if `replay.unit` is query."""

UPDATE_COLUMNS = pa.schema([("update", pa.int64()), ("age_updates", pa.int64())])
"""Further columns if a step draws several times, once per optimizer update: the update, counted
over the run from 1, and the number of updates since the first that could draw the rollout."""

ROLLOUT_FILE_SCHEMA = pa.schema(
    [*ROLLOUT_SCHEMA, *OUTCOME_SCHEMA, ("behavior_logprob_mean", pa.float64())]
)
"""Columns of rollouts/. `behavior_logprob_mean` is the mean over trained tokens, for priorities."""


def optional_fields(schema: pa.Schema) -> list[pa.Field]:
    """Returns the fields of a schema that are a mask or extras."""
    return [field for field in schema if field.name == MASK.name or field.name.startswith(EXTRA)]


def optional_fields_of(rollouts: Sequence[Rollout]) -> list[pa.Field]:
    """Return the fields of the optional columns that `rollouts` need, for masks and extras."""
    with_extras = [rollout for rollout in reversed(rollouts) if rollout.extras]
    arrays = {name: array for rollout in with_extras for name, array in rollout.extras.items()}
    masked = any(rollout.completion_mask is not None for rollout in rollouts)
    types = {name: pa.from_numpy_dtype(arrays[name].dtype) for name in sorted(arrays)}
    for name, column_type in types.items():
        for size in reversed(arrays[name].shape[1:]):
            column_type = pa.list_(column_type, size)
        types[name] = pa.list_(column_type)
    extras = [pa.field(EXTRA + name, column_type) for name, column_type in types.items()]
    return [MASK, *extras] if masked else extras


def rollouts_to_table(
    rollouts: Sequence[Rollout], optional: Sequence[pa.Field] | None = None
) -> pa.Table:
    """Convert rollouts to a table with ROLLOUT_SCHEMA and `optional` fields (if None, those that
    the rollouts need), in order. Raises ValueError for a reward, advantage or group statistic that
    is not finite or not exact in float32, and for extras of one name and several types."""
    if optional is None:
        optional = optional_fields_of(rollouts)
    schema = pa.schema([*ROLLOUT_SCHEMA, *optional])
    arrays = [_to_array(field, _values_of(field.name, rollouts)) for field in schema]
    return pa.table(arrays, schema=schema)


def _values_of(name: str, rollouts: Sequence[Rollout]) -> list[Any]:
    """The values of a column."""
    if name.startswith(EXTRA):
        return [rollout.extras.get(name.removeprefix(EXTRA)) for rollout in rollouts]
    values = [getattr(rollout, name) for rollout in rollouts]
    return [np.array(row, np.float32) for row in values] if name == "reward_scores" else values


def table_to_rollouts(table: pa.Table) -> list[Rollout]:
    """Convert a table with the columns of ROLLOUT_SCHEMA, and masks and extras if present, to
    rollouts; other columns are ignored. Without the columns of `LOG_ONLY`, texts and scores are
    empty. Arrays are read-only copies, so that no rollout keeps the whole table in memory."""
    rollouts: list[Rollout] = []
    for batch in table.to_batches():
        columns = {
            name: _to_values(batch.column(name))
            for name in (*ROLLOUT_SCHEMA.names, MASK.name)
            if name in batch.schema.names
        }
        columns.setdefault("completion_text", [""] * batch.num_rows)
        scores = columns.get("reward_scores", [()] * batch.num_rows)
        columns["reward_scores"] = [tuple(map(float, row)) for row in scores]
        extras = {
            name.removeprefix(EXTRA): _to_values(batch.column(name))
            for name in batch.schema.names
            if name.startswith(EXTRA)
        }
        columns["extras"] = [
            {name: arrays[row] for name, arrays in extras.items() if arrays[row] is not None}
            for row in range(batch.num_rows)
        ]
        rollouts.extend(
            Rollout(**dict(zip(columns, row, strict=True)))
            for row in zip(*columns.values(), strict=True)
        )
    return rollouts


def step_path(folder: Path, step: int) -> Path:
    """`folder/step_000012.parquet` for step 12."""
    return folder / f"step_{step:06d}.parquet"


def write_step(
    folder: Path,
    step: int,
    generated: Sequence[Rollout],
    batch: ComposedBatch,
    outcomes: Sequence[RolloutOutcome],
    draws: bool = True,
    probe: Mapping[int, RolloutOutcome] = MappingProxyType({}),
) -> None:
    """Write the files of a step into a run's folder: all rollouts taken from the source, and with
    `draws` the draw. `outcomes[i]` belongs to `batch.entries[i]`; rollouts/ has those of this
    step's fresh ones. With `replay.shadow`, `probe` has them by index in the draw."""
    fresh_ids = {rollout.rollout_id for rollout in generated}
    fresh = {
        rollout.rollout_id: outcome
        for rollout, outcome in zip(batch.rollouts, outcomes, strict=True)
        if rollout.rollout_id in fresh_ids
    }
    write_rollouts(step_path(folder / "rollouts", step), generated, fresh)
    if draws:
        drawn = batch.drawn_outcomes(outcomes, probe)
        write_draws(step_path(folder / "draws", step), step, batch.draw, drawn)


def write_rollouts(
    path: Path, rollouts: Sequence[Rollout], outcomes: Mapping[int, RolloutOutcome]
) -> None:
    """Write all rollouts of a step, including dropped ones, in the order in which survivors enter
    the buffer (`verify_run` relies on it). `outcomes` are by id of trained rollouts."""
    table = rollouts_to_table(rollouts)
    statistics = _outcome_columns([outcomes.get(rollout.rollout_id) for rollout in rollouts])
    fields = [*ROLLOUT_FILE_SCHEMA, *optional_fields(table.schema)]
    count = len(ROLLOUT_SCHEMA)
    means = pa.array([rollout.behavior_logprob_mean for rollout in rollouts], pa.float64())
    columns = [*table.columns[:count], *statistics, means, *table.columns[count:]]
    _write(path, "rollouts", pa.table(columns, schema=pa.schema(fields)))


def write_draws(
    path: Path, step: int, draw: Draw, outcomes: Sequence[RolloutOutcome | None]
) -> None:
    """Write the draw of a step, in the order drawn. `outcomes[i]` belongs to `draw.entries[i]`."""
    count = len(draw.entries)
    if len(outcomes) != count:
        raise ValueError(f"step {step}: {len(outcomes)} outcomes for {count} drawn rollouts")
    columns = [
        pa.array([step] * count, pa.int64()),
        pa.array([entry.rollout_id for entry in draw.entries], pa.int64()),
        pa.array(draw.ages, pa.int64()),
        pa.array(draw.probabilities, pa.float64()),
        *_outcome_columns(outcomes),
    ]
    table = pa.table(columns, schema=DRAW_SCHEMA)
    if draw.update_N is not None:
        update_N = draw.in_updates(np.full(count, step - 1)) + 1
        values_of_column = (update_N, draw.in_updates(draw.ages))
        for field, values in zip(UPDATE_COLUMNS, values_of_column, strict=True):
            table = table.append_column(field, pa.array(values, pa.int64()))
    _write(path, "draws", table)


def _write(path: Path, kind: str, table: pa.Table) -> None:
    """Write a table without flushing: a checkpoint flushes the files of the steps before it."""
    write_parquet(path, kind, ROLLOUT_LOG_VERSION, table.schema, [table], flushed=False)


def read_rollout_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a rollouts/ file: all columns, or only those named; `completion_mask` is null in a file
    without masks. Raises SnapshotError."""
    schema = ROLLOUT_FILE_SCHEMA
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns if name != MASK.name])
    with open_parquet(path, "rollouts", ROLLOUT_LOG_VERSION) as file:
        optional = optional_fields(file.schema_arrow)
        chosen = [field for field in optional if columns is None or field.name in columns]
        schema = pa.schema([*schema, *chosen])
        table = file.read(columns=schema.names).cast(schema)
    if columns is not None and MASK.name in columns and MASK.name not in table.column_names:
        table = table.append_column(MASK, pa.nulls(len(table), MASK.type))
    return table if columns is None else table.select(list(columns))


def read_draw_table(path: Path) -> pa.Table:
    """Read a draws/ file: DRAW_SCHEMA, and UPDATE_COLUMNS if present. Raises SnapshotError."""
    with open_parquet(path, "draws", ROLLOUT_LOG_VERSION) as file:
        return file.read(columns=[*DRAW_SCHEMA.names, *UPDATE_COLUMNS.names])


def _to_array(field: pa.Field, values: list[Any]) -> pa.Array:
    if pa.types.is_list(field.type):
        return _to_lists(field, values)
    if field.type == pa.float32():
        _check_exact(field.name, values)
    return pa.array(values, field.type)


def _check_exact(name: str, values: list[float | None]) -> None:
    """Raises ValueError for a number of a column that is not finite or not exact in float32."""
    defined = np.array([value for value in values if value is not None], dtype=np.float64)
    with np.errstate(over="ignore"):
        exact = defined.astype(np.float32).astype(np.float64) == defined
    storable = exact & np.isfinite(defined)
    if not storable.all():
        raise ValueError(
            f"{name} {defined[~storable][0]!r} is not finite or not exact in float32, the stored "
            "precision: round it when the rollout is made"
        )


def _to_lists(field: pa.Field, arrays: Sequence[np.ndarray | None]) -> pa.Array:
    """Converts arrays to a column of lists without Python objects; None becomes null. Raises
    ValueError, with the field's name, for an array of another dtype or trailing shape."""
    leaf, sizes = _leaf(field.type)
    # `to_pandas_dtype` needs pandas before pyarrow 26.
    dtype = pa.array([], leaf).to_numpy(zero_copy_only=False).dtype
    lengths = [0 if array is None else len(array) for array in arrays]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    present = [np.zeros((0, *sizes), dtype), *(array for array in arrays if array is not None)]
    for array in present:
        if array.dtype != dtype or array.shape[1:] != sizes:
            raise ValueError(
                f"{field.name}: expected an array of {dtype}, shape {('n', *sizes)}, found "
                f"{array.dtype}, shape {array.shape}"
            )
    values = pa.array(np.concatenate(present).reshape(-1))
    for size in reversed(sizes):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return pa.ListArray.from_arrays(
        pa.array(offsets),
        values,
        type=field.type,
        mask=pa.array([array is None for array in arrays], pa.bool_()),
    )


def _leaf(kind: pa.ListType) -> tuple[pa.DataType, tuple[int, ...]]:
    """Returns the type of the numbers in a list column, and the trailing shape of its arrays."""
    leaf, sizes = kind.value_type, []
    while pa.types.is_fixed_size_list(leaf):
        sizes.append(leaf.list_size)
        leaf = leaf.value_type
    return leaf, tuple(sizes)


def _to_values(column: pa.Array) -> list[Any]:
    """Converts a column to Python values; lists become read-only arrays of their own, null None."""
    if not pa.types.is_list(column.type):
        return column.to_pylist()
    flat, (_, sizes) = column.values, _leaf(column.type)
    for _ in sizes:
        flat = flat.flatten()
    values = flat.to_numpy(zero_copy_only=False).reshape(-1, *sizes)
    offsets = column.offsets.to_numpy().tolist()
    missing = column.is_null().to_numpy(zero_copy_only=False).tolist()
    arrays: list[np.ndarray | None] = []
    for start, end, absent in zip(offsets[:-1], offsets[1:], missing, strict=True):
        array = None if absent else values[start:end].copy()
        if array is not None:
            array.flags.writeable = False
        arrays.append(array)
    return arrays


def _outcome_columns(outcomes: Sequence[RolloutOutcome | None]) -> list[pa.Array]:
    """The columns of OUTCOME_SCHEMA; NaN becomes null."""
    return [
        pa.array([getattr(row, field.name, None) for row in outcomes], field.type, from_pandas=True)
        for field in OUTCOME_SCHEMA
    ]


def read_metrics(path: Path, allow_unfinished: bool = True) -> tuple[dict[str, Any], ...]:
    """Read the lines of metrics.jsonl, in file order; empty if there is no file.

    A last line without a newline is still being written: it is skipped, or with `allow_unfinished`
    false read like others. Raises SnapshotError for a file that cannot be read or, with file and
    line, for a line that is not JSON.
    """
    if not path.exists():
        return ()
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise SnapshotError(f"{path.parent}: {path.name} cannot be read: {error}") from error
    unfinished = lines.pop()
    if unfinished and not allow_unfinished:
        lines.append(unfinished)
    return tuple(_parse(path, number, text) for number, text in enumerate(lines, start=1))


def mean_over_steps(name: str, metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean of a metric over the steps in which it is defined; None if there are none."""
    values = [step[name] for step in metrics if step.get(name) is not None]
    return fmean(values) if values else None


def first_steps(path: Path, steps: int) -> list[str]:
    """Read the lines of steps 1 to `steps` of a metrics.jsonl, unparsed; a checkpoint of that step
    needs them. Raises CheckpointError if there are fewer complete lines."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except FileNotFoundError:
        lines = []
    if len(lines) < steps:
        raise CheckpointError(
            f"{path} has {len(lines)} complete lines; the checkpoint of step {steps} needs one "
            "line for each of its steps. Nothing was changed: restore the file from a copy, or "
            "start a new run from the checkpoint's weights with --set model.path=CHECKPOINT/model"
        )
    return lines[:steps]


def _parse(path: Path, number: int, text: str) -> dict[str, Any]:
    """Parses line `number` of metrics. Raises SnapshotError with file and line."""
    try:
        line: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise SnapshotError(
            f"{path}:{number}: not a line of metrics (a JSON object with a step): {text[:80]!r}"
        ) from error
    return line


STEP_FOLDERS = ("rollouts", "draws", "eval")
_STEP_FILE = re.compile(r"step_(\d{6,})\.(?:parquet|json)(?:\.tmp)?")


def step_files(run_dir: Path, first: int, last: int) -> list[Path]:
    """Returns the existing files of rollouts/ and draws/ of steps `first` … `last`."""
    steps = range(first, last + 1)
    paths = [step_path(run_dir / kind, step) for step in steps for kind in ("rollouts", "draws")]
    return [path for path in paths if path.exists()]


def remove_later(run_dir: Path, step: int) -> None:
    """Remove the files of steps after `step`. Files with other names stay."""
    for folder in STEP_FOLDERS:
        for file in (run_dir / folder).glob("step_*"):
            match = _STEP_FILE.fullmatch(file.name)
            if match and int(match[1]) > step:
                file.unlink()
