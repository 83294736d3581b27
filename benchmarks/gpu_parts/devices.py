"""The device: its peak rate, its memory, and the floating-point operations of a training step."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_replay.lab.dry_run.memory import ModelShape

GIB = 2**30

PEAK_TFLOPS = {
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H200": 989.0, "A100": 312.0,
}  # fmt: skip
"""Dense bf16 peaks by a part of the device's name, NVIDIA's data sheets; the first that fits."""


def peak_tflops(device_name: str, given: float | None) -> float | None:
    """`given`, or the table's; None for a device that is not in the table."""
    if given is not None:
        return given
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


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


def release() -> None:
    """Gives back what nothing holds any more."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_gib(device: str) -> float:
    """Free memory of the GPU, over all processes; on a CPU the machine's less this process's."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0] / GIB
    return device_capacity(device) / GIB - _status_gib("VmRSS")


def host_available_gib() -> float:
    """Over all processes: memory pinned for a GPU need not count as this process's."""
    import psutil

    return psutil.virtual_memory().available / GIB


def allocated_gib(device: str) -> float | None:
    """Live tensors on the GPU, by torch's count; None on a CPU."""
    if device != "cuda":
        return None
    import torch

    return torch.cuda.memory_allocated() / GIB


def device_capacity(device: str) -> int:
    """Bytes of the GPU, or of the machine's memory."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[1]
    import psutil

    return psutil.virtual_memory().total


class PeakMemory:
    """Peak since `reset`. On a GPU torch's own count; on a CPU the resident set beyond what it
    was when this was made, which is coarse: pages that were freed may still count."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._start = 0.0 if self._cuda else _status_gib("VmRSS")

    def reset(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> dict[str, float | None]:
        """`peak_gib` of live tensors and `reserved_gib` of the allocator (None on a CPU)."""
        if not self._cuda:
            return {"peak_gib": _status_gib("VmHWM") - self._start, "reserved_gib": None}
        import torch

        return {
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _status_gib(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 2**20
    raise KeyError(name)
