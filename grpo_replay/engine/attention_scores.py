"""Attentions that store a score for every pair of tokens, and what that costs."""

from transformers import PreTrainedConfig

from grpo_replay.recipe import ModelSection

SCORE_BYTES = 4
WARNING_BYTES = 2**30


def has_whole_scores(model: ModelSection, config: PreTrainedConfig, on_cuda: bool) -> bool:
    """Whether the trainer's attention stores the score of every pair of tokens."""
    if model.attn_implementation == "eager":
        return True
    heads = getattr(config, "num_attention_heads", None)
    grouped = getattr(config, "num_key_value_heads", None) not in (None, heads)
    sdpa = model.attn_implementation == "sdpa"
    return sdpa and on_cuda and model.dtype == "float32" and grouped


def float32_warning(
    model: ModelSection, config: PreTrainedConfig, longest: int, on_cuda: bool
) -> str | None:
    """A warning about a float32 policy on a GPU with rollouts of up to `longest` tokens.

    None if the scores take less than 1 GiB per layer or are not stored, and for eager attention,
    which the user chose.
    """
    if model.attn_implementation == "eager" or not has_whole_scores(model, config, on_cuda):
        return None
    size = config.num_attention_heads * longest**2 * SCORE_BYTES
    if size < WARNING_BYTES:
        return None
    return (
        f"model.dtype float32 on a GPU: torch has no fused attention for it, so one rollout of "
        f"{longest:,} tokens takes {size / 2**30:.1f} GiB of scores a layer "
        f"({config.num_attention_heads} heads); set model.dtype bfloat16, or sample shorter ones"
    )
