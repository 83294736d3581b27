"""Small random models of many architectures."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 24, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXING: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
    "falcon_h1": {},
}  # fmt: skip
"""Layers that carry a state from position to position."""
OTHERS: dict[str, dict[str, Any]] = {"bloom": {"n_head": 4, "n_layer": 2}}
APART: dict[str, dict[str, Any]] = {
    "qwen2": {}, "qwen3": {}, "llama": {}, "gemma3_text": {"sliding_window": 32}, "mistral": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}  # fmt: skip


def random_model(kind: str, dtype: str = "float32") -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **SIZES | (MIXING | APART | OTHERS)[kind])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).train()
