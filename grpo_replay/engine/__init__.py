"""The policy and its optimizer: the engine (DeepSpeed at every size), the policy module, models and
weight names. Here: the result of an update.

May import replay and the floors below; torch, transformers and deepspeed.
"""

import sys
from dataclasses import dataclass

from grpo_replay.errors import UsageError
from grpo_replay.types import RolloutOutcome

if sys.flags.optimize > 1:
    raise UsageError(
        f"PYTHONOPTIMIZE is {sys.flags.optimize} (or python was started with -OO): Python then "
        "drops docstrings, and transformers reads its own. Unset it, or set it to 1"
    )


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    """The result of one optimizer update. `outcomes[i]` belongs to row i; `loss` is that of the
    whole mini-batch; `grad_norm` is the global L2 norm before clipping; `padding_share` is the
    share of padding among the positions of all forward passes, over all ranks; `learning_rate` is
    read from the optimizer after its step."""

    outcomes: tuple[RolloutOutcome, ...]
    loss: float
    grad_norm: float
    reference_kl: float
    micro_batches: int
    padding_share: float
    learning_rate: float
