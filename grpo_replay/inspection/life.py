"""One rollout's life: its birth and group, each use, and how it left the buffer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from grpo_replay.buffer import ReplayBuffer
from grpo_replay.errors import SnapshotError
from grpo_replay.inspection.ageing import OUTCOME_COLUMNS
from grpo_replay.inspection.column_reader import iter_columns, schema_of
from grpo_replay.inspection.rebuild import replay_storage, survivors_for
from grpo_replay.inspection.source import Source

_MEMBER = ("rollout_id", "completion_index", "reward", "advantage", "verdict")


@dataclass(frozen=True, slots=True)
class Use:
    """One time the rollout was drawn."""

    step: int
    age_steps: int
    probability: float
    outcome: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Life:
    """Everything the files know about one rollout."""

    rollout: Mapping[str, Any]  # its row; token ids as lists
    prompt_text: str | None  # None where the run has no tokenizer at hand
    group: tuple[Mapping[str, Any], ...]  # its members, itself included
    fresh_outcome: Mapping[str, Any] | None  # None if it was not trained on at its birth
    uses: tuple[Use, ...]
    fate: str  # in plain words


def read_life(source: Source, rollout_id: int) -> Life:
    """The life of one rollout up to the inspected step.

    Raises SnapshotError if neither the rollout log nor the snapshot has it.
    """
    row, group = _find(source, rollout_id)
    logged = bool(source.rollout_files)
    fresh = {name: row[name] for name in OUTCOME_COLUMNS} if logged else None
    return Life(
        rollout={name: value for name, value in row.items() if name not in OUTCOME_COLUMNS},
        prompt_text=_prompt_text(source, row["prompt_token_ids"]),
        group=tuple({name: member[name] for name in _MEMBER} for member in group),
        fresh_outcome=fresh if fresh and fresh["tokens"] is not None else None,
        uses=_uses(source, rollout_id),
        fate=_fate(source, row),
    )


def _find(source: Source, rollout_id: int) -> tuple[dict, list[dict]]:
    """The rollout's row and its group's rows, from the log or else from the snapshot."""
    places: list[tuple[str, Path]] = [("rollouts", path) for _, path in source.rollout_files]
    if not places and source.snapshot is not None:
        places = [("buffer", source.snapshot)]
    low = high = None
    for kind, path in places:
        for batch in iter_columns(path, kind, ("rollout_id", "group_id")):
            ids = batch.column(0).to_numpy()
            if ids.size:
                low = min(ids.min(), ids.min() if low is None else low)
                high = max(ids.max(), ids.max() if high is None else high)
            place = np.flatnonzero(ids == rollout_id)
            if place.size:
                return _rows(kind, path, rollout_id, batch.column(1)[int(place[0])].as_py())
    known = f"; ids run from {low} to {high}" if low is not None else ""
    raise SnapshotError(f"{source.path}: no rollout {rollout_id} up to step {source.step}{known}")


def _rows(kind: str, path: Path, rollout_id: int, group_id: int) -> tuple[dict, list[dict]]:
    names = schema_of(kind).names
    members: list[dict] = []
    for batch in iter_columns(path, kind, names):
        members.extend(batch.filter(pc.equal(batch.column("group_id"), group_id)).to_pylist())
    return next(row for row in members if row["rollout_id"] == rollout_id), members


def _uses(source: Source, rollout_id: int) -> tuple[Use, ...]:
    names = ("rollout_id", "step", "age_steps", "probability", *OUTCOME_COLUMNS)
    uses: list[Use] = []
    for _, path in source.draw_files:
        for batch in iter_columns(path, "draws", names):
            mine = batch.filter(pc.equal(batch.column(0), rollout_id))
            for row in mine.to_pylist():
                outcome = {name: row[name] for name in OUTCOME_COLUMNS}
                uses.append(Use(row["step"], row["age_steps"], row["probability"], outcome))
    return tuple(uses)


def _fate(source: Source, row: Mapping[str, Any]) -> str:
    if not row["kept"]:
        return "never stored: all rewards of its group are equal, so it carries no signal"
    recipe = source.recipe
    if recipe is None or not source.rollout_files:
        return "stored when the snapshot was written"
    if not recipe.replays:
        return "never stored: this run does not replay"
    left = _eviction_step(source, row["rollout_id"], row["birth_step"])
    if left is None:
        return f"still stored after step {source.step}"
    age = left - row["birth_step"]
    limit = recipe.replay.max_age_steps
    why = f"max_age_steps {limit}" if limit is not None and age >= limit else "the capacity"
    return f"evicted at the end of step {left}, at age {age}, by {why}"


def _eviction_step(source: Source, rollout_id: int, birth_step: int) -> int | None:
    """The step after which the rollout is no longer stored; None if it still is."""
    settings = source.recipe.replay
    steps, log = survivors_for(source, birth_step, settings)
    buffer = ReplayBuffer(settings, source.recipe.sampling.group_size)
    for step in replay_storage(buffer, log, steps):
        if step >= birth_step and not (buffer.column("rollout_id") == rollout_id).any():
            return step
    return None


def _prompt_text(source: Source, token_ids: list[int]) -> str | None:
    """The prompt decoded by the tokenizer saved with the run's newest checkpoint."""
    if source.run_dir is None:
        return None
    found = sorted(source.run_dir.glob("checkpoints/step_*/model/tokenizer.json"))
    if not found:
        return None
    # Comes with transformers, but loads in milliseconds.
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(found[-1])).decode(token_ids, skip_special_tokens=False)
