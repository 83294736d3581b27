"""How large everything is: published shapes on a GPU, toy ones on a CPU; and recipes of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_replay.recipe import Recipe

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens and counts of all parts. `packs` are padded tokens of one micro-batch; one update at
    `moving_rate` moves the policy by far more than the log-prob gap."""

    name: str
    device: str
    config_overrides: Mapping[str, Mapping[str, Any]]
    packs: tuple[int, ...]
    row_tokens: int
    updates: int
    chunks: tuple[int, int]
    requests: int
    prompt_tokens: int
    completion_tokens: int
    vllm_share: float
    moving_rate: float
    cycles: int
    prompts_per_step: int
    group_size: int
    checkpoint_gib: float
    trl: tuple[str, ...]


FULL = Size(
    name="full", device="cuda", config_overrides={},
    packs=(2048, 4096, 8192, 16_384, 32_768), row_tokens=8192, updates=4,
    chunks=(128, 4096), requests=32, prompt_tokens=64, completion_tokens=512, vllm_share=0.4,
    moving_rate=1e-4, cycles=3, prompts_per_step=8, group_size=8, checkpoint_gib=10.0,
    trl=(
        "--device", "cuda", "--shape", "qwen3-0.6b", "--steps", "3", "--rounds", "1",
        "--prompts", "8", "--prompt-tokens", "64", "--max-tokens", "1024", "--rows", "8",
    ),
)  # fmt: skip


def _toy_shape(layers: int) -> dict[str, Any]:
    """Its embedding is above DeepSpeed's persistence threshold of 100,000 elements, so sharded."""
    return {
        "num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 2048,
    }  # fmt: skip


TOY = Size(
    name="toy", device="cpu",
    config_overrides={name: _toy_shape(i + 1) for i, name in enumerate(MODELS)},
    packs=(64, 128, 256), row_tokens=64, updates=2, chunks=(8, 64), requests=32,
    prompt_tokens=8, completion_tokens=24, vllm_share=0.4, moving_rate=1e-3, cycles=2,
    prompts_per_step=4, group_size=4, checkpoint_gib=0.1,
    trl=(
        "--steps", "1", "--rounds", "1", "--prompts", "2", "--prompt-tokens", "8",
        "--max-tokens", "24", "--layers", "1", "--hidden", "64", "--vocabulary", "512",
    ),
)  # fmt: skip


def make_recipe(
    size: Size, shape: str = MODELS[0], *, prompt: int, completion: int, pack: int,
    **sections: Mapping[str, Any],
) -> "Recipe":  # fmt: skip
    """As the shipped recipes train: ZeRO-3, bf16, gradient checkpointing; random weights of a
    published shape."""
    from grpo_replay.recipe import resolve_recipe

    base = {
        "name": f"gpu-{size.name}",
        "model": {
            "path": f"builtin:{shape}", "tokenizer": "builtin:bytes",
            "dtype": "bfloat16", "gradient_checkpointing": True,
            "random_init": dict(size.config_overrides.get(shape, {})),
        },
        "prompts": {"template": "plain", "user_template": "{problem}", "max_prompt_length": prompt},
        "sampling": {
            "max_completion_length": completion, "prompts_per_step": size.prompts_per_step,
            "group_size": size.group_size,
            "vllm": {"gpu_memory_utilization": size.vllm_share},
        },
        "batch": {"max_tokens_per_microbatch": pack},
        "engine": {"device": size.device, "zero_stage": 3},
        "tracking": {"report_to": []},
    }  # fmt: skip
    return resolve_recipe([base, sections])
