"""A colocated engine gives its GPU memory to the trainer, and takes it back (vLLM's sleep mode).

What stays on the GPU is what vLLM holds outside its own allocator: CUDA graphs and communicators
(`dry_run.memory.vllm_memory` counts them).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from grpo_replay.errors import SamplerError, first_line

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

VLLM_ERRORS = (RuntimeError, ValueError, AssertionError)
"""What vLLM raises when something does not fit: running out of memory is a RuntimeError, a failed
memory profile an AssertionError."""

_KEPT, _DISCARDED = 1, 2  # vLLM's levels: weights copied to host memory, or dropped


class SleepState:
    """Which parts of an engine's memory, "weights" and "kv_cache", are off the GPU."""

    def __init__(self, engine: "LLMEngine") -> None:
        self._engine = engine
        self._can_sleep = bool(engine.vllm_config.model_config.enable_sleep_mode)
        self._asleep: set[str] = set()
        self._host_copy = False

    def sleep(self, keep_weights: bool) -> None:
        """Free the cache and the weights; `keep_weights` copies those to pinned host memory first.
        Does nothing for an engine without sleep mode. Raises SamplerError."""
        if not self._can_sleep or "weights" in self._asleep:
            return
        with _translated("go to sleep"):
            self._engine.sleep(level=_KEPT if keep_weights else _DISCARDED)
        self._asleep = {"weights", "kv_cache"}
        self._host_copy = keep_weights

    def wake(self, *parts: str) -> None:
        """Put parts back on the GPU: weights as they were kept, or without a content if they were
        not; the cache empty. Raises SamplerError, and may then be tried again."""
        for part in parts:
            if part in self._asleep:
                with _translated(f"wake its {part}"):
                    self._engine.wake_up([part])
                self._asleep.remove(part)
        if self._host_copy and "weights" not in self._asleep:
            self._host_copy = False
            if torch.cuda.is_initialized():
                torch.accelerator.empty_host_cache()  # torch would keep the pinned pages


@contextmanager
def _translated(action: str) -> Iterator[None]:
    try:
        yield
    except VLLM_ERRORS as error:
        raise SamplerError(
            f"sampling.backend vllm: the engine could not {action}: {first_line(error)}; if the "
            "GPU is full, lower sampling.vllm.gpu_memory_utilization or what the trainer holds "
            "(engine.zero_stage 3, engine.offload_optimizer); train --dry-run estimates both"
        ) from error
