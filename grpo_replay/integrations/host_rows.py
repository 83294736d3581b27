"""Conversion of a host's rows, which are completions before their group is known, to rollouts of
whole groups. Loads no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from grpo_replay.errors import UsageError
from grpo_replay.integrations.host_words import HostWords
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.advantages import GroupAdvantage, group_advantages
from grpo_replay.replay.group import as_array
from grpo_replay.types import Rollout, RolloutOutcome, first_score


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One completion that a host generated. Arrays may be lists, or tensors of any device and
    precision; they are stored as copies in the types named here.

    `advantage` is the host's own. `behavior_logprobs` are the denominator of its importance ratio:
    the log-probs of the policy at birth, computed by the trainer. `reward` is None if it is
    missing. `trains` is False if no token trains, as in a truncated completion that the host masks.
    `birth_step` is the step of the buffer whose policy sampled it; None for the coming one.
    `prompt_id` identifies the prompt in every step; the default is a hash of its tokens.
    """

    prompt_token_ids: Any  # int32 [P]
    completion_token_ids: Any  # int32 [T], without padding
    behavior_logprobs: Any  # float32 [T]
    reward: float | None
    advantage: float
    sampler_logprobs: Any = None  # float32 [T]; None: the trainer's
    completion_mask: Any = None  # bool [T]; None: all train
    completion_text: str = ""
    reward_scores: tuple[float, ...] = ()  # of several reward functions; NaN of one that gave none
    truncated: bool = False
    trains: bool = True
    birth_step: int | None = None
    prompt_id: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)  # as in Rollout

    def __post_init__(self) -> None:
        """Copies all arrays to the stored types, and fills in the default `prompt_id`."""
        sampler = self.behavior_logprobs if self.sampler_logprobs is None else self.sampler_logprobs
        mask_T = self.completion_mask
        converted: dict[str, Any] = {
            "prompt_token_ids": as_array(self.prompt_token_ids, np.int32),
            "completion_token_ids": as_array(self.completion_token_ids, np.int32),
            "behavior_logprobs": as_array(self.behavior_logprobs, np.float32),
            "sampler_logprobs": as_array(sampler, np.float32),
            "completion_mask": None if mask_T is None else as_array(mask_T, np.bool_),
            "extras": {name: as_array(array) for name, array in self.extras.items()},
        }
        converted["prompt_id"] = self.prompt_id or hash_of(converted["prompt_token_ids"])
        for name, value in converted.items():
            object.__setattr__(self, name, value)

    @property
    def may_train(self) -> bool:
        """Whether the row has a reward and a token that trains."""
        mask_T = self.completion_mask
        has_token = len(self.completion_token_ids) > 0 if mask_T is None else bool(mask_T.any())
        return self.reward is not None and self.trains and has_token


