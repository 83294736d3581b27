"""Attentions that store a score for every pair of tokens, and what that costs."""

from transformers import PreTrainedConfig

from grpo_replay.recipe import ModelSection


def has_whole_scores(model: ModelSection, config: PreTrainedConfig, on_cuda: bool) -> bool:
    """Whether the trainer's attention stores the score of every pair of tokens."""
    if model.attn_implementation == "eager":
        return True
    heads = getattr(config, "num_attention_heads", None)
    grouped = getattr(config, "num_key_value_heads", None) not in (None, heads)
    sdpa = model.attn_implementation == "sdpa"
    return sdpa and on_cuda and model.dtype == "float32" and grouped
