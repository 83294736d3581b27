"""Caches of the decoder that finished rows leave, and attention that does not copy them.

`RowCache` has one buffer per layer. It replaces transformers' DynamicCache, which copies all keys
and values for every token. `OwnCache` has transformers' own layers, for models with sliding windows
or states.

With grouped queries and a padding mask, transformers repeats keys and values for every query head.
When decoding there is one query token, which attends to all keys, so the query heads of a group can
be passed as query positions instead: the result is the same, and the cache is not copied.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROWTH_TOKENS = 256
"""Minimum growth of a full cache; it grows by half of its length if that is more."""


class RowLayer(DynamicLayer):
    """Keys and values [R, heads, length, head_dim] of one layer, in buffers with room to grow."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.rows, _, self.length, _ = keys.shape
        self._capacity = capacity
        self._key_buffer = self._enlarged(keys)
        self._value_buffer = self._enlarged(values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, self.length = self.length, self.length + key_states.shape[-2]
        if self.length > self._capacity:
            self._capacity = self.length + max(GROWTH_TOKENS, self.length // 2)
            self._key_buffer = self._enlarged(self._key_buffer[: self.rows, :, :start])
            self._value_buffer = self._enlarged(self._value_buffer[: self.rows, :, :start])
        keys = self._key_buffer[: self.rows, :, : self.length]
        values = self._value_buffer[: self.rows, :, : self.length]
        keys[:, :, start:] = key_states
        values[:, :, start:] = value_states
        return keys, values

    def get_seq_length(self) -> int:
        return self.length

    def move_rows(self, targets: torch.Tensor, sources: torch.Tensor, rows: int) -> None:
        """Copy row `sources[i]` over row `targets[i]`, then keep the first `rows`."""
        for buffer in (self._key_buffer, self._value_buffer):
            buffer[targets, :, : self.length] = buffer[sources, :, : self.length]
        self.rows = rows

    def _enlarged(self, states: torch.Tensor) -> torch.Tensor:
        rows, heads, length, head_dim = states.shape
        buffer = states.new_empty((rows, heads, self._capacity, head_dim))
        buffer[:, :, :length] = states
        return buffer


class RowCache(Cache):
    """Rows of keys and values, for models whose every layer attends to all tokens."""

    def move_rows(self, targets: torch.Tensor, sources: torch.Tensor, rows: int) -> None:
        """Copy row `sources[i]` over row `targets[i]`, then keep the first `rows`."""
        for layer in self.layers:
            layer.move_rows(targets, sources, rows)


class OwnCache(DynamicCache):
    """The layers that transformers gives a model of this configuration."""

    def move_rows(self, targets: torch.Tensor, sources: torch.Tensor, rows: int) -> None:
        """Copy row `sources[i]` over row `targets[i]`, then keep the first `rows`."""
        kept = torch.arange(rows, device=targets.device)
        kept[targets] = sources
        self.reorder_cache(kept)


def expanded_cache(prefills: Sequence[Cache], prompt_of_row_R: torch.Tensor, room: int) -> RowCache:
    """A cache whose row i continues prompt `prompt_of_row_R[i]`, numbered over all `prefills`
    (equally long, left-padded). Has capacity for `room` further tokens before it grows."""
    layers = []
    for index in range(len(prefills[0].layers)):
        states = [prefill.layers[index] for prefill in prefills]
        keys = torch.cat([state.keys for state in states])[prompt_of_row_R]
        values = torch.cat([state.values for state in states])[prompt_of_row_R]
        layers.append(RowLayer(keys, values, keys.shape[-2] + room))
        for state in states:  # free the prefill layer by layer
            state.reset()
    return RowCache(layers=layers)


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
