"""A loss without importance ratios, for rollouts of much older policies.

OAPL (arXiv 2602.19362) regresses to the optimum of the reward under a KL penalty to the policy that
sampled: β₂·log(π_θ(y)/π_b(y)) should be r - V*, with V* = β₁·log mean exp(r/β₁) over the group. The
estimator gives r - V*, the loss the squared error of a completion, whose log-ratio is the sum over
its tokens. Priorities by |A| then draw by |r - V*|.

    advantage: {estimator: oapl.py:optimal_advantage}
    loss: {kind: oapl.py:squared_error, aggregation: sequence_mean}
"""

import numpy as np
import torch

BETA_1, BETA_2 = 1.0, 1.0


def optimal_advantage(rewards, settings):
    """r - V* [G]."""
    largest = rewards.max()  # so that no exponential overflows
    mean = np.exp((rewards - largest) / BETA_1).mean()
    return rewards - (largest + BETA_1 * np.log(mean))


def squared_error(logprobs, behavior_logprobs, advantages, settings, lengths):
    """(β₂·Σ log-ratio - A)² of the completion that each token is of, [C]."""
    log_ratios = (logprobs - behavior_logprobs).split(list(lengths))
    sums = torch.cat([each.sum().expand(len(each)) for each in log_ratios])
    return (BETA_2 * sums - advantages) ** 2
