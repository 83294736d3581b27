"""Protects process state from vLLM's side effects, and moves vLLM's GPU memory out and back
(sleep).

Memory outside vLLM's own allocator stays on the GPU: communicators, and CUDA graphs without
`sleep_mode_offload_cudagraph` (the memory plan of `lab/dry_run` counts both).
"""

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from grpo_replay.errors import SamplerError, first_line

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

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
    """Restores, after the block, the global random states, torch's threads and `LEAKED_VARIABLES`.

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
    """Within the block, redirects stdout of C++ and Python to stderr: stdout is for results."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


VLLM_ERRORS = (RuntimeError, ValueError, AssertionError, TypeError)
"""Raised by vLLM when an operation fails: out of memory is a RuntimeError, a failed memory profile
an AssertionError, an engine argument of the wrong type often a TypeError."""

_KEEP_LEVEL, _DISCARD_LEVEL = 1, 2  # of vLLM's sleep: copy weights to host memory, or discard them


def short_message(error: Exception) -> str:
    """The message of an error of vLLM, without pydantic's frame and lists of all alternatives."""
    text = str(error).partition("Value error, ")[2] or str(error)
    for end in (" Supported architectures:", " The available parameters", " [type=", "\n"):
        text = text.strip().partition(end)[0]
    return text.rstrip(".") or type(error).__name__


class SleepState:
    """Tracks which parts of an engine's memory ("weights", "kv_cache") are off the GPU."""

    def __init__(self, engine: "LLMEngine") -> None:
        self._engine = engine
        self._can_sleep = bool(engine.vllm_config.model_config.enable_sleep_mode)
        self._asleep: set[str] = set()
        self._host_copy = False

    def sleep(self, keep_weights: bool) -> None:
        """Free the cache and the weights; with `keep_weights`, copy the weights to pinned host
        memory first. A no-op for an engine without sleep mode. Raises SamplerError."""
        if not self._can_sleep or "weights" in self._asleep:
            return
        with _as_sampler_error("go to sleep"):
            self._engine.sleep(level=_KEEP_LEVEL if keep_weights else _DISCARD_LEVEL)
        self._asleep = {"weights", "kv_cache"}
        self._host_copy = keep_weights

    def wake(self, *parts: str) -> None:
        """Move parts back to the GPU: an empty cache; the kept weights, or uninitialised ones if
        none were kept. Raises SamplerError, after which the call may be repeated."""
        for part in parts:
            if part in self._asleep:
                with _as_sampler_error(f"wake its {part}"):
                    self._engine.wake_up([part])
                self._asleep.remove(part)
        if self._host_copy and "weights" not in self._asleep:
            self._host_copy = False
            if torch.cuda.is_initialized():
                _return_pinned_pages()


def _return_pinned_pages() -> None:
    """Free the pinned pages of a host copy, which torch would keep for the next copy."""
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    else:  # torch 2.11 has it without a public name
        getattr(torch._C, "_host_emptyCache")()  # noqa: B009


@contextmanager
def _as_sampler_error(action: str) -> Iterator[None]:
    """Turn an error of vLLM into a SamplerError that names the action."""
    try:
        yield
    except VLLM_ERRORS as error:
        raise SamplerError(
            f"sampling.backend vllm: the engine could not {action}: {first_line(error)}; if the "
            "GPU is full, lower sampling.vllm.gpu_memory_utilization or what the trainer holds "
            "(engine.zero_stage 3, engine.offload optimizer); train --dry-run estimates both"
        ) from error
