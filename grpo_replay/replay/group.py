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
    correct: float = 1.0,
    epsilon: float = 1e-6,
) -> list[Rollout]:
    """The G rollouts of one prompt, born at `step`, with their advantages (paper A, section 3).

    Rollout i has `completion_token_ids[i]` and its log-probs [T_i] under the policy that sampled
    it, which become π_b for good. Ids are `first_rollout_id + i`; the ids of rollouts and of groups
    must be unique in a run and ascend. The list is empty if all rewards are equal: the group has no
    signal. Rewards of at least `correct` count as correct. A completion whose reward is None (it
    did not come) is left out, of the list and of the statistics of its group.

    Raises ValueError if the lengths differ, NonFiniteError for a reward that is not finite.
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
    group = group_advantages(rewards, epsilon=epsilon)
    if group.advantages_G is None:
        return []
    came = [(index, reward) for index, reward in enumerate(rewards) if reward is not None]
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
            sampler_logprobs=np.array(behavior_logprobs[index], np.float32),
            reward=float(np.float32(reward)),
            advantage=float(group.advantages_G[index]),
            group_reward_mean=group.mean,
            group_reward_std=group.std,
            group_correct=sum(each >= correct for _, each in came),
            finish_reason="stop",
            verdict="correct" if reward >= correct else "incorrect",
            kept=True,
        )
        for index, reward in came
    ]
