"""Makes the rollouts of one group from the arrays of any trainer, for the buffer as a library."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NotRequired, TypedDict, Unpack

import numpy as np

from grpo_replay.replay.advantages import GroupAdvantage, group_advantages
from grpo_replay.types import Rollout


class CompletionArrays(TypedDict):
    """The arrays of a group, one for each of its G completions."""

    completion_token_ids: Sequence[Sequence[int] | np.ndarray]
    behavior_logprobs: Sequence[Sequence[float] | np.ndarray]
    """[T_i] under the policy that sampled the completion; frozen as π_b."""
    sampler_logprobs: NotRequired[Sequence[Sequence[float] | np.ndarray] | None]
    """[T_i] as the sampler reported them, if they differ."""
    completion_mask: NotRequired[Sequence[Sequence[bool] | np.ndarray] | None]
    """[T_i], True for the tokens that train; without it all do."""
    truncated: NotRequired[Sequence[bool] | None]
    """True for a completion that was cut off at its maximum length."""
    extras: NotRequired[Sequence[Mapping[str, Any]] | None]
    """Further arrays or tensors by name, as in `Rollout`; bfloat16 becomes float32."""


def rollouts_of_group(
    *,
    first_rollout_id: int,
    group_id: int,
    prompt_id: str,
    birth_step: int,
    prompt_token_ids: Sequence[int] | np.ndarray,
    rewards: Sequence[float | None],
    advantages: Sequence[float | None] | np.ndarray | None = None,
    keep_zero_variance: bool = False,
    correct: float = 1.0,
    std: str = "population",
    epsilon: float = 1e-6,
    divide_by_std: bool = True,
    **completions: Unpack[CompletionArrays],
) -> list[Rollout]:
    """Make the G rollouts of one prompt, with their advantages (paper A, section 3). `birth_step`
    is the step whose policy sampled them.

    Rollout i has the id `first_rollout_id + i`; ids of rollouts and of groups must be unique in a
    run and ascend. Rewards of at least `correct` count as correct. A completion whose reward is
    None is left out of the list and of the group's statistics; a completion without a token that
    trains is left out of the list only.

    Advantages are those of `group_advantages` with `std`, `epsilon` and `divide_by_std`, or the
    caller's `advantages`, rounded to float32. A group has no signal if all rewards are equal; with
    `advantages`, if these are all 0. The list is then empty, or all advantages are 0 with
    `keep_zero_variance`. With fewer than two rewards it is always empty. Raises ValueError if
    lengths differ, for several prompts, or if an advantage is not finite, NonFiniteError for a
    reward that is not finite.
    """
    completion_fields = _completion_fields(len(rewards), completions)
    group = group_advantages(rewards, std, epsilon, divide_by_std)
    if advantages is not None:
        group = replace(group, advantages_G=_caller_advantages(advantages, rewards))
    reward_fields = _reward_fields(rewards, group, correct, keep_zero_variance)
    prompt_fields: dict[str, Any] = {
        "prompt_id": prompt_id,
        "prompt_token_ids": _one_prompt(prompt_token_ids, prompt_id),
        "birth_step": birth_step,
        "policy_version": birth_step - 1,
        "policy_version_end": birth_step - 1,
    }
    return [
        Rollout(first_rollout_id + i, group_id, **prompt_fields, **completion_fields[i], **scores)
        for i, scores in reward_fields.items()
        if (mask_T := completion_fields[i]["completion_mask"]) is None or mask_T.any()
    ]


def _completion_fields(size: int, arrays: CompletionArrays) -> list[dict[str, Any]]:
    """Returns the fields of G = `size` rollouts that come from their completions. Raises ValueError
    if the arrays of a completion, or the numbers of completions, differ in length."""
    tokens, logprobs = arrays["completion_token_ids"], arrays["behavior_logprobs"]
    sampler, masks = arrays.get("sampler_logprobs"), arrays.get("completion_mask")
    extras = arrays.get("extras") or [{}] * size
    truncated = arrays.get("truncated")
    truncated = [False] * size if truncated is None else truncated
    sampler = logprobs if sampler is None else sampler
    if not len(tokens) == len(logprobs) == size:
        raise ValueError(
            f"a group has as many completions as rewards and log-probs, found {len(tokens)} "
            f"completions, {len(logprobs)} arrays of log-probs, {size} rewards"
        )
    lengths = [len(tokens_T) for tokens_T in tokens]
    for index, length in enumerate(lengths):
        if length != len(logprobs[index]) or not length:
            raise ValueError(
                f"completion {index} has {length} tokens and {len(logprobs[index])} log-probs: one "
                "log-prob for every token, and at least one"
            )
    for name, token_values in (("sampler_logprobs", sampler), ("completion_mask", masks)):
        if token_values is not None and [len(values_T) for values_T in token_values] != lengths:
            raise ValueError(f"{name} and completion_token_ids have different lengths")
    for name, values in (("extras", extras), ("truncated", truncated)):
        if len(values) != size:
            raise ValueError(f"{len(values)} {name} for {size} completions")
    return [
        {
            "completion_index": i,
            "completion_token_ids": as_array(tokens[i], np.int32),
            "completion_text": "",
            "behavior_logprobs": as_array(logprobs[i], np.float32),
            "sampler_logprobs": as_array(sampler[i], np.float32),
            "finish_reason": "length" if truncated[i] else "stop",
            "completion_mask": None if masks is None else as_array(masks[i], np.bool_),
            "extras": {name: as_array(array) for name, array in extras[i].items()},
        }
        for i in range(size)
    ]


def _one_prompt(token_ids: Any, prompt_id: str) -> np.ndarray:
    """Return the tokens as int32 [P]. Raises ValueError for the tokens of several prompts."""
    try:
        tokens_P = as_array(token_ids, np.int32)
        shape: tuple[Any, ...] = tokens_P.shape
    except ValueError:
        if not any(map(np.ndim, token_ids)):
            raise
        shape = (len(token_ids), "…")
    if len(shape) == 1:
        return tokens_P
    raise ValueError(
        f"prompt {prompt_id}: prompt_token_ids of shape {shape} are not of one prompt, [P]: a "
        "group is completions of one prompt, whose rewards are compared with each other. Make a "
        "group of each prompt; what differs between completions, such as the turns of an episode, "
        "belongs to completion_token_ids, with a completion_mask that is False there"
    )


def as_array(values: Any, dtype: type | None = None) -> np.ndarray:
    """Copy a list, an array or a tensor to a numpy array of `dtype`, by default of its own type.
    numpy has no bfloat16, and reads no tensor that is on a GPU or has a gradient."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        is_bfloat16 = str(values.dtype) == "torch.bfloat16"
        values = (values.float() if is_bfloat16 else values).numpy()
    return np.array(values, dtype)


