"""The data types passed between the stages of training: frozen, numpy only.

Shape key (suffixes of names, and in comments):

    P   tokens of one prompt                 T   tokens of one completion
    G   completions of one group             N   rollouts in a batch or in the buffer
    V   vocabulary                           R   rows of a micro-batch
    L   padded row length of a micro-batch   C   completion tokens of a micro-batch, flattened

Data order: Prompt -> GenerationRequest -> Completion -> Verdict -> Rollout -> Entry ->
ComposedBatch -> RolloutOutcome.

Example: one group of two completions, one right and one wrong, has rewards_G = [1, -1], mean 0,
population standard deviation 1, advantages [1, -1] and `group_correct` 1.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch


T = TypeVar("T")

Row = Mapping[str, Any]
"""One row of a data set, by column name."""

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]
"""Pairs of a parameter name and its full tensor, for weight transfers."""

Span = tuple[int, int, int]
"""(policy version, first token, end): output tokens that one version of the weights sampled."""


class RequestKey(NamedTuple):
    """Identifies one completion of a run: training step (1-based), prompt index within the step
    (0-based, over all ranks) and completion index within the group (0-based)."""

    step: int
    prompt_index: int
    completion_index: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, rendered and tokenised. `messages` is its chat, for reward functions."""

    prompt_id: str
    text: str
    token_ids: np.ndarray  # int32 [P]
    answer: str
    row: Row
    messages: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request to sample one completion. `seed` depends only on the run seed and `key`."""

    key: RequestKey
    prompt_token_ids: np.ndarray  # int32 [P]
    seed: int
    max_tokens: int
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampler's response to one request.

    `token_ids` includes the end-of-sequence token if one was sampled. `sampler_logprobs` are
    log-probs of the distribution sampled from, temperature applied. `finish_reason` is "stop"
    (EOS) or "length" (truncated). `policy_version` sampled the first token, `policy_version_end`
    the last. `completion_mask` and `extras` are copied to the rollout.
    """

    key: RequestKey
    token_ids: np.ndarray  # int32 [T]
    sampler_logprobs: np.ndarray  # float32 [T]
    finish_reason: str
    policy_version: int
    policy_version_end: int
    completion_mask: np.ndarray | None = None  # bool [T]
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


HIGH_CLIP_FRACTION = 0.10
"""Share of clipped tokens among the replayed ones, above which displays warn: a rule of thumb
(docs/buffer.md)."""

FAILED = ("timeout", "memory", "crash", "none")
"""Statuses of a verdict whose reward function gave no score: it exceeded a limit, raised or died,
or returned None."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's result. `status` is "correct", "incorrect", "unparsable" (no answer found), or
    one of `FAILED`; for a user's function it is "scored". With several functions it is the status
    of the first, unless one of them failed.

    `scores` has the score of each function, in the order of the recipe, and `reward` is their
    weighted sum. If a user's function failed, there are no scores and `reward` is None. If a
    built-in verifier fails, the reward is that of an incorrect answer.
    """

    reward: float | None
    status: str
    scores: tuple[float, ...]


class Graded(NamedTuple):
    """A completion, its text, and a verifier's verdict on it."""

    completion: Completion
    text: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One completion and everything computed at its birth, frozen. The unit of replay.

    `advantage` and `behavior_logprobs` are None if the rollout was dropped (`kept` False): with its
    group, because it has no reward (`reward` None), or because it was truncated and
    `reward.mask_truncated` is set. Group statistics are over the members with a reward; mean
    and deviation are None with fewer than two of them. `group_reward_std` is exactly 0 if their
    rewards are equal. The age of a rollout is `step - birth_step`, in training steps.

    `completion_mask` is True for the completion tokens that train. The others, such as the output
    of a tool, are context: they count neither in the loss nor in its statistics, and their
    log-probs may have any values. Without a mask all tokens train. `extras` are arrays of one
    dimension or more that are stored, drawn, saved and logged with the rollout, by name, such as
    reference log-probs. Arrays of one name have the same dtype and trailing shape in all rollouts.
    """

    rollout_id: int
    group_id: int
    prompt_id: str
    completion_index: int
    birth_step: int
    policy_version: int
    policy_version_end: int
    prompt_token_ids: np.ndarray  # int32 [P]
    completion_token_ids: np.ndarray  # int32 [T]
    completion_text: str
    behavior_logprobs: np.ndarray | None  # float32 [T], of the policies that sampled it
    sampler_logprobs: np.ndarray  # float32 [T]
    reward: float | None
    advantage: float | None
    group_reward_mean: float | None
    group_reward_std: float | None
    group_correct: int
    finish_reason: str
    verdict: str
    kept: bool
    reward_scores: tuple[float, ...] = ()  # of several functions, before weighting; NaN: none
    completion_mask: np.ndarray | None = None  # bool [T]
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def trained_tokens(self) -> int:
        """Number of completion tokens that train."""
        mask_T = self.completion_mask
        return len(self.completion_token_ids) if mask_T is None else int(mask_T.sum())

    @property
    def behavior_logprob_mean(self) -> float | None:
        """Mean behaviour log-prob of the tokens that train, in nats; None if no token trains."""
        if self.behavior_logprobs is None or not self.trained_tokens:
            return None
        return float(self.trained_values(self.behavior_logprobs).mean(dtype=np.float64))

    def trained_values(self, values_T: np.ndarray) -> np.ndarray:
        """Select the values of the tokens that train from values of all completion tokens, [T]."""
        return values_T if self.completion_mask is None else values_T[self.completion_mask]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A rollout as the buffer stores it: the values that draws and evictions read, and a payload
    that a draw returns.

    A payload is a whole `Rollout` (`replay.insertion.entries_of`), or a handle of a trainer that
    keeps its own tensors. `columns` are the values that the priority reads, by the names of the
    rollout log: advantage, group_reward_std, reward, group_correct, completion_tokens, truncated,
    behavior_logprob_mean. The age of an entry is `step - birth_step`, in training steps.
    """

    rollout_id: int
    group_id: int
    birth_step: int
    columns: Mapping[str, Any]
    payload: Any


