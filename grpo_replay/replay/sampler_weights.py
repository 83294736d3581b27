"""Truncated importance weights between sampler and trainer.

Sources: Ionides, "Truncated Importance Sampling" (J. Comput. Graph. Stat. 2008);
between an inference engine and a trainer, Yao et al., "Your Efficient RL Framework Secretly Brings
You Off-Policy RL Training" (2025), with C = 2.
"""

import numpy as np

from grpo_replay.recipe import LossSection
from grpo_replay.types import Rollout


def sampler_weights(rollout: Rollout, settings: LossSection) -> np.ndarray:
    """float32 [T]: min(π_b / π_sampler, C) per token. Empty if `loss.sampler_ratio_cap` C is null.

    π_b are the trainer's log-probs, frozen at birth. In sync mode they are of the weights that
    sampled, and the weights of tokens differ from 1 only by what the two implementations round
    differently. Times the ratio π_θ / π_b of the loss they are π_θ / π_sampler: nothing counts
    twice.
    """
    if settings.sampler_ratio_cap is None:
        return np.zeros(0, np.float32)
    assert rollout.behavior_logprobs is not None
    log_ratios_T = rollout.behavior_logprobs.astype(np.float64) - rollout.sampler_logprobs
    cap = np.log(settings.sampler_ratio_cap)
    return np.exp(np.minimum(log_ratios_T, cap)).astype(np.float32)
