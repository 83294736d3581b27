"""The jobs in their order, with their limits. Needs no package."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """`name` begins with the letter of its part. `action` is a module of this package and a
    function in it, which gets the context and, if there is one, `argument`. It is stopped after
    `seconds` and not begun with fewer than `least` left. `needs` are packages to import, `smollm2`
    (its wheel) or `sampler` (part b did not find that vLLM fails)."""

    name: str
    title: str
    action: str
    seconds: float
    least: float
    needs: tuple[str, ...] = ()
    argument: str | None = None

    def load(self) -> Callable[..., Any]:
        module, _, function = self.action.partition(":")
        return getattr(importlib.import_module(f"gpu_parts.{module}"), function)


_PEER = ("trl", "vllm")

JOBS = (
    Job("a-machine", "versions, and the peak of the card", "machine:examine", 60, 15),
    Job("b-vllm", "vLLM by itself, with the kit's try_vllm.py", "machine:try_vllm", 240, 80,
        ("vllm",)),
    Job("d-0.6b-ours", "a whole step, 0.6B, 512 tokens, ours", "whole_steps:ours", 200, 80,
        _PEER, "qwen3-0.6b"),
    Job("d-0.6b-trl", "the same step, TRL's", "whole_steps:trl", 160, 80, _PEER, "qwen3-0.6b"),
    Job("h-weights", "asynchronous, a server on the card, whole weights", "servers:in_train", 120,
        60, ("vllm",), "weights"),
    Job("h-adapters", "likewise, LoRA's adapters", "servers:in_train", 120, 60, ("vllm", "peft"),
        "adapters"),
    Job("c-model", "SmolLM2 as a folder", "models:make_smollm2", 120, 40, ("smollm2",)),
    Job("i-verl", "verl with its vLLM replica, with replay and without", "in_verl:measure", 300,
        150, ("verl",)),
    Job("c-trl", "ReplayGRPOTrainer in TRL, vLLM colocated", "colocated:in_trl", 75, 40,
        ("sampler", *_PEER)),
    Job("c-train", "train smollm2, vLLM colocated", "colocated:in_train", 90, 45,
        ("sampler", "vllm")),
    Job("d-smollm2-ours", "a whole step, SmolLM2 additions, ours", "whole_steps:ours", 75, 45,
        _PEER, "smollm2"),
    Job("d-smollm2-trl", "the same step, TRL's", "whole_steps:trl", 60, 35, _PEER, "smollm2"),
    Job("e-0.6b", "updates at 0.6B, as they are and compiled", "updates:measure", 100, 30, (),
        "qwen3-0.6b: ZeRO 2"),
    Job("e-1.7b", "updates at 1.7B, likewise", "updates:measure", 120, 40, (),
        "qwen3-1.7b: ZeRO 2"),
    Job("f-study", "runs side by side on the card", "study:run", 600, 60),
    Job("g-zero3", "updates at 0.6B, ZeRO 3", "updates:measure", 60, 30, (), "qwen3-0.6b: ZeRO 3"),
    Job("g-lora", "updates of adapters at 1.7B", "updates:measure", 60, 30, ("peft",),
        "qwen3-1.7b: LoRA, rank 16"),
)  # fmt: skip
"""What has no figure yet comes first."""


def job_named(name: str) -> Job:
    return next(job for job in JOBS if job.name == name)
