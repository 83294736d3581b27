"""How many groups the collector may start: the back-pressure of asynchronous sampling.

`fresh_anchored` and the use-once queue train on P prompts a step, so groups that are too far ahead
of the trainer would only grow old. AReaL's rule (arXiv 2505.24298, eq. 3) bounds them:

    accepted + running ≤ (max_ahead_steps + v + 1) · P

with v the steps that the trainer has made. A run of S steps never needs more than S · P groups.

`buffer_only` (paper B) is never gated: the servers always have `max_in_flight` requests, and the
ring drops the oldest rollouts. Only finished groups that the trainer has not taken are bounded, by
one whole buffer: with more, they would push each other out of it undrawn.
"""


def accepted_limit(max_ahead_steps: int, version: int, prompts_per_step: int, steps: int) -> int:
    """Groups accepted and running that are allowed while the trainer has made `version` steps.

    With 8 prompts a step and max_ahead_steps 1: 16 before the first step, 24 after it; after the
    ninth of ten steps 80.
    """
    return min(max_ahead_steps + version + 1, steps) * prompts_per_step


def may_start(limit: int, accepted_before: int, discarded_since: int) -> int:
    """Groups that a collector may start in all: `limit`, less those accepted before it said hello,
    and one more for each group since then that was stale, cancelled or lost."""
    return limit - accepted_before + discarded_since


def unacknowledged_limit(capacity_rollouts: int, group_size: int) -> int:
    """Finished groups that may wait for the trainer: those that fill a buffer, at least one."""
    return max(-(-capacity_rollouts // group_size), 1)
