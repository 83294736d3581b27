"""How large everything is: published shapes on a GPU, toy ones on a CPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GROUP, UPDATES = 8, 2  # completions of a prompt, optimizer updates of a step


@dataclass(frozen=True, slots=True)
class Size:
    """`shapes` are what a shape differs in from the published one. `long_*` is the step of the 0.6B
    shape: tokens of a prompt, of a completion, prompts of a step and rows of a micro-batch."""

    name: str
    device: str
    dtype: str
    shapes: Mapping[str, Mapping[str, Any]]
    vllm_share: float
    steps: int
    not_timed: int  # first steps of a run
    long_prompt: int
    long_completion: int
    long_prompts: int
    long_rows: int
    packs: tuple[int, ...]  # padded tokens of a micro-batch
    row_tokens: int
    updates: int
    cells: int  # runs of the study at a time


_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
"""vLLM's attention on a CPU takes heads of 32. The embedding of 2,048 tokens is above DeepSpeed's
threshold of 100,000 elements, so it is sharded."""

SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152,
    "max_position_embeddings": 8192, "rope_theta": 100_000.0, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}  # fmt: skip

FULL = Size(
    name="full", device="cuda", dtype="bfloat16", shapes={"smollm2": SMOLLM2},
    vllm_share=0.3, steps=6, not_timed=2, long_prompt=64, long_completion=512, long_prompts=8,
    long_rows=32, packs=(8192, 32_768), row_tokens=4096, updates=3, cells=4,
)  # fmt: skip

TOY = Size(
    name="toy", device="cpu", dtype="float32",
    shapes={
        "smollm2": SMOLLM2 | _SMALL | {"num_hidden_layers": 2, "vocab_size": 2048},
        "qwen3-0.6b": _SMALL | {"num_hidden_layers": 1, "vocab_size": 2048},
        "qwen3-1.7b": _SMALL | {"num_hidden_layers": 2, "vocab_size": 2048},
    },
    vllm_share=0.3, steps=4, not_timed=1, long_prompt=8, long_completion=24, long_prompts=2,
    long_rows=4, packs=(128, 256), row_tokens=64, updates=2, cells=2,
)  # fmt: skip
