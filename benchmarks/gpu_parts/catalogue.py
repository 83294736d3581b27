"""The parts, in order."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

ENGINE = ("transformers", "deepspeed", "pydantic", "yaml", "safetensors")
RUN = (*ENGINE, "pyarrow")
COMMAND = (*RUN, "typer", "rich")
VLLM = (*ENGINE, "vllm")
SAMPLED = (*COMMAND, "vllm")


@dataclass(frozen=True, slots=True)
class Part:
    """`entry` is `module:function` within this package, called with a `record.Context`;
    `needs` are modules without which the part is skipped, and so it is with fewer than `gpus`.
    `anywhere`: runs without a GPU too."""

    number: int
    title: str
    entry: str
    needs: tuple[str, ...] = ENGINE
    anywhere: bool = False
    gpus: int = 1

    def load(self) -> Callable[..., None]:
        module, _, function = self.entry.partition(":")
        return getattr(import_module(f"gpu_parts.{module}"), function)


PARTS = (
    Part(1, "versions, driver, empty stdout", "environment:examine", (), anywhere=True),
    Part(2, "ZeRO-3 bf16 update at 0.6B, small and large chunks", "training:compare_chunks"),
    Part(3, "vLLM beside the engine, eager: free memory", "sampling:measure_memory", VLLM),
    Part(4, "32 requests at T=1: log-prob gap, same seeds", "sampling:compare_logprobs", VLLM),
    Part(5, "sleep, train, reload, generate; eager", "sampling:cycle_eager", VLLM),
    Part(6, "sleep, train, reload, generate; CUDA graphs", "sampling:cycle_with_graphs", VLLM),
    Part(7, "five whole steps", "whole_runs:take_steps", RUN),
    Part(8, "checkpoint, resume, close while asleep", "whole_runs:resume_and_close", COMMAND),
    Part(9, "training step at 0.6B", "training:measure_0_6b"),
    Part(10, "training step at 1.7B", "training:measure_1_7b"),
    Part(11, "training step at 4B", "training:measure_4b"),
    Part(12, "one step beside TRL's", "against:compare_with_trl", (*RUN, "trl", "datasets")),
    Part(13, "the same update at ZeRO 2 and 3, and with an offloaded optimizer", "variants:stages"),
    Part(14, "LoRA beside full training at 1.7B", "variants:lora", (*ENGINE, "peft")),
    Part(15, "uneven rows: padded, and packed under flex attention", "variants:packing"),
    Part(16, "two ranks at ZeRO 3: NCCL", "several:two_ranks", COMMAND, gpus=2),
    Part(17, "two ranks, vLLM in tensor parallel", "several:tensor_parallel", SAMPLED, gpus=2),
    Part(18, "a vLLM server, weights over NCCL", "several:nccl_weights", SAMPLED, gpus=2),
    Part(19, "asynchronous: a rank and a vLLM server", "several:asynchronous", SAMPLED, gpus=2),
    Part(20, "one prompt to eight rows, and to each its own", "several:shared_prompts"),
)


def find_part(number: int) -> Part:
    return next(part for part in PARTS if part.number == number)
