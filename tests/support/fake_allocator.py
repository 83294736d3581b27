"""vLLM's sleep mode on a CPU engine: everything of vLLM is real but the allocator and the readings
of the GPU's memory.

`cuda_sleep` gives the CPU worker the GPU worker's `sleep` and `wake_up`; behind vLLM's own sleep
backend stands `FakeAllocator`, which takes memory away as CuMemAllocator does.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

TOTAL_BYTES = 2**34
DEFERRABLE = ("weights", "kv_cache")
# The CPU's attention kernel multiplies unused places of a cache block by zero.
GARBAGE = {"weights": torch.nan, "kv_cache": 1e30}


class FakeAllocator:
    """Follows vllm/device_allocator/cumem.py: memory that sleeps holds garbage, comes back with
    its content only if its tag was offloaded, and must not be freed."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, weakref.ref]] = []
        self.backups: dict[int, torch.Tensor] = {}
        self.asleep: set[int] = set()
        self.freed_twice: list[str] = []
        self.fail_to_wake = 0  # so many wakes run out of memory

    def adopt(self, tag: str, tensor: torch.Tensor) -> None:
        index = len(self.tensors)
        self.tensors.append((tag, weakref.ref(tensor)))
        weakref.finalize(tensor, self._freed, tag, index)

    def _freed(self, tag: str, index: int) -> None:
        if index in self.asleep:
            self.freed_twice.append(tag)

    @property
    def resident_bytes(self) -> int:
        tensors = [ref() for i, (_, ref) in enumerate(self.tensors) if i not in self.asleep]
        return sum(each.nbytes for each in tensors if each is not None)

    @property
    def host_bytes(self) -> int:
        return sum(each.nbytes for each in self.backups.values())

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for index, (tag, ref) in enumerate(self.tensors):
            tensor = ref()
            if index in self.asleep or tensor is None:
                continue
            if tag in offload_tags:
                self.backups[index] = tensor.detach().clone()
            with torch.no_grad():
                tensor.data.fill_(GARBAGE[tag])
            self.asleep.add(index)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if self.fail_to_wake:
            self.fail_to_wake -= 1
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:119")
        for index in sorted(self.asleep):
            tag, ref = self.tensors[index]
            if tags is None or tag in tags or tag not in DEFERRABLE:
                self.asleep.remove(index)
                if index in self.backups:
                    ref().data.copy_(self.backups.pop(index))


@contextlib.contextmanager
def cuda_sleep() -> Iterator[FakeAllocator]:
    """Engines opened inside can sleep; `adopt_engine` hands one to the allocator."""
    import vllm.device_allocator
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    from grpo_replay.sampling import vllm_local

    allocator = FakeAllocator()
    honest = vllm_local._colocation_arguments

    def as_on_gpu(*arguments: Any) -> dict[str, Any]:
        small = {"num_gpu_blocks_override": 64}  # filling the cache with NaN takes time
        return honest(*arguments) | {"enable_sleep_mode": True, **small}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_local, "_colocation_arguments", as_on_gpu)
        patch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)
        patch.setattr(vllm.device_allocator, "get_mem_allocator_instance", lambda: allocator)
        patch.setattr(CPUWorker, "sleep", Worker.sleep)
        patch.setattr(CPUWorker, "wake_up", Worker.wake_up)
        patch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        patch.setattr(
            torch.accelerator,
            "get_memory_info",
            lambda *_: (TOTAL_BYTES - allocator.resident_bytes, TOTAL_BYTES),
        )
        yield allocator


def adopt_engine(allocator: FakeAllocator, sampler: Any) -> None:
    """What vLLM would have allocated under these tags."""
    runner = sampler._engine.model_executor.driver_worker.worker.model_runner
    for parameter in runner.model.parameters():
        allocator.adopt("weights", parameter)
    for buffer in runner.model.buffers():
        if buffer.is_floating_point():
            allocator.adopt("weights", buffer)
    for cache in runner.kv_caches:
        allocator.adopt("kv_cache", cache)
