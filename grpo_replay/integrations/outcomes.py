"""Outcomes of an update, computed from a host's log-probs. Imports torch."""

from collections.abc import Sequence

import torch

from grpo_replay.recipe import LossSection
from grpo_replay.replay.loss import clipped_surrogate
from grpo_replay.types import RolloutOutcome


def outcomes_of(
    rows_B: Sequence[int],
    behavior_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    logprobs_BT: torch.Tensor | None = None,
    clipped_BT: torch.Tensor | None = None,
    entropy_BT: torch.Tensor | None = None,
) -> dict[int, RolloutOutcome]:
    """Compute the statistics of a micro-batch's rows, by their index in the composed batch
    (`rows_B`); -1 is a row of padding, which has none.

    `logprobs_BT` are the log-probs in the update, `behavior_BT` those of birth. `mask_BT` is True
    for tokens that train, `clipped_BT` (bool, or 1.0) for those whose gradient a clip removed.
    A statistic of an argument that is None is NaN, and null in the files. Values where the mask is
    False are ignored. Example: one row of ratios 1.5 and 0.5 has ratio_mean 1, ratio_max 1.5.
    """
    mask_BT, unknown_BT = mask_BT.bool(), torch.full_like(behavior_BT, torch.nan)
    logprobs_BT = unknown_BT if logprobs_BT is None else logprobs_BT
    gap_BT = logprobs_BT.detach().double() - behavior_BT
    log_ratio_BT = torch.where(mask_BT, gap_BT, 0.0)
    tokens_B, ratio_BT = mask_BT.sum(1), log_ratio_BT.exp()

    def mean(values_BT: torch.Tensor | None) -> torch.Tensor:
        values_BT = unknown_BT if values_BT is None else values_BT.detach()
        return torch.where(mask_BT, values_BT.double(), 0.0).sum(1) / tokens_B.clamp(min=1)

    mean_B = mean(log_ratio_BT)
    columns = (
        tokens_B,
        mean(clipped_BT),
        mean_B,
        (mean(log_ratio_BT**2) - mean_B**2).clamp(min=0),
        mean(ratio_BT - 1 - log_ratio_BT),
        mean(ratio_BT),
        mean(ratio_BT**2),
        torch.where(mask_BT, ratio_BT, 0.0).amax(1),
        mean(entropy_BT),
    )
    values = zip(*(column.tolist() for column in columns), strict=True)
    rows = zip(rows_B, values, strict=True)
    return {row: RolloutOutcome(*statistics) for row, statistics in rows if row >= 0}


def probe_outcomes(
    behavior_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    loss: LossSection | None,
) -> list[RolloutOutcome]:
    """Compute the outcomes that rows would have in an update now, without entropy. `loss` decides
    which tokens would be clipped; if it is None, the clip fraction is unknown too."""
    clipped_BT = None
    if loss is not None:
        advantages_BT = advantages_B[:, None].expand_as(logprobs_BT)
        clipped_BT = clipped_surrogate(logprobs_BT, behavior_BT, advantages_BT, loss).clipped_C
    rows = range(len(logprobs_BT))
    outcomes = outcomes_of(rows, behavior_BT, mask_BT, logprobs_BT, clipped_BT)
    return [outcomes[row] for row in rows]