def hash_of(token_ids: np.ndarray) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 of int32 tokens: an id of the prompt
    that is the same in every step and every run."""
    return sha256(np.ascontiguousarray(token_ids, np.int32).tobytes()).hexdigest()[:16]


def rollouts_of_groups(
    groups: Sequence[Sequence[Row]], buffer: ReplayBuffer, std: str, words: HostWords
) -> list[Rollout]:
    """Make rollouts of a step's groups, with the next ids of the buffer, in order of id. `std` is
    the host's standard deviation, "population" or "sample".

    A rollout is dropped (`kept` False) if all rewards of its group are equal or all advantages 0
    (unless `drop_zero_variance` is false), if fewer than two of its group have a reward, or if it
    has no reward or no token that trains. The first of several reward functions decides whether a
    completion is correct. Raises UsageError, before an id is taken, for a group that has another
    size than `group_size`, several prompts, advantages despite equal rewards, or a birth step after
    the next one.
    """
    for number, group in enumerate(groups):
        _refuse_shape(number, group, buffer, words)
    statistics = [group_advantages([row.reward for row in group], std) for group in groups]
    for number, (group, facts) in enumerate(zip(groups, statistics, strict=True)):
        _refuse_advantages(number, group, facts, words)
    rollouts: list[Rollout] = []
    for group, facts in zip(groups, statistics, strict=True):
        keeps = not buffer.settings.drop_zero_variance
        rollouts += _rollouts_of(group, facts, buffer, keeps)
        buffer.next_rollout_id += len(group)
        buffer.next_group_id += 1
    return rollouts


def _rollouts_of(
    group: Sequence[Row], facts: GroupAdvantage, buffer: ReplayBuffer, keeps_equal: bool
) -> list[Rollout]:
    """Make the rollouts of one checked group, with the buffer's next ids; see `rollouts_of_groups`
    for which are kept. `keeps_equal`: groups without a signal are kept too."""
    has_signal = bool(facts.std) and any(row.advantage for row in group if row.may_train)
    births = [row.birth_step or buffer.next_step for row in group]
    shared: dict[str, Any] = {
        "group_id": buffer.next_group_id,
        "birth_step": min(births),  # as old as its oldest member
        "policy_version": min(births) - 1,
        "group_reward_mean": facts.mean,
        "group_reward_std": facts.std,
        "group_correct": sum(map(_is_correct, group)),
    }
    rollouts = []
    for index, (row, birth) in enumerate(zip(group, births, strict=True)):
        kept = row.may_train and facts.std is not None and (has_signal or keeps_equal)
        rollouts.append(
            Rollout(
                rollout_id=buffer.next_rollout_id + index,
                completion_index=index,
                policy_version_end=birth - 1,
                prompt_id=row.prompt_id,
                prompt_token_ids=row.prompt_token_ids,
                completion_token_ids=row.completion_token_ids,
                completion_text=row.completion_text,
                behavior_logprobs=row.behavior_logprobs if kept else None,
                sampler_logprobs=row.sampler_logprobs,
                reward=row.reward,
                reward_scores=row.reward_scores if row.reward is not None else (),
                advantage=float(np.float32(row.advantage)) if kept else None,
                finish_reason="length" if row.truncated else "stop",
                verdict="none" if row.reward is None else "scored",
                completion_mask=row.completion_mask,
                extras=row.extras,
                kept=kept,
                **shared,
            )
        )
    return rollouts


def _refuse_shape(
    number: int, group: Sequence[Row], buffer: ReplayBuffer, words: HostWords
) -> None:
    """Raises UsageError for a group of another size, several prompts, or a future birth step."""
    if len(group) != buffer.group_size:
        raise UsageError(
            f"group {number} has {len(group)} completions, and {words.group_size} is "
            f"{buffer.group_size}: give one row for each completion of a prompt, with reward None "
            "where it failed, and a group for each time that a prompt was sampled"
        )
    prompts = {(row.prompt_id, row.prompt_token_ids.tobytes()) for row in group}
    if len(prompts) > 1:
        raise UsageError(
            f"the {len(group)} completions of group {number} have {len(prompts)} different "
            f"prompts: {words.one_prompt}"
        )
    births = [row.birth_step for row in group if row.birth_step is not None]
    if births and not 1 <= min(births) <= max(births) <= buffer.next_step:
        raise UsageError(
            f"group {number} was born in steps {min(births)} to {max(births)}: expected 1 to "
            f"{buffer.next_step}, the coming step of the buffer"
        )


def _refuse_advantages(
    number: int, group: Sequence[Row], facts: GroupAdvantage, words: HostWords
) -> None:
    """Raises UsageError for advantages that equal rewards cannot have. The tolerance is for a
    host's mean of float32, which rounds."""
    largest = max(abs(row.advantage) for row in group)
    if facts.std == 0 and largest > 1e-2 * (1 + abs(facts.mean or 0.0)):
        raise UsageError(
            f"all rewards of group {number} are {facts.mean}, but an advantage is {largest:.3g}: "
            f"{words.own_advantages}, so that the buffer knows the rewards that count"
        )


def _is_correct(row: Row) -> bool:
    """Returns whether the first score that a reward function gave is at least 1."""
    score = first_score(row.reward_scores if row.reward is not None else (), row.reward)
    return score is not None and score >= 1.0


def unknown_outcome(rollout: Rollout) -> RolloutOutcome:
    """Returns the outcome of a rollout whose update the host does not describe: only its tokens are
    known; the rest is NaN, null in the files."""
    return RolloutOutcome(rollout.trained_tokens, *[float("nan")] * 8)
