"""Does the dry run's memory model hold? Its prediction beside what a real engine takes on a CPU.

    python benchmarks/memory.py

Each case runs in processes of its own and updates three times, with two micro-batches. Measured is
the peak of the resident set over that of an engine around a negligible model; predicted is the
engine's peak without its base. Allocations are returned to the system at once
(glibc's thresholds), so that the resident set is what is alive. Needs Linux, about 4 GiB and some
minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from grpo_replay.lab.dry_run.memory import PROCESS_ZERO

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072", "DS_ACCELERATOR": "cpu",
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "nothing": {"num_hidden_layers": 1, "vocab_size": 512, "hidden_size": 32,
                "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1,
                "head_dim": 32},
    "seventy": {
        "num_hidden_layers": 10, "vocab_size": 32_768, "hidden_size": 640,
        "intermediate_size": 1920, "num_attention_heads": 10, "num_key_value_heads": 5,
        "head_dim": 64,
    },
}  # fmt: skip
"""Qwen3-0.6B with other sizes; `seventy` has 70 million parameters."""

BASE_CASE = ("nothing", 2, 1, "nothing", 64, 2)
CASES = [
    # shape, ZeRO stage, ranks, engine.offload, row length, rows
    ("seventy", 2, 1, "nothing", 16, 4),
    ("seventy", 2, 1, "optimizer", 16, 4),
    ("seventy", 3, 2, "nothing", 16, 8),
    ("seventy", 3, 2, "optimizer", 16, 8),
]


def recipe_of(case: tuple[Any, ...]) -> dict[str, Any]:
    shape, stage, ranks, offload, length, rows = case
    prompt = length // 8
    return {
        "name": "memory",
        "model": {
            "path": "builtin:qwen3-0.6b", "tokenizer": "builtin:bytes", "dtype": "float32",
            "random_init": SHAPES[shape],
        },
        "prompts": {"max_prompt_length": prompt},
        "sampling": {"max_completion_length": length - prompt},
        "replay": {"preset": "grpo"},
        "batch": {"max_tokens_per_microbatch": rows // ranks // 2 * length, "updates_per_step": 1},
        "engine": {
            "device": "cpu", "zero_stage": stage, "num_processes": ranks, "offload": offload,
            "logprob_chunk_tokens": 1024,
        },
    }  # fmt: skip


def status_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


def worker(case: tuple[Any, ...]) -> None:
    """One rank of one case; rank 0 prints {"peak_mib": …, "seconds": …} of the last update."""
    import logging

    import numpy as np

    logging.disable(logging.WARNING)
    from grpo_replay.distributed.failures import exit_rank
    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
    from grpo_replay.engine.models import load_policy, load_tokenizer
    from grpo_replay.engine.processes import initialize_processes
    from grpo_replay.recipe import resolve_recipe
    from grpo_replay.replay.batch import TrainRow

    recipe = resolve_recipe([recipe_of(case)])
    comm, device = initialize_processes(recipe)
    tokenizer = load_tokenizer(recipe.model)
    model = load_policy(recipe.model, 0)
    stage = recipe.zero_stage(comm.world_size)
    engine = DeepSpeedEngine(recipe, model, tokenizer, comm, device, stage)
    length, rows = case[4:]
    prompt = recipe.prompts.max_prompt_length
    generator = np.random.default_rng(0)

    def row() -> TrainRow:
        prompt_P = generator.integers(0, 200, prompt).astype(np.int32)
        completion_T = generator.integers(0, 200, length - prompt).astype(np.int32)
        logprobs_T = np.full(length - prompt, -5.0, np.float32)
        return TrainRow(prompt_P, completion_T, logprobs_T, logprobs_T, 1.0, 1e-4)

    for _ in range(3):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
        started = time.perf_counter()
        engine.update([row() for _ in range(rows)] if comm.is_main else None)
    if comm.is_main:
        seconds = time.perf_counter() - started
        print(json.dumps({"peak_mib": status_mib("VmHWM"), "seconds": seconds}))
    exit_rank(0)


def predicted_mib(case: tuple[Any, ...]) -> float:
    from grpo_replay.lab.dry_run.planner import Machines, plan_memory
    from grpo_replay.recipe import resolve_recipe

    recipe = resolve_recipe([recipe_of(case)])
    here = Machines("cpu", (recipe.engine.num_processes,), 0)
    memory = plan_memory(recipe, here).engine
    return (memory.peak - memory.base + memory.host) / 2**20


def measure(case: tuple[Any, ...]) -> dict[str, float]:
    """What the case's rank 0 prints."""
    launcher = [sys.executable]
    if case[2] > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                     str(case[2])]  # fmt: skip
    done = subprocess.run(
        [*launcher, __file__, "--worker", json.dumps(case)],
        capture_output=True, text=True, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith('{"peak_mib"'):
            return json.loads(line)
    raise RuntimeError(f"{case}: no result\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(tuple(json.loads(options.worker)))
        return
    base = measure(BASE_CASE)["peak_mib"]
    print(f"engine around nothing: {base:.0f} MiB (assumed {PROCESS_ZERO >> 20})", flush=True)
    for case in CASES:
        found = measure(case)
        measured, predicted = found["peak_mib"] - base, predicted_mib(case)
        print(f"{case!s:45} measured {measured:7.0f} MiB  predicted {predicted:7.0f}  "
              f"{100 * (predicted / measured - 1):+6.1f} %, an update {found['seconds']:.2f} s",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
