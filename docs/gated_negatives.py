"""Replay of failures in which the model was neither sure nor lost, a priority of the user.

The gate of NexGRPO (Guo et al., ACL 2026): a wrong completion that the policy gave with middle
confidence is worth replaying; one of low confidence is noise, one of high confidence is a saturated
error. Right completions have |A| as usual. The bounds are log-probs per token, of the policy at
birth: choose them from the quartiles of `behavior_logprob_mean` in rollouts/.

    replay: {priority: gated_negatives.py:gated}
"""

import numpy as np

LOW, HIGH = -1.0, -0.1


def gated(columns):
    """|A|, and 0 for rollouts with A < 0 outside of the gate."""
    advantage, confidence = columns["advantage"], columns["behavior_logprob_mean"]
    is_open = (advantage >= 0) | ((confidence >= LOW) & (confidence <= HIGH))
    return np.where(is_open, np.abs(advantage), 0.0)


gated.columns = ("advantage", "behavior_logprob_mean")