@dataclass(frozen=True, eq=False)
class Draw:
    """The entries drawn in one step, from the buffer or from fresh and stored ones together.

    `entries[i]` was drawn with first-draw probability `probabilities[i]` (float64 [N]) at age
    `ages[i]` (int64 [N], training steps). With replacement, an entry may appear more than once.

    A `buffer_only` step makes a draw for each of its `updates` optimizer updates; `update_N[i]`
    (int64 [N], from 0) is the update of `entries[i]`. None: one draw for the whole step.
    """

    entries: tuple[Entry, ...]
    probabilities: np.ndarray
    ages: np.ndarray
    effective_sample_size: float  # 1 / Σ P², over all candidates
    entropy: float  # -Σ P ln P in nats, over all candidates
    updates: int = 1
    update_N: np.ndarray | None = None

    @cached_property
    def rollouts(self) -> tuple[Any, ...]:
        """The payloads of the entries: rollouts, where whole rollouts are stored."""
        return tuple(entry.payload for entry in self.entries)

    def in_updates(self, steps_N: np.ndarray) -> np.ndarray:
        """Convert ages of the drawn entries from training steps to optimizer updates, int64 [N]. A
        rollout of the same step has age 0 in the step's first update, and 1 in its second."""
        if self.update_N is None:
            return steps_N
        return self.updates * steps_N + self.update_N

    @classmethod
    def empty(cls) -> "Draw":
        """Returns a draw without entries."""
        return cls((), np.zeros(0), np.zeros(0, dtype=np.int64), 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class ComposedBatch:
    """The entries that one training step trains on, and which of them are replayed.

    `replayed[i]` is True if `entries[i]` was drawn at an age above 0, or, for `buffer_only`, at
    any age. `draw` has all drawn entries, with probabilities and ages; with `replay.shadow` the
    step does not train on them, and `trains_on_draw` is False.
    """

    entries: tuple[Entry, ...]
    replayed: np.ndarray  # bool [N]
    ages: np.ndarray  # int64 [N], training steps, for `buffer_only` updates; 0 for fresh
    draw: Draw
    trains_on_draw: bool = True

    @cached_property
    def rollouts(self) -> tuple[Any, ...]:
        """The payloads of the entries: rollouts, where whole rollouts are stored."""
        return tuple(entry.payload for entry in self.entries)

    def drawn_outcomes(
        self, outcomes: Sequence["RolloutOutcome"], probe: Mapping[int, "RolloutOutcome"]
    ) -> list["RolloutOutcome | None"]:
        """Return the outcome of every drawn entry, in the order drawn: from `outcomes`, one for
        each of the batch's `entries`; with `replay.shadow` from `probe`, by index in the draw, and
        None for an entry that was not probed."""
        count = len(self.draw.entries)
        if self.trains_on_draw:
            return list(outcomes[len(outcomes) - count :])
        return [probe.get(index) for index in range(count)]


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """Statistics of one rollout's trained tokens in one update, before the optimizer step.

    Log-ratios are policy minus behaviour log-probs, unclamped, in nats. `approx_kl` is the mean of
    `ratio - 1 - log_ratio` (k3). `clip_fraction` is the share of tokens whose gradient a clip or a
    mask removed.
    """

    tokens: int
    clip_fraction: float
    log_ratio_mean: float
    log_ratio_var: float
    approx_kl: float
    ratio_mean: float
    ratio_squared_mean: float
    ratio_max: float
    entropy: float


def first_score(scores: Sequence[float], reward: T) -> float | T:
    """The first score that is not NaN; `reward` if there is none, as with a single function."""
    return next((score for score in scores if not math.isnan(score)), reward)


def completion_seed(run_seed: int, key: RequestKey) -> int:
    """Derive the seed of one completion, in [0, 2^63), from the run seed and the request's key."""
    sequence = np.random.SeedSequence([run_seed, *key])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


DRAW_STREAM, SPLIT_STREAM = 1, 2
"""Purposes of the random streams of a step: the draw, and the split into mini-batches."""


def stream(run_seed: int, *path: int) -> np.random.Generator:
    """Make the generator of the random stream that `path` identifies: (step, DRAW_STREAM), say."""
    return np.random.default_rng(np.random.SeedSequence([run_seed, *path]))
