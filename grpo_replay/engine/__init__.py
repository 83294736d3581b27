"""The policy and its optimizer: what the trainer needs of an engine (here), the one implementation,
DeepSpeed at every size, policy module, models, weight names.

May import replay and the floors below; torch, transformers and deepspeed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from grpo_replay.replay.batch import TrainRow
from grpo_replay.types import RolloutOutcome

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    """One optimizer update. `outcomes[i]` belongs to row i; `loss` is the whole mini-batch's,
    over all ranks; `grad_norm` is the global L2 norm before clipping; `padding_share` is the share
    of the positions in its forward passes, over all ranks, that are not tokens of its rows;
    `learning_rate` is read from the optimizer after its step."""

    outcomes: tuple[RolloutOutcome, ...]
    loss: float
    grad_norm: float
    reference_kl: float
    micro_batches: int
    padding_share: float
    learning_rate: float


class Engine(Protocol):
    """The policy and its optimizer over all ranks.

    Methods are collective: every rank calls them in the same order. Rows are given on rank 0 and
    None elsewhere, and results come back on rank 0.
    """

    def begin_step(self, step: int) -> None:
        """Set what depends on the training step: the learning rate of its updates, and the seed
        of dropout."""
        ...

    def logprobs(self, rows: Sequence[TrainRow] | None) -> list[np.ndarray]:
        """Per row float32 [T]: log-probs of its completion tokens under the current policy."""
        ...

    def reference_logprobs(self, rows: Sequence[TrainRow] | None) -> list[np.ndarray]:
        """The same under the frozen initial policy. Needs `loss.beta` > 0."""
        ...

    def update(self, rows: Sequence[TrainRow] | None) -> UpdateResult | None:
        """One optimizer update on a mini-batch. Raises NonFiniteError on every rank."""
        ...

    def named_full_tensors(self, bucket_bytes: int) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Every parameter in full under its Hugging Face name, a tied one under each of its
        names, LoRA adapters merged, gathered a bucket at a time. All ranks must exhaust the
        iterator."""
        ...

    def save_model(self, folder: Path) -> None:
        """Write the policy in Hugging Face format, LoRA adapters merged, tokenizer included."""
        ...

    def save_adapter(self, folder: Path) -> None:
        """Write the LoRA adapters in peft's format; nothing without LoRA."""
        ...

    def save(self, folder: Path) -> None:
        """Write parameters and optimizer state."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, also on another number of ranks, at another ZeRO stage or in
        another dtype. The optimizer's settings are the recipe's. Raises CheckpointError."""
        ...

    def close(self) -> None: ...
