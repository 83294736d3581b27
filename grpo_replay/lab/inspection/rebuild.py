"""Rebuilds the buffer after any step from the rollout log, with the code of the buffer itself."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from grpo_replay.errors import SnapshotError
from grpo_replay.lab.inspection.rollout_columns import (
    DrawColumns,
    RolloutColumns,
    read_draws,
    read_log,
)
from grpo_replay.lab.inspection.source import Source
from grpo_replay.recipe import ReplaySection
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.compose import insert_after_update, insert_before_draw
from grpo_replay.types import ComposedBatch, Draw, Rollout

NO_ROW = -1
"""Returned by `find_rows` for an unknown id."""

_NO_IDS = np.zeros(0, dtype=np.int32)
_NOTHING_DRAWN = ComposedBatch((), np.zeros(0, bool), np.zeros(0, np.int64), Draw.empty())


def rollouts_without_tokens(columns: RolloutColumns) -> list[Rollout]:
    """Rollouts whose completions have their length but not their tokens; all fields that the buffer
    and the priorities read are filled in."""
    longest = int(columns.tokens.max(initial=0))
    token_ids, logprobs = np.zeros(longest, np.int32), np.zeros(longest, np.float32)
    return [
        Rollout(
            rollout_id=int(columns.rollout_id[i]),
            group_id=int(columns.group_id[i]),
            prompt_id=columns.prompt_ids[columns.prompt[i]],
            completion_index=0,
            birth_step=int(columns.birth_step[i]),
            policy_version=0,
            policy_version_end=0,
            prompt_token_ids=_NO_IDS,
            completion_token_ids=token_ids[: columns.tokens[i]],
            completion_text="",
            behavior_logprobs=logprobs[: columns.tokens[i]],
            sampler_logprobs=logprobs[: columns.tokens[i]],
            reward=float(columns.reward[i]),
            advantage=float(columns.advantage[i]),
            group_reward_mean=0.0,
            group_reward_std=float(columns.group_std[i]),
            group_correct=int(columns.group_correct[i]),
            finish_reason="length" if columns.truncated[i] else "stop",
            verdict="",
            kept=True,
        )
        for i in range(len(columns))
    ]


def rebuild_stored(source: Source, settings: ReplaySection, group_size: int) -> RolloutColumns:
    """The rollouts stored after `source.step`, oldest first, with priorities and uses.

    Raises SnapshotError if the run logged no rollouts.
    """
    if not source.rollout_files:
        raise SnapshotError(
            f"{source.path}: no checkpoint of step {source.step} and no rollouts/ to rebuild the "
            "buffer from (tracking.log_rollouts is off); choose a step with a checkpoint"
        )
    steps, log = survivors_for(source, source.step or 0, settings)
    buffer = ReplayBuffer(settings, group_size)
    for _ in replay_storage(buffer, log, steps):
        pass
    return _with_uses(buffer, log, read_draws(source.draw_files))


def survivors_for(
    source: Source, step: int, settings: ReplaySection
) -> tuple[list[int], RolloutColumns]:
    """The logged steps, ascending, from the first that can have rollouts stored at `step` under the
    age limit, and their survivors."""
    start = 0 if settings.max_age_steps is None else step - settings.max_age_steps
    files = [file for file in source.rollout_files if file[0] >= start]
    log = read_log(files)
    return [logged for logged, _ in files], log.take(log.kept)


def replay_storage(
    buffer: ReplayBuffer, survivors: RolloutColumns, steps: Iterable[int]
) -> Iterator[int]:
    """Repeat the insertions and evictions of each step; yields the step after applying it.

    Nothing is drawn, so uses are not counted.
    """
    for step in steps:
        fresh = rollouts_without_tokens(survivors.take(survivors.logged_step == step))
        buffer.evict(step)
        insert_before_draw(buffer, fresh, step)
        insert_after_update(buffer, fresh, step, _NOTHING_DRAWN)
        yield step


def _with_uses(buffer: ReplayBuffer, log: RolloutColumns, draws: DrawColumns) -> RolloutColumns:
    ids = np.array(buffer.column("rollout_id"))
    stored = log.take(find_rows(log.rollout_id, ids))
    stored.priority[:] = buffer.column("priority")
    rows = find_rows(ids, draws.rollout_id)
    hit = rows >= 0
    np.add.at(stored.times_used, rows[hit], 1)
    np.maximum.at(stored.last_used_step, rows[hit], draws.step[hit])
    return stored


def find_rows(ids_N: np.ndarray, wanted_M: Sequence[int] | np.ndarray) -> np.ndarray:
    """Row of each wanted id in `ids_N` (distinct, in any order); NO_ROW for an unknown id."""
    wanted = np.asarray(wanted_M, dtype=np.int64)
    if len(ids_N) == 0:
        return np.full(wanted.shape, NO_ROW, dtype=np.int64)
    order = np.argsort(ids_N, kind="stable")
    places = np.minimum(np.searchsorted(ids_N, wanted, sorter=order), len(ids_N) - 1)
    rows = order[places]
    return np.where(ids_N[rows] == wanted, rows, NO_ROW)
