"""From completions and verdicts to rollouts: ids, group statistics, advantages, the filter."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from grpo_replay.distributed.comm import Comm
from grpo_replay.grpo.advantages import group_advantages
from grpo_replay.grpo.seeding import completion_seed
from grpo_replay.recipe import Recipe
from grpo_replay.storage.rollout_log import bytes_to_rollouts, rollouts_to_bytes
from grpo_replay.types import Completion, GenerationRequest, Prompt, RequestKey, Rollout, Verdict


def group_requests(
    prompts: Mapping[int, Prompt], step: int, recipe: Recipe
) -> list[GenerationRequest]:
    """G requests for each prompt (by its index within the step), each with its own seed."""
    return [
        GenerationRequest(
            key=key,
            prompt_token_ids=prompt.token_ids,
            seed=completion_seed(recipe.run.seed, key),
            max_tokens=recipe.sampling.max_completion_length,
            temperature=recipe.sampling.temperature,
        )
        for prompt_index, prompt in prompts.items()
        for key in (
            RequestKey(step, prompt_index, completion_index)
            for completion_index in range(recipe.sampling.group_size)
        )
    ]


def assemble_rollouts(
    prompts: Mapping[int, Prompt],
    completions: Mapping[RequestKey, Completion],
    texts: Mapping[RequestKey, str],
    verdicts: Mapping[RequestKey, Verdict],
    step: int,
    recipe: Recipe,
    first_rollout_id: int,
    first_group_id: int,
) -> list[Rollout]:
    """Rollouts of whole groups, by rollout id. Where all rewards are equal, `kept` is False, or
    with `replay.drop_zero_variance` false the advantage is 0.

    Ids are consecutive over the prompts of the step: group `first_group_id + prompt_index`,
    rollout `first_rollout_id + prompt_index * G + completion_index`. Behaviour log-probs are not
    known yet.
    """
    group_size = recipe.sampling.group_size
    rollouts = []
    for prompt_index, prompt in sorted(prompts.items()):
        keys = [RequestKey(step, prompt_index, index) for index in range(group_size)]
        rewards_G = np.array([verdicts[key].reward for key in keys])
        group = group_advantages(rewards_G, recipe.advantage.std, recipe.advantage.epsilon)
        advantages_G = group.advantages_G
        if advantages_G is None and not recipe.replay.drop_zero_variance:
            advantages_G = np.zeros(group_size, dtype=np.float32)
        correct = int((rewards_G >= recipe.reward.correct).sum())
        for key in keys:
            completion, verdict = completions[key], verdicts[key]
            index = key.completion_index
            rollouts.append(
                Rollout(
                    rollout_id=first_rollout_id + prompt_index * group_size + index,
                    group_id=first_group_id + prompt_index,
                    prompt_id=prompt.prompt_id,
                    completion_index=index,
                    birth_step=step,
                    policy_version=completion.policy_version,
                    policy_version_end=completion.policy_version_end,
                    prompt_token_ids=prompt.token_ids,
                    completion_token_ids=completion.token_ids,
                    completion_text=texts[key],
                    behavior_logprobs=None,
                    sampler_logprobs=completion.sampler_logprobs,
                    reward=float(np.float32(verdict.reward)),  # as it is stored
                    advantage=None if advantages_G is None else float(advantages_G[index]),
                    group_reward_mean=group.mean,
                    group_reward_std=group.std,
                    group_correct=correct,
                    finish_reason=completion.finish_reason,
                    verdict=verdict.status,
                    kept=advantages_G is not None,
                )
            )
    return rollouts


def gather_rollouts(comm: Comm, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Every rank's rollouts by rollout id, on rank 0; empty elsewhere."""
    if comm.world_size == 1:
        return list(rollouts)
    gathered = comm.gather(rollouts_to_bytes(rollouts))
    if gathered is None:
        return []
    everything = [rollout for payload in gathered for rollout in bytes_to_rollouts(payload)]
    return sorted(everything, key=lambda rollout: rollout.rollout_id)


def with_behavior_logprobs(
    rollouts: Sequence[Rollout], logprobs: Mapping[int, np.ndarray]
) -> list[Rollout]:
    """The survivors, with behaviour log-probs by rollout id, frozen from here on."""
    return [
        replace(rollout, behavior_logprobs=logprobs[rollout.rollout_id])
        for rollout in rollouts
        if rollout.kept
    ]
