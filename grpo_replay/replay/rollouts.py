"""Makes rollouts of completions and verdicts: ids, group statistics, advantages, the filter."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from grpo_replay.recipe import Recipe, RewardSection, SamplingSection
from grpo_replay.replay.advantages import GroupAdvantage, estimate_advantages
from grpo_replay.types import (
    Completion,
    GenerationRequest,
    Graded,
    Prompt,
    RequestKey,
    Rollout,
    Verdict,
    completion_seed,
)


def group_requests(
    prompts: Mapping[int, Prompt], step: int, sampling: SamplingSection, seed: int
) -> list[GenerationRequest]:
    """Make G requests per prompt, each with a seed of its own, derived from the run's `seed`. The
    keys of `prompts` are prompt indices within the step."""
    return [
        GenerationRequest(
            key=key,
            prompt_token_ids=prompt.token_ids,
            seed=completion_seed(seed, key),
            max_tokens=sampling.max_completion_length,
            temperature=sampling.temperature,
        )
        for prompt_index, prompt in prompts.items()
        for key in (
            RequestKey(step, prompt_index, completion_index)
            for completion_index in range(sampling.group_size)
        )
    ]


def assemble_rollouts(
    prompts: Mapping[int, Prompt],
    graded: Mapping[RequestKey, Graded],
    recipe: Recipe,
    *,
    step: int,
    first_rollout_id: int,
    first_group_id: int,
) -> list[Rollout]:
    """Make the rollouts of whole groups, in the order of their ids. `kept` is False, and the
    rollout neither trained on nor stored,

    - in a group of equal rewards, unless `replay.drop_zero_variance` is false: advantages are 0;
    - without a reward, when it is also left out of the group's statistics, and in a group of fewer
      than two rewards;
    - if the completion was truncated and `reward.mask_truncated` is set, and if no token trains.

    Ids are consecutive over the prompts of the step: group `first_group_id + prompt_index`,
    rollout `first_rollout_id + prompt_index * G + completion_index`. Behaviour log-probs are None
    until `with_behavior_logprobs`.
    """
    size, rollouts = recipe.sampling.group_size, []
    for prompt_index, prompt in sorted(prompts.items()):
        keys = [RequestKey(step, prompt_index, index) for index in range(size)]
        members = [_with_length_penalty(graded[key], recipe) for key in keys]
        group, correct = _score_group([member.verdict for member in members], recipe)
        shared = {"group_id": first_group_id + prompt_index, "group_correct": correct}
        first = first_rollout_id + prompt_index * size
        rollouts += [
            _rollout(prompt, member, group, recipe.reward, rollout_id=first + index, **shared)
            for index, member in enumerate(members)
        ]
    return rollouts


def _with_length_penalty(graded: Graded, recipe: Recipe) -> Graded:
    """Add the length penalty to the reward and the scores, if the recipe has one."""
    verdict, buffer = graded.verdict, recipe.reward.overlong_buffer_tokens
    if buffer is None or verdict.reward is None:
        return graded
    length = len(graded.completion.token_ids)
    score = overlong_score(length, recipe.sampling.max_completion_length, buffer)
    scores = (*verdict.scores, score)
    return graded._replace(verdict=replace(verdict, reward=verdict.reward + score, scores=scores))


def overlong_score(length_tokens: int, longest_tokens: int, buffer_tokens: int) -> float:
    """Compute a completion's length penalty, in [-1, 0]: DAPO's soft overlong punishment (eq. 13).

    0 up to `longest_tokens - buffer_tokens`, then falling linearly to -1 at `longest_tokens`.
    Example: with at most 20 tokens and a buffer of 8, lengths 12, 14, 20 score 0, -0.25 and -1.
    """
    free_tokens = longest_tokens - buffer_tokens
    return max(-1.0, min(0.0, (free_tokens - length_tokens) / buffer_tokens))


def _score_group(verdicts: Sequence[Verdict], recipe: Recipe) -> tuple[GroupAdvantage, int]:
    """Compute a group's statistics, its advantages unless dropped, and its correct completions."""
    group = estimate_advantages([verdict.reward for verdict in verdicts], recipe.advantage)
    if group.std == 0 and not recipe.replay.drop_zero_variance:
        # The group is trained on with advantage 0 (asymre: see `loss_coefficient`).
        group = replace(group, advantages_G=np.zeros(len(verdicts), dtype=np.float32))
    rewarded = (verdict for verdict in verdicts if verdict.reward is not None)
    return group, sum(verdict.scores[0] >= recipe.reward.correct for verdict in rewarded)


def _rollout(
    prompt: Prompt,
    graded: Graded,
    group: GroupAdvantage,
    section: RewardSection,
    *,
    rollout_id: int,
    group_id: int,
    group_correct: int,
) -> Rollout:
    """Make one rollout of a graded completion and the statistics of its group. The single scores
    are kept only if the reward is not just one of them."""
    completion, text, verdict = graded
    advantage = _advantage(completion, verdict, group, section.mask_truncated)
    is_combined = len(section.score_names) > 1 or section.functions[0].weight != 1
    scores = verdict.scores if is_combined else ()
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        prompt_id=prompt.prompt_id,
        completion_index=completion.key.completion_index,
        birth_step=completion.key.step,
        policy_version=completion.policy_version,
        policy_version_end=completion.policy_version_end,
        prompt_token_ids=prompt.token_ids,
        completion_token_ids=completion.token_ids,
        completion_text=text,
        behavior_logprobs=None,
        sampler_logprobs=completion.sampler_logprobs,
        reward=None if verdict.reward is None else float(np.float32(verdict.reward)),
        advantage=advantage,
        group_reward_mean=group.mean,
        group_reward_std=group.std,
        group_correct=group_correct,
        finish_reason=completion.finish_reason,
        verdict=verdict.status,
        kept=advantage is not None,
        reward_scores=tuple(float(np.float32(score)) for score in scores),
        completion_mask=completion.completion_mask,
        extras=completion.extras,
    )


def _advantage(
    completion: Completion, verdict: Verdict, group: GroupAdvantage, mask_truncated: bool
) -> float | None:
    """Returns the advantage of a completion; None if it is neither trained on nor stored: without a
    reward, in a dropped group, truncated under `mask_truncated`, or without a token that trains."""
    mask_T = completion.completion_mask
    is_masked = mask_truncated and completion.finish_reason == "length"
    is_masked |= mask_T is not None and not mask_T.any()
    advantages_G = group.advantages_G if verdict.reward is not None else None
    if advantages_G is None or is_masked:
        return None
    return float(advantages_G[completion.key.completion_index])


def with_behavior_logprobs(
    rollouts: Sequence[Rollout], logprobs: Mapping[int, np.ndarray]
) -> list[Rollout]:
    """Return the kept rollouts with their behaviour log-probs (float32 [T], by rollout id), which
    never change afterwards. Raises KeyError for a kept rollout without log-probs."""
    return [
        replace(rollout, behavior_logprobs=logprobs[rollout.rollout_id])
        for rollout in rollouts
        if rollout.kept
    ]
