"""Rollouts of one group from the arrays of any trainer: the way into the buffer as a library."""

from collections.abc import Sequence

import numpy as np

from grpo_replay.replay.advantages import group_advantages
from grpo_replay.types import Rollout


def rollouts_of_group(
    *,
    first_rollout_id: int,
    group_id: int,
    prompt_id: str,
    step: int,
    prompt_token_ids: Sequence[int] | np.ndarray,
    completion_token_ids: Sequence[Sequence[int] | np.ndarray],
    behavior_logprobs: Sequence[Sequence[float] | np.ndarray],
    rewards: Sequence[float | None],
    sampler_logprobs: Sequence[Sequence[float] | np.ndarray] | None = None,
    advantages: Sequence[float | None] | np.ndarray | None = None,
    keep_zero_variance: bool = False,
    correct: float = 1.0,
    std: str = "population",
    epsilon: float = 1e-6,
    divide_by_std: bool = True,
) -> list[Rollout]:
    """The G rollouts of one prompt, born at `step`, with their advantages (paper A, section 3).

    Rollout i has `completion_token_ids[i]` and its log-probs [T_i] under the policy that sampled
    it, which become π_b for good; `sampler_logprobs` are those that the sampler reported, if they
    differ. Ids are `first_rollout_id + i`; the ids of rollouts and of groups must be unique in a
    run and ascend. Rewards of at least `correct` count as correct. A completion whose reward is
    None (it did not come) is left out, of the list and of the statistics of its group.

    Advantages are those of `group_advantages` with `std`, `epsilon` and `divide_by_std`, or
    `advantages`, rounded to float32. If all rewards are equal, or all given advantages 0, the group
    has no signal: the list is empty, or has advantages 0 with `keep_zero_variance`. It is always
    empty if fewer than two rewards came.

    Raises ValueError if the lengths differ or a given advantage is not finite, NonFiniteError for a
    reward that is not finite.
    """
    size = len(rewards)
    if not len(completion_token_ids) == len(behavior_logprobs) == size:
        raise ValueError(
            f"a group has as many completions as rewards and log-probs, found "
            f"{len(completion_token_ids)} completions, {len(behavior_logprobs)} arrays of "
            f"log-probs, {size} rewards"
        )
    for index, (tokens, logprobs) in enumerate(zip(completion_token_ids, behavior_logprobs)):
        if len(tokens) != len(logprobs) or not len(tokens):
            raise ValueError(
                f"completion {index} has {len(tokens)} tokens and {len(logprobs)} log-probs: one "
                "log-prob for every token, and at least one"
            )
    sampler = behavior_logprobs if sampler_logprobs is None else sampler_logprobs
    if [len(each) for each in sampler] != [len(each) for each in behavior_logprobs]:
        raise ValueError("sampler_logprobs and behavior_logprobs have other lengths")
    group = group_advantages(rewards, std, epsilon, divide_by_std)
    came = [(index, reward) for index, reward in enumerate(rewards) if reward is not None]
    if len(came) < 2:
        return []
    advantages_G = group.advantages_G
    if advantages is not None:
        advantages_G = _given(advantages, [index for index, _ in came], size)
    if advantages_G is None:
        if not keep_zero_variance:
            return []
        advantages_G = np.zeros(size, np.float32)
    return [
        Rollout(
            rollout_id=first_rollout_id + index,
            group_id=group_id,
            prompt_id=prompt_id,
            completion_index=index,
            birth_step=step,
            policy_version=step - 1,
            policy_version_end=step - 1,
            prompt_token_ids=np.array(prompt_token_ids, np.int32),
            completion_token_ids=np.array(completion_token_ids[index], np.int32),
            completion_text="",
            behavior_logprobs=np.array(behavior_logprobs[index], np.float32),
            sampler_logprobs=np.array(sampler[index], np.float32),
            reward=float(np.float32(reward)),
            advantage=float(advantages_G[index]),
            group_reward_mean=group.mean,
            group_reward_std=group.std,
            group_correct=sum(each >= correct for _, each in came),
            finish_reason="stop",
            verdict="correct" if reward >= correct else "incorrect",
            kept=True,
        )
        for index, reward in came
    ]


def _given(
    advantages: Sequence[float | None] | np.ndarray, came: Sequence[int], size: int
) -> np.ndarray | None:
    """float32 [G]; None if those of the members `came`, whose rewards came, are all 0."""
    if len(advantages) != size:
        raise ValueError(f"{len(advantages)} advantages for {size} rewards")
    advantages_G = np.array(advantages, np.float32)  # None is NaN
    if not np.isfinite(advantages_G[came]).all():
        raise ValueError(f"advantages {list(advantages)}: one finite number for every reward")
    return advantages_G if advantages_G[came].any() else None
