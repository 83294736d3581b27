"""Computes the policy loss per token and its statistics per rollout, in pure functions of tensors.

Two differences from a textbook PPO loss: the denominator of the ratio is the behaviour policy
cached with each rollout, fresh or replayed, and the functions return losses per token. The engine
multiplies these by the weights of `batch.token_weights` and sums, so that the normalisation is that
of the whole mini-batch, independent of micro-batches and ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import LossSection
from grpo_replay.recipe.grpo_sections import outside
from grpo_replay.recipe.open_lists import LOSSES

LOG_RATIO_LIMIT = 20.0  # exp(20) is far beyond any clip threshold, and finite in fp32


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """The losses of tokens before weighting, `losses_C`. `clipped_C` is True where a clip or mask
    removed the gradient; `log_ratios_C` are policy minus behaviour log-probs, unclamped, detached.
    """

    losses_C: torch.Tensor
    clipped_C: torch.Tensor
    log_ratios_C: torch.Tensor


def clipped_surrogate(
    logprobs_C: torch.Tensor,
    behavior_logprobs_C: torch.Tensor,
    advantages_C: torch.Tensor,
    settings: LossSection,
    lengths_R: Sequence[int] | None = None,
) -> TokenLoss:
    """Compute the clipped loss per token, -max(min(ρA, clip(ρ, 1-ε_low, 1+ε_high)·A), c·A if A < 0)
    (paper A, eq. 3; Clip-Higher from DAPO, dual clip from Ye et al. 2020).

    With ρ = 1.5, A = 1, ε_high = 0.28: loss -1.28, clipped. With ρ = 20, A = -1, c = 10: loss 10,
    clipped; with ρ = 0.5, A = -1, ε_low = 0.2: loss 0.8, clipped.

    With `settings.kind` "gspo", ρ is the same for all tokens of a rollout (`sequence_log_ratios`),
    and `lengths_R`, the rollouts' numbers of tokens, are needed. With the weights of
    `sequence_mean` the losses then add up to the surrogate of GSPO, eq. 5.
    """
    log_ratios_C = logprobs_C - behavior_logprobs_C
    exponents_C = log_ratios_C
    if settings.facts.ratio == "rollout":
        assert lengths_R is not None, "a sequence ratio needs the rollouts' numbers of tokens"
        exponents_C = sequence_log_ratios(log_ratios_C, lengths_R)
    ratios_C = exponents_C.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    low, high = 1.0 - settings.epsilon, 1.0 + settings.epsilon_high
    surrogate_C = torch.minimum(ratios_C * advantages_C, ratios_C.clamp(low, high) * advantages_C)
    negative_C = advantages_C < 0
    clipped_C = torch.where(negative_C, ratios_C < low, (ratios_C > high) & (advantages_C > 0))
    if settings.dual_clip is not None:
        floor_C = settings.dual_clip * advantages_C
        surrogate_C = torch.where(negative_C, torch.maximum(surrogate_C, floor_C), surrogate_C)
        clipped_C = clipped_C | (negative_C & (ratios_C > settings.dual_clip))
    return TokenLoss(-surrogate_C, clipped_C, log_ratios_C.detach())


def sequence_log_ratios(log_ratios_C: torch.Tensor, lengths_R: Sequence[int]) -> torch.Tensor:
    """Returns the logarithm of GSPO's sequence-level ratio, s_i = (π_θ(o_i) / π_b(o_i))^(1/T_i),
    [C]: for every token, the mean log-ratio of its rollout (GSPO, arXiv 2507.18071, eq. 7).

    Two rollouts with log-ratios [0.1, 0.3] and [-0.4] give [0.2, 0.2, -0.4].
    """
    return _reduce_per_rollout(torch.mean, log_ratios_C, lengths_R)


def _reduce_per_rollout(
    reduce: Callable[[torch.Tensor], torch.Tensor], values_C: torch.Tensor, lengths_R: Sequence[int]
) -> torch.Tensor:
    """Reduce the values of each rollout to one, and repeat it for the rollout's tokens, [C]."""
    rollouts = values_C.split(list(lengths_R))
    return torch.cat([reduce(values_T).expand_as(values_T) for values_T in rollouts])


