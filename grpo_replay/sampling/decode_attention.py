"""Attention of the `hf` sampler: transformers' sdpa, but one new token does not copy the cache.

With grouped queries, transformers repeats keys and values for every query head when there is a
padding mask. One query token attends to everything, so the query heads of a group can stand in
for query positions instead: the same numbers, and the cache is read in place.
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
    """Attention output [R, length, heads, head_dim] and no weights, as transformers expects.

    `query` is [R, heads, length, head_dim], `key` and `value` have one head per group.
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
    return output.reshape(rows, 1, heads, head_dim), None


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
