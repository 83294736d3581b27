"""Seeds computed from what they are for, so that results do not depend on how work is split."""

import numpy as np

from grpo_replay.types import RequestKey


def completion_seed(run_seed: int, key: RequestKey) -> int:
    """The seed of one completion, in [0, 2^63), from the run seed and the request's key."""
    sequence = np.random.SeedSequence([run_seed, *key])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def stream(run_seed: int, *path: int) -> np.random.Generator:
    """The random generator of the stream that `path` identifies, independent of other streams."""
    return np.random.default_rng(np.random.SeedSequence([run_seed, *path]))
