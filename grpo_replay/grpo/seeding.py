"""Seeds as functions of what they are for, so that nothing depends on how work is spread."""

import numpy as np

from grpo_replay.types import RequestKey


def completion_seed(run_seed: int, key: RequestKey) -> int:
    """A seed in [0, 2^63) for one completion, from run seed, step, prompt and completion index."""
    sequence = np.random.SeedSequence([run_seed, *key])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def stream(run_seed: int, *path: int) -> np.random.Generator:
    """An independent generator for the stream named by `path`."""
    return np.random.default_rng(np.random.SeedSequence([run_seed, *path]))
