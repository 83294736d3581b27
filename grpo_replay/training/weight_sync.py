"""Pushes the policy to the sampler, keeps a copy for a sampler that lags, and measures the log-prob
gap between the two.

The sampler's `load_weights` receives the push (for servers `sampling/server/push.py`).

With `run.sync_every_steps` above 1 the sampler lags on purpose, to simulate asynchrony (paper B):
between pushes it samples with an older policy than the trainer's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_replay.errors import LogprobGapError
from grpo_replay.sampling.sampler_protocol import SYNC_BUCKET_BYTES, Sampler
from grpo_replay.types import NamedTensors, Rollout

if TYPE_CHECKING:
    import torch

    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine

GAP_SAMPLE_ROLLOUTS = 64
"""Minimum number of fresh rollouts per step used to measure the gap; all if fewer. More are used if
the trainer computes the log-probs of every survivor anyway."""


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """|sampler - trainer| log-prob per token, in nats, over the measured fresh tokens."""

    mean: float
    max: float
    tokens: int


SAMPLER_WEIGHTS = "sampler_weights.safetensors"
"""File of a checkpoint between two pushes: the older weights that the sampler holds."""


class PushedWeights:
    """A copy of the weights of a lagging sampler, in host memory, for checkpoints between pushes.

    `version` is their policy version. Version 0, the initial model, needs no copy.
    """

    def __init__(self) -> None:
        self.version = 0
        self._tensors: dict[str, torch.Tensor] = {}

    def keep(self, tensors: NamedTensors, version: int) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yield the tensors, and store copies of them once all are consumed."""
        copies = {}
        for name, tensor in tensors:
            copies[name] = tensor.detach().to("cpu", copy=True).contiguous()
            yield name, tensor
        self.version, self._tensors = version, copies

    def save(self, folder: Path) -> None:
        """Write the copies into the folder of a checkpoint."""
        from safetensors.torch import save_file

        metadata = {"policy_version": str(self.version)}
        save_file(self._tensors, folder / SAMPLER_WEIGHTS, metadata)


def read_pushed_weights(folder: Path) -> tuple[dict[str, "torch.Tensor"], int] | None:
    """Read the weights that `PushedWeights.save` wrote, and their version; None if there are none,
    because the sampler did not lag."""
    from safetensors import safe_open

    path = folder / SAMPLER_WEIGHTS
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        version = int(file.metadata()["policy_version"])
        return {name: file.get_tensor(name) for name in file.keys()}, version  # noqa: SIM118


def sync_weights(
    engine: "DeepSpeedEngine",
    sampler: Sampler,
    version: int,
    pushed: PushedWeights | None = None,
) -> None:
    """Push the engine's policy to the sampler, as `version`; `pushed` keeps a copy. Collective."""
    tensors = engine.pushed_tensors(SYNC_BUCKET_BYTES)
    sampler.load_weights(tensors if pushed is None else pushed.keep(tensors, version), version)


def gap_sample(rollouts: Sequence[Rollout], every_survivor: bool = True) -> list[Rollout]:
    """Choose the rollouts whose log-probs the trainer computes, ordered by rollout id: every
    survivor (whose behaviour log-probs they become), and evenly spaced dropped ones up to
    `GAP_SAMPLE_ROLLOUTS` in all.

    Without `every_survivor` (behaviour log-probs are the sampler's), `GAP_SAMPLE_ROLLOUTS` evenly
    spaced rollouts of any kind.
    """
    kept = [rollout for rollout in rollouts if rollout.kept] if every_survivor else []
    others = [rollout for rollout in rollouts if not (every_survivor and rollout.kept)]
    chosen = evenly_spaced(others, max(GAP_SAMPLE_ROLLOUTS - len(kept), 0))
    return sorted([*kept, *chosen], key=lambda rollout: rollout.rollout_id)


def evenly_spaced(rollouts: Sequence[Rollout], limit: int) -> list[Rollout]:
    """Returns at most `limit` rollouts, at equal distances."""
    count = min(limit, len(rollouts))
    return [rollouts[i * len(rollouts) // count] for i in range(count)]


def measure_gap(
    rollouts: Sequence[Rollout], trainer_logprobs: Sequence[np.ndarray]
) -> LogprobGap | None:
    """Measure the gap between the sampler's and the trainer's log-probs of the same tokens; None if
    there are no tokens, or all are masked."""
    gaps = np.concatenate(
        [
            np.zeros(0),
            *(
                rollout.trained_values(
                    np.abs(rollout.sampler_logprobs.astype(np.float64) - logprobs_T)
                )
                for rollout, logprobs_T in zip(rollouts, trainer_logprobs, strict=True)
            ),
        ]
    )
    return LogprobGap(float(gaps.mean()), float(gaps.max()), len(gaps)) if len(gaps) else None


def refuse_gap(
    gap: LogprobGap, limit: float, step: int, policy_version: int, is_repeated: bool = False
) -> None:
    """Raises LogprobGapError if the mean gap is above `limit` or NaN. `is_repeated`: a resume would
    repeat this step, and stop again."""
    if gap.mean <= limit:
        return
    again = ", but a resume repeats this step: start a new run from its model"
    raise LogprobGapError(
        f"step {step}, weight sync {policy_version}: the sampler's log-probs differ from the "
        f"trainer's by {gap.mean:.3g} nats on average (largest {gap.max:.3g}, {gap.tokens} "
        f"tokens), more than sampling.logprob_gap_limit {limit:g}. The sampler is not the policy. "
        "Usual causes: a tied output head that was not pushed, a tensor missing or renamed in the "
        "sync, another dtype, another temperature, or log-probs of unprocessed logits. The last "
        f"checkpoint is intact{again if is_repeated else ''}."
    )
