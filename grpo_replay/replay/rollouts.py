"""Rollouts from completions and verdicts: ids, group statistics, advantages, the filter."""

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
    """G requests per prompt, each with its own seed, from the run's `seed`. `prompts` maps the
    index within the step."""
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
    """Rollouts of whole groups, by rollout id. A group with equal rewards has `kept` False, or
    advantage 0 if `replay.drop_zero_variance` is false. A completion without a reward has
    `kept` False and counts nowhere in its group; with fewer than two rewards, so has the whole
    group. With `reward.mask_truncated`, a completion that was cut off has `kept` False too, and so
    has one with a mask that leaves no token to train.

    Ids are consecutive over the prompts of the step: group `first_group_id + prompt_index`,
    rollout `first_rollout_id + prompt_index * G + completion_index`. Behaviour log-probs are not
    known yet.
    """
    size, rollouts = recipe.sampling.group_size, []
    for prompt_index, prompt in sorted(prompts.items()):
        keys = [RequestKey(step, prompt_index, index) for index in range(size)]
        members = [_with_length(graded[key], recipe) for key in keys]
        group, correct = _score_group([member.verdict for member in members], recipe)
        shared = {"group_id": first_group_id + prompt_index, "group_correct": correct}
        first = first_rollout_id + prompt_index * size
        rollouts += [
            _rollout(prompt, member, group, recipe.reward, rollout_id=first + index, **shared)
            for index, member in enumerate(members)
        ]
    return rollouts


def _with_length(graded: Graded, recipe: Recipe) -> Graded:
    """With the length penalty among the scores of its verdict, if the recipe has one."""
    verdict, buffer = graded.verdict, recipe.reward.overlong_buffer_tokens
    if buffer is None or verdict.reward is None:
        return graded
    length = len(graded.completion.token_ids)
    score = overlong_score(length, recipe.sampling.max_completion_length, buffer)
    scores = (*verdict.scores, score)
    return graded._replace(verdict=replace(verdict, reward=verdict.reward + score, scores=scores))


def overlong_score(length_tokens: int, longest_tokens: int, buffer_tokens: int) -> float:
    """The score of a completion for its length, in [-1, 0]: DAPO's soft overlong punishment (Yu et
    al. 2025, equation 13).

    0 up to `longest_tokens - buffer_tokens`, then falling linearly to -1 at `longest_tokens`.
    Example: of at most 20 tokens with a buffer of 8, lengths 12, 14 and 20 score 0, -0.25 and -1.
    """
    free_tokens = longest_tokens - buffer_tokens
    return max(-1.0, min(0.0, (free_tokens - length_tokens) / buffer_tokens))


def _score_group(verdicts: Sequence[Verdict], recipe: Recipe) -> tuple[GroupAdvantage, int]:
    """What the rollouts of one group share: statistics, with advantages unless it is dropped, and
    the number of correct ones."""
    group = estimate_advantages([verdict.reward for verdict in verdicts], recipe.advantage)
    if group.std == 0 and not recipe.replay.drop_zero_variance:
        # Trained on with 0 (asymre: `loss_coefficient`).
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
    completion, text, verdict = graded
    advantage = _advantage(completion, verdict, group, section.mask_truncated)
    combined = len(section.score_names) > 1 or section.functions[0].weight != 1
    scores = verdict.scores if combined else ()
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
    """None for a completion that is neither trained on nor stored."""
    mask_T = completion.completion_mask
    is_masked = mask_truncated and completion.finish_reason == "length"
    is_masked |= mask_T is not None and not mask_T.any()
    if group.advantages_G is None or verdict.reward is None or is_masked:
        return None
    return float(group.advantages_G[completion.key.completion_index])


def with_behavior_logprobs(
    rollouts: Sequence[Rollout], logprobs: Mapping[int, np.ndarray]
) -> list[Rollout]:
    """The survivors with their behaviour log-probs, which `logprobs` maps by rollout id. They never
    change afterwards. Raises KeyError for a survivor without."""
    return [
        replace(rollout, behavior_logprobs=logprobs[rollout.rollout_id])
        for rollout in rollouts
        if rollout.kept
    ]
