"""Pushing the policy to the sampler, and the proof that it arrived."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_replay.engine.protocol import Engine
from grpo_replay.errors import LogprobGapError
from grpo_replay.sampling.protocol import Sampler
from grpo_replay.types import Rollout

GAP_SAMPLE_ROLLOUTS = 64
"""The gap is measured on at least so many fresh rollouts of every step, or on all."""


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """|sampler - trainer| log-prob per token, in nats, over the fresh tokens measured."""

    mean: float
    max: float
    tokens: int


def sync_weights(engine: Engine, sampler: Sampler, version: int, bucket_mib: int) -> None:
    """Make the sampler hold the engine's policy, as `version`. Collective."""
    sampler.load_weights(engine.named_full_tensors(bucket_mib * 2**20), version)


def gap_sample(rollouts: Sequence[Rollout], every_survivor: bool = True) -> list[Rollout]:
    """The rollouts whose log-probs the trainer computes, by rollout id: every survivor, and
    dropped ones to make up `GAP_SAMPLE_ROLLOUTS`, spread over the step.

    Without `every_survivor` (behaviour log-probs are the sampler's) so many of all, spread alike.
    """
    kept = [rollout for rollout in rollouts if rollout.kept] if every_survivor else []
    others = [rollout for rollout in rollouts if not (every_survivor and rollout.kept)]
    missing = min(max(GAP_SAMPLE_ROLLOUTS - len(kept), 0), len(others))
    chosen = [others[i * len(others) // missing] for i in range(missing)]
    return sorted([*kept, *chosen], key=lambda rollout: rollout.rollout_id)


def measure_gap(rollouts: Sequence[Rollout], trainer_logprobs: Sequence[np.ndarray]) -> LogprobGap:
    """The gap between the log-probs sampled with and the trainer's, for the same tokens."""
    gaps = np.concatenate(
        [
            np.abs(rollout.sampler_logprobs.astype(np.float64) - logprobs_T)
            for rollout, logprobs_T in zip(rollouts, trainer_logprobs, strict=True)
        ]
    )
    return LogprobGap(float(gaps.mean()), float(gaps.max()), len(gaps))


def refuse_gap(gap: LogprobGap, limit: float, step: int, policy_version: int) -> None:
    """Raises LogprobGapError if the mean gap is above `limit` (or not a number)."""
    if gap.mean <= limit:
        return
    raise LogprobGapError(
        f"step {step}, weight sync {policy_version}: the sampler's log-probs differ from the "
        f"trainer's by {gap.mean:.3g} nats on average (largest {gap.max:.3g}, {gap.tokens} "
        f"tokens), more than sampling.logprob_gap_limit {limit:g}. The sampler is not the policy. "
        "Usual causes: a tied output head that was not pushed, a tensor missing or renamed in the "
        "sync, another dtype, another temperature, or log-probs of unprocessed logits. The last "
        "checkpoint is intact."
    )
