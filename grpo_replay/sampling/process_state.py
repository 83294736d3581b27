"""Protects the trainer from global state that an in-process vLLM engine changes."""

import contextlib
import os
import random
import sys
from collections.abc import Iterator

import numpy as np
import torch

LEAKED_VARIABLES = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")
"""Set by vLLM's CPU platform for its own workers. Verifier processes would inherit the first;
DeepSpeed reads the second."""


def preserved_torch_randomness() -> contextlib.AbstractContextManager[None]:
    """Restore torch's global random state afterwards. vLLM's CPU sampler draws from it for every
    row before it overwrites the rows that have a seed of their own."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices=devices)


@contextlib.contextmanager
def preserved_process_state() -> Iterator[None]:
    """Restore the global random states, torch's thread settings and `LEAKED_VARIABLES` afterwards.

    An engine in this process seeds Python, numpy and torch, and on a CPU replaces
    `torch.set_num_threads` by a function that does nothing.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    environment = {name: os.environ.get(name) for name in LEAKED_VARIABLES}
    try:
        with preserved_torch_randomness():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what C++ and Python print to stdout to stderr instead: stdout is for results."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
