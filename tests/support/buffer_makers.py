"""Rollouts by hand, for the tests of the buffer."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from grpo_replay.recipe import ReplaySection
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.advantages import group_advantages
from grpo_replay.replay.entry_store import NEVER_USED
from grpo_replay.replay.insertion import number_problem
from grpo_replay.types import Rollout


def make_rollout(
    rollout_id: int,
    *,
    group_id: int | None = None,
    birth_step: int = 1,
    advantage: float | None = 1.0,
    reward: float = 1.0,
    group_reward_mean: float = 0.0,
    group_reward_std: float = 1.0,
    completion_index: int = 0,
    group_correct: int = 1,
    tokens: int = 3,
    kept: bool = True,
) -> Rollout:
    length = np.arange(tokens)
    return Rollout(
        rollout_id=rollout_id,
        group_id=rollout_id if group_id is None else group_id,
        prompt_id=f"problem-{group_id}",
        completion_index=completion_index,
        birth_step=birth_step,
        policy_version=birth_step - 1,
        policy_version_end=birth_step - 1,
        prompt_token_ids=np.array([1, 2], dtype=np.int32),
        completion_token_ids=(length + rollout_id % 100).astype(np.int32),
        completion_text=f"text {rollout_id}",
        behavior_logprobs=(-0.1 * length - rollout_id % 7).astype(np.float32) if kept else None,
        sampler_logprobs=(-0.1 * length - rollout_id % 7 - 1e-3).astype(np.float32),
        reward=reward,
        advantage=advantage if kept else None,
        group_reward_mean=group_reward_mean,
        group_reward_std=group_reward_std,
        group_correct=group_correct,
        finish_reason="stop",
        verdict="correct" if reward > 0 else "incorrect",
        kept=kept,
    )


def make_group(
    first_id: int,
    group_id: int,
    birth_step: int,
    rewards_G: Sequence[float],
    drop_zero_variance: bool = True,
) -> list[Rollout]:
    """One prompt's rollouts with true group statistics; if the rewards are equal, not kept, or
    kept with advantage 0."""
    group = group_advantages(rewards_G)
    advantages_G = group.advantages_G
    if advantages_G is None and not drop_zero_variance:
        advantages_G = np.zeros(len(rewards_G), np.float32)
    return [
        make_rollout(
            first_id + i,
            group_id=group_id,
            birth_step=birth_step,
            advantage=None if advantages_G is None else float(advantages_G[i]),
            reward=float(np.float32(reward)),
            group_reward_mean=group.mean,
            group_reward_std=group.std,
            group_correct=sum(reward >= 1 for reward in rewards_G),
            completion_index=i,
            tokens=1 + (first_id + i) % 4,
            kept=advantages_G is not None,
        )
        for i, reward in enumerate(rewards_G)
    ]


def replay_settings(**changes: object) -> ReplaySection:
    """Paper A's settings without warm-up, changed by keyword."""
    return ReplaySection(**{"warmup_steps": 0, **changes})


def ids(rollouts: Sequence[Rollout]) -> list[int]:
    return [rollout.rollout_id for rollout in rollouts]


ARRAYS = (
    *("prompt_token_ids", "completion_token_ids", "behavior_logprobs", "sampler_logprobs"),
    "completion_mask",
)


def assert_same_rollouts(first, second, without=()):
    for one, other in zip(first, second, strict=True):
        for field in dataclasses.fields(Rollout):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if field.name in without:
                continue
            if field.name == "extras":
                assert a.keys() == b.keys()
                for name, array in a.items():
                    np.testing.assert_array_equal(array, b[name], strict=True)
            elif field.name in ARRAYS and a is not None:
                assert a.dtype == b.dtype
                assert a.tobytes() == b.tobytes(), field.name
            else:
                assert (a, type(a)) == (b, type(b)), field.name


def drawn_buffer(rollouts=40):
    buffer = ReplayBuffer(replay_settings(max_age_steps=3, capacity_rollouts=30), 4)
    for step in range(1, 1 + rollouts // 4):
        buffer.evict(step)
        buffer.insert(make_group(4 * step, step, step, [1, -1, 0.1, -1]), step)
        buffer.draw(3, step, np.random.default_rng(step))
    return buffer


def check_valid(buffer: ReplayBuffer) -> tuple[bool, str]:
    """(True, "") if all invariants hold, otherwise False and the first violated one."""
    ids = buffer._columns["rollout_id"]
    uses = buffer._columns["times_used"]
    last_used = buffer._columns["last_used_step"]
    births = buffer._columns["birth_step"]
    used = last_used != NEVER_USED
    rollouts = buffer.rollouts()
    holds = {
        "more rollouts than the capacity": len(buffer) <= buffer.settings.capacity_rollouts,
        "a rollout is stored twice": np.unique(ids).size == ids.size,
        "an id in the column differs from its rollout's": all(
            entry.rollout_id == rollout.rollout_id == i
            for entry, rollout, i in zip(buffer.entries(), rollouts, ids, strict=True)
        ),
        "a priority is negative or not finite": bool(
            (np.isfinite(buffer._columns["priority"]) & (buffer._columns["priority"] >= 0)).all()
        ),
        "times_used and last_used_step disagree": bool(((uses > 0) == used).all()),
        "a rollout was used before its birth": bool((last_used[used] >= births[used]).all()),
    }
    violated = [violation for violation, fine in holds.items() if not fine]
    problems = [(each.rollout_id, number_problem(each)) for each in rollouts]
    violated += [f"rollout {rollout_id}: {problem}" for rollout_id, problem in problems if problem]
    return not violated, violated[0] if violated else ""