def _reward_fields(
    rewards: Sequence[float | None], group: GroupAdvantage, correct: float, keep: bool
) -> dict[int, dict[str, Any]]:
    """Returns the fields that come from the rewards, by the index of every completion that becomes
    a rollout: those with a reward, but none in a group with fewer than two or without advantages.
    With `keep` a group without advantages gets 0 for all. `correct` is the least correct reward."""
    rewarded = {index: reward for index, reward in enumerate(rewards) if reward is not None}
    advantages_G = group.advantages_G
    if advantages_G is None and keep:
        advantages_G = np.zeros(len(rewards), np.float32)
    if advantages_G is None or len(rewarded) < 2:
        return {}
    group_correct = sum(reward >= correct for reward in rewarded.values())
    return {
        index: {
            "reward": float(np.float32(reward)),
            "advantage": float(advantages_G[index]),
            "group_reward_mean": group.mean,
            "group_reward_std": group.std,
            "group_correct": group_correct,
            "verdict": "correct" if reward >= correct else "incorrect",
            "kept": True,
        }
        for index, reward in rewarded.items()
    }


def _caller_advantages(
    advantages: Sequence[float | None] | np.ndarray, rewards: Sequence[float | None]
) -> np.ndarray | None:
    """Returns the caller's advantages, float32 [G]; None if they are 0 for all rewarded completions
    (no signal). Raises ValueError for one that is missing or not finite where there is a reward."""
    if len(advantages) != len(rewards):
        raise ValueError(f"{len(advantages)} advantages for {len(rewards)} rewards")
    advantages_G = np.array(advantages, np.float32)  # None is NaN
    rewarded = [index for index, reward in enumerate(rewards) if reward is not None]
    if not np.isfinite(advantages_G[rewarded]).all():
        raise ValueError(f"advantages {list(advantages)}: one finite number for every reward")
    return advantages_G if advantages_G[rewarded].any() else None