def asymmetric_reinforce(
    logprobs_C: torch.Tensor,
    behavior_logprobs_C: torch.Tensor,
    coefficients_C: torch.Tensor,
    settings: LossSection | None = None,
    lengths_R: Sequence[int] | None = None,
) -> TokenLoss:
    """Compute the loss -(r - (V + δV))·log π per token, without importance ratio or clipping (paper
    B, AsymRE). `coefficients_C` are r - (V + δV). The behaviour log-probs serve statistics only."""
    log_ratios_C = (logprobs_C - behavior_logprobs_C).detach()
    clipped_C = torch.zeros_like(log_ratios_C, dtype=torch.bool)
    return TokenLoss(-coefficients_C * logprobs_C, clipped_C, log_ratios_C)


def masked_tokens(
    log_ratios_C: torch.Tensor,
    advantages_C: torch.Tensor,
    settings: LossSection,
    lengths_R: Sequence[int],
) -> torch.Tensor:
    """Mark tokens that `settings` exclude by their ratio ρ = π_θ / π_b (behaviour), bool [C].

    - `ratio_mask`: tokens whose ρ, or rollouts whose product of ρ, lies outside [low, high] (masked
      importance sampling; per token IcePop, arXiv 2510.18855).
    - `max_negative_kl`: rollouts with A < 0 whose mean of -log ρ is above it (the off-policy
      sequence mask of DeepSeek-V3.2, arXiv 2512.02556).
    - `negative_veto`: in a rollout with A < 0, the tokens after the first whose ρ lies outside
      [low, high] (μ-GRPO, arXiv 2605.17570).

    With A = -1, ρ = [1.0, 3.0, 1.0] and a veto of [0.5, 2.0], the third token alone is excluded.
    """
    negative_C = advantages_C < 0
    masked_C = torch.zeros_like(negative_C)
    if settings.ratio_mask is not None:
        logs_C = log_ratios_C
        if settings.ratio_mask.level == "sequence":
            logs_C = _reduce_per_rollout(torch.sum, log_ratios_C, lengths_R)
        masked_C = settings.ratio_mask.excludes(logs_C)
    if settings.max_negative_kl is not None:
        far_C = -sequence_log_ratios(log_ratios_C, lengths_R) > settings.max_negative_kl
        masked_C = masked_C | (negative_C & far_C)
    if settings.negative_veto is not None:
        rows = outside(log_ratios_C, *settings.negative_veto).split(list(lengths_R))
        later_C = torch.cat([row_T.cumsum(0) > row_T.long() for row_T in rows])
        masked_C = masked_C | (negative_C & later_C)
    return masked_C


def kl_to_reference(logprobs_C: torch.Tensor, reference_logprobs_C: torch.Tensor) -> torch.Tensor:
    """Returns the k3 estimator of KL(policy ‖ reference) per token, exp(d) - d - 1 with d =
    reference - policy log-prob, non-negative, in nats (Schulman 2020)."""
    difference_C = (reference_logprobs_C - logprobs_C).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return difference_C.exp() - difference_C - 1.0


