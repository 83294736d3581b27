"""Random models of many architectures: hidden 64, two layers, the byte tokenizer's vocabulary."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 258, "max_position_embeddings": 128,
    "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 257, "initializer_range": 0.1,
}  # fmt: skip
HEADS = {"head_dim": 32}
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 24, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
EAGER = {"attn_implementation": "eager"}

ARCHITECTURES = {
    "llama": HEADS, "qwen2": {}, "qwen3": HEADS, "mistral": HEADS | WINDOW, "phi": {},
    "phi3": WINDOW, "olmo": {}, "olmo2": {}, "olmo3": WINDOW, "smollm3": {}, "stablelm": {},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96}, "gpt2": {}, "gpt_neox": {}, "falcon": {},
    "gpt_neo": EAGER | {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": EAGER | {"rotary_dim": 16}, "bloom": EAGER, "mpt": EAGER,
    "gemma": HEADS, "gemma2": HEADS | WINDOW | EAGER, "gemma3_text": HEADS | WINDOW,
    "cohere": {}, "cohere2": WINDOW | {"num_hidden_layers": 4}, "granite": {"logits_scaling": 8.0},
    "glm": HEADS, "glm4": HEADS, "ernie4_5": HEADS, "starcoder2": {}, "nemotron": {},
    "persimmon": {}, "gpt_bigcode": {}, "biogpt": {}, "helium": HEADS, "seed_oss": HEADS,
    "hunyuan_v1_dense": HEADS, "arcee": HEADS, "exaone4": HEADS | WINDOW, "nanochat": {},
    "qwen3_moe": HEADS | EXPERTS, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT, "gpt_oss": EAGER | HEADS | WINDOW | {"num_local_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bert": {"is_decoder": True}, "modernbert-decoder": {}, "rwkv": EAGER,
}  # fmt: skip
"""By transformers' name of the type; `attn_implementation` is the recipe's."""

WITH_STATE = {
    "qwen3_next": HEADS | EXPERTS | {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
    "falcon_h1": HEADS,
}  # fmt: skip
"""Others, whose layers carry a state from position to position, as `lfm2` does."""


def attention_of(kind: str) -> str:
    return (ARCHITECTURES | WITH_STATE)[kind].get("attn_implementation", "sdpa")


def random_config(kind: str, **changes) -> PreTrainedConfig:
    settings = (ARCHITECTURES | WITH_STATE)[kind]
    own = {k: v for k, v in settings.items() if k != "attn_implementation"}
    return AutoConfig.for_model(kind, **SIZES | own | changes)


def random_model(kind: str, **changes) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            random_config(kind, **changes), attn_implementation=attention_of(kind)
        ).eval()
