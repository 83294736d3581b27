"""The life of one rollout: its group, each use, and how it left the buffer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from grpo_replay.errors import SnapshotError
from grpo_replay.lab.inspection.ageing import OUTCOME_COLUMNS
from grpo_replay.lab.inspection.column_reader import Kind, iter_columns, schema_of
from grpo_replay.lab.inspection.rebuild import replay_storage, survivors_for
from grpo_replay.lab.inspection.source import Source
from grpo_replay.recipe import Recipe
from grpo_replay.replay import ReplayBuffer

_MEMBER = ("rollout_id", "completion_index", "reward", "advantage", "verdict")


@dataclass(frozen=True, slots=True)
class Use:
    """One draw of the rollout."""

    step: int
    age_steps: int
    probability: float
    outcome: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Life:
    """Everything the files record about one rollout."""

    rollout: Mapping[str, Any]  # its row; token ids are lists
    prompt_text: str | None  # None if no checkpoint has a tokenizer
    group: tuple[Mapping[str, Any], ...]  # all members, including this rollout
    logged_step: int | None  # the step that took it from the sampler; None in a snapshot
    fresh_outcome: Mapping[str, Any] | None  # None if that step did not train on it without a draw
    uses: tuple[Use, ...]
    fate: str  # one sentence


def read_life(source: Source, rollout_id: int) -> Life:
    """The life of one rollout up to the inspected step.

    Raises SnapshotError if the rollout is in neither the rollout log nor the snapshot.
    """
    row, group, step = _find(source, rollout_id)
    uses = _uses(source, rollout_id)
    # With pool and FIFO, the use of a step that drew the rollout is in both logs.
    drawn = any(use.step == step for use in uses)
    trained_fresh = step is not None and row["tokens"] is not None and not drawn
    return Life(
        rollout={name: value for name, value in row.items() if name not in OUTCOME_COLUMNS},
        prompt_text=_prompt_text(source, row["prompt_token_ids"]),
        group=tuple({name: member[name] for name in _MEMBER} for member in group),
        logged_step=step,
        fresh_outcome={name: row[name] for name in OUTCOME_COLUMNS} if trained_fresh else None,
        uses=uses,
        fate=_fate(source, row),
    )


def _find(source: Source, rollout_id: int) -> tuple[dict, list[dict], int | None]:
    """The row of the rollout and the rows of its group, from the log or else the snapshot; and the
    step whose log has it."""
    files: list[tuple[Kind, Path, int | None]]
    files = [("rollouts", path, step) for step, path in source.rollout_files]
    if not files and source.snapshot is not None:
        files = [("buffer", source.snapshot, None)]
    id_bounds: list[int] = []  # smallest and largest id of every batch
    for kind, path, step in files:
        for batch in iter_columns(path, kind, ("rollout_id", "group_id")):
            ids = batch.column(0).to_numpy()
            if ids.size:
                id_bounds += [int(ids.min()), int(ids.max())]
            found = np.flatnonzero(ids == rollout_id)
            if found.size:
                group_id = batch.column(1)[int(found[0])].as_py()
                return *_rows(kind, path, rollout_id, group_id), step
    known = f"; ids run from {min(id_bounds)} to {max(id_bounds)}" if id_bounds else ""
    raise SnapshotError(f"{source.path}: no rollout {rollout_id} up to step {source.step}{known}")


def _rows(kind: Kind, path: Path, rollout_id: int, group_id: int) -> tuple[dict, list[dict]]:
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
            matching = batch.filter(pc.equal(batch.column(0), rollout_id))
            for row in matching.to_pylist():
                outcome = {name: row[name] for name in OUTCOME_COLUMNS}
                uses.append(Use(row["step"], row["age_steps"], row["probability"], outcome))
    return tuple(uses)


def _fate(source: Source, row: Mapping[str, Any]) -> str:
    if row["reward"] is None:
        return "never stored: the reward function gave no reward, so it counts nowhere"
    if row["group_reward_std"] is None:
        return "never stored: fewer than two rewards of its group came, so there is no comparison"
    if not row["kept"] and row["group_reward_std"] > 0:
        recipe = source.recipe
        masks = recipe is not None and recipe.reward.mask_truncated
        if masks and row["finish_reason"] == "length":
            return "never stored: reward.mask_truncated leaves out what was cut off"
        return (
            "never stored: it was too old at its step, or the weights changed while it was sampled"
        )
    if not row["kept"]:
        return "never stored: all rewards of its group are equal, so there is no learning signal"
    recipe = source.recipe
    if recipe is None or not source.rollout_files:
        return "stored at the time of the snapshot"
    if not recipe.replays:
        return "never stored: this run does not replay"
    evicted = _eviction_step(source, recipe, row["rollout_id"], row["birth_step"])
    if evicted is None:
        return f"still stored after step {source.step}"
    age = evicted - row["birth_step"]
    limit = recipe.replay.max_age_steps
    reason = f"max_age_steps {limit}" if limit is not None and age >= limit else "the capacity"
    return f"evicted at the end of step {evicted}, at age {age}, by {reason}"


def _eviction_step(source: Source, recipe: Recipe, rollout_id: int, birth_step: int) -> int | None:
    """The step at whose end the rollout was evicted; None if it is still stored."""
    settings = recipe.replay
    steps, log = survivors_for(source, birth_step, settings)
    buffer = ReplayBuffer(settings, recipe.sampling.group_size)
    stored_at = int(log.logged_step[log.rollout_id == rollout_id][0])
    for step in replay_storage(buffer, log, steps):
        if step >= stored_at and not (buffer.column("rollout_id") == rollout_id).any():
            return step
    return None


def _prompt_text(source: Source, token_ids: list[int]) -> str | None:
    """The prompt, decoded with the tokenizer of the newest checkpoint."""
    if source.run_dir is None:
        return None
    found = sorted(source.run_dir.glob("checkpoints/step_*/model/tokenizer.json"))
    if not found:
        return None
    # Imported here: only `--show` needs it. It loads in milliseconds, unlike transformers.
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(found[-1])).decode(token_ids, skip_special_tokens=False)
