"""The device: its peak rate, its memory, and the floating-point operations of a training step."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_replay.lab.dry_run.memory import ModelShape

GIB = 2**30

PEAK_TFLOPS = {
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H200": 989.0, "A100": 312.0,
}  # fmt: skip
"""Dense bf16 peaks by a part of the device's name, NVIDIA's data sheets; the first that fits."""


def peak_tflops(device: str) -> float | None:
    """None for a device that is not in the table."""
    name = device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def training_flops(shape: "ModelShape", row_tokens: Sequence[int], completion_tokens: int) -> float:
    """Floating-point operations of forward and backward, by the usual count:
    6·N·tokens + 6·layers·attention width·Σ L².

    N are the weights that multiply activations: the backbone's for every token, the output head's
    for completion tokens only, where alone we compute logits; looking up an embedding is free.
    Attention is causal: scores and values take 2·2·L²·width / 2 per layer forward and twice that
    backward. Recomputation (gradient checkpointing) is not counted: this is for MFU, not HFU.
    """
    head = shape.hidden * shape.vocabulary
    backbone = shape.parameters - (head if shape.tied_head else 2 * head)
    linear = 6 * (backbone * sum(row_tokens) + head * completion_tokens)
    squares = sum(length * length for length in row_tokens)
    return float(linear + 6 * shape.layers * shape.attention_width * squares)


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def timed(device: str, action: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and its seconds."""
    synchronize(device)
    started = time.perf_counter()
    result = action()
    synchronize(device)
    return result, time.perf_counter() - started


def device_capacity(device: str) -> int:
    """Bytes of the GPU, or of the machine's memory."""
    import psutil
    import torch

    cuda = device == "cuda"
    return torch.cuda.mem_get_info()[1] if cuda else psutil.virtual_memory().total


def used_gib(device: str) -> float:
    """Memory in use on the GPU, over all processes; on a CPU this process's."""
    import psutil
    import torch

    if device != "cuda":
        return psutil.Process().memory_info().rss / GIB
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


class MostUsed(threading.Thread):
    """Looks fifty times a second how much memory is in use, that of vLLM and CUDA included, and
    keeps the most since the last `read`."""

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self._device, self._most = device, 0.0
        self.start()

    def run(self) -> None:
        while True:
            self._most = max(self._most, used_gib(self._device))
            time.sleep(0.02)

    def read(self) -> float:
        most, self._most = self._most, 0.0
        return most


def reset_peak(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> float | None:
    """Of live tensors since `reset_peak`, by torch's own count; None on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
