"""Attention of the `hf` sampler: transformers' sdpa without copies of the cache while decoding.

With grouped queries and a padding mask, transformers repeats keys and values for every query head.
When decoding there is one query token, which attends to all keys, so the query heads of a group can
be passed as query positions instead: the result is the same, and the cache is not copied.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "grpo_replay_decode"
"""What `model.set_attn_implementation` takes."""


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [R, length, heads, head_dim], and None for the attention weights.

    `query` is [R, heads, length, head_dim]; `key` and `value` have one head per group.
    """
    rows, heads, length, head_dim = query.shape
    groups = key.shape[1]
    if length > 1 or groups == heads:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    grouped = query.reshape(rows, groups, heads // groups, head_dim)
    output = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