def token_loss(
    logprobs_C: torch.Tensor,
    behavior_logprobs_C: torch.Tensor,
    reference_logprobs_C: torch.Tensor,
    coefficients_C: torch.Tensor,
    settings: LossSection,
    lengths_R: Sequence[int] | None = None,
    sampler_weights_C: torch.Tensor | None = None,
) -> TokenLoss:
    """Compute the loss per token that `settings` select, KL term included.

    `lengths_R` are the rollouts' numbers of tokens, for sequence-level ratios and masks.
    `sampler_weights_C` (`batch.sampler_weights`) multiply the surrogate, not the KL term. Tokens of
    `masked_tokens` have no surrogate, count as clipped, and stay in the denominators. If a user's
    function returns only losses, no token counts as clipped; RecipeError if they are not losses.
    """
    function = LOSSES.load(settings.kind)
    result = function(logprobs_C, behavior_logprobs_C, coefficients_C, settings, lengths_R)
    if not isinstance(result, TokenLoss):
        log_ratios_C = (logprobs_C - behavior_logprobs_C).detach()
        result = TokenLoss(result, torch.zeros_like(log_ratios_C, dtype=torch.bool), log_ratios_C)
    _check_losses(result.losses_C, logprobs_C, settings.kind)
    if sampler_weights_C is not None:
        result = replace(result, losses_C=result.losses_C * sampler_weights_C)
    if settings.masks:
        assert lengths_R is not None, "masks of rollouts need their numbers of tokens"
        masked_C = masked_tokens(result.log_ratios_C, coefficients_C, settings, lengths_R)
        losses_C = result.losses_C.masked_fill(masked_C, 0.0)
        result = replace(result, losses_C=losses_C, clipped_C=result.clipped_C | masked_C)
    if settings.beta == 0:
        return result
    penalty_C = settings.beta * kl_to_reference(logprobs_C, reference_logprobs_C)
    return replace(result, losses_C=result.losses_C + penalty_C)


def _check_losses(losses_C: Any, logprobs_C: torch.Tensor, kind: str) -> None:
    """Raise RecipeError unless a user's function returned differentiable losses of the tokens."""
    returned = f"a {type(losses_C).__name__}"
    if isinstance(losses_C, torch.Tensor):
        is_constant = logprobs_C.requires_grad and not losses_C.requires_grad
        if losses_C.shape == logprobs_C.shape and not is_constant:
            return
        returned = f"a tensor of shape {list(losses_C.shape)}"
        returned += " that does not depend on the log-probs" if is_constant else ""
    raise RecipeError(
        f"loss.kind {kind}: returned {returned}: return the loss of each of the {len(logprobs_C)} "
        "tokens, a tensor of shape [C] that is differentiable in logprobs"
    )


ROW_STATISTICS = (
    "loss", "tokens", "clipped", "log_ratio", "log_ratio_squared",
    "approx_kl", "ratio", "ratio_squared", "log_ratio_max", "entropy", "reference_kl",
)  # fmt: skip
"""Columns of `row_statistics`: sums over a row's tokens, but for `log_ratio_max`, the maximum.
`loss` is the sum of the weighted token losses: the row's share of the mini-batch loss."""


def row_statistics(
    result: TokenLoss,
    weighted_losses_C: torch.Tensor,
    entropies_C: torch.Tensor,
    reference_kl_C: torch.Tensor,
    row_of_C: torch.Tensor,
    rows: int,
) -> torch.Tensor:
    """Compute the table of `ROW_STATISTICS`, float64 [R, K], R = `rows`, without gradients.
    `row_of_C` (int64 [C], 0 to R - 1) is the row of every token. A row without tokens has zeros,
    and -inf as `log_ratio_max`."""
    log_ratios_C = result.log_ratios_C.double()
    ratios_C = log_ratios_C.clamp(max=700.0).exp()  # exp(700) is finite in float64
    sums_C = torch.stack(
        [
            weighted_losses_C.detach().double(),
            torch.ones_like(log_ratios_C),
            result.clipped_C.double(),
            log_ratios_C,
            log_ratios_C.square(),
            ratios_C - 1.0 - log_ratios_C,
            ratios_C,
            (2 * log_ratios_C).clamp(max=700.0).exp(),
            torch.zeros_like(log_ratios_C),  # log_ratio_max, set below
            entropies_C.detach().double(),
            reference_kl_C.detach().double(),
        ],
        dim=1,
    )
    table_RK = torch.zeros(
        rows, len(ROW_STATISTICS), dtype=torch.float64, device=log_ratios_C.device
    )
    table_RK.index_add_(0, row_of_C, sums_C)
    highest_R = torch.full((rows,), -torch.inf, dtype=torch.float64, device=log_ratios_C.device)
    highest_R.scatter_reduce_(0, row_of_C, log_ratios_C, reduce="amax")
    table_RK[:, ROW_STATISTICS.index("log_ratio_max")] = highest_R
    return table_RK
