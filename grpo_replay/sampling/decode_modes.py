"""The modes in which the `hf` sampler can decode a model, and the choice of the first that gives
the model's own log-probs.

The fastest mode uses a cache and an attention of this file, for models whose layers all attend to
all tokens. Others use transformers' cache classes: with padded prompts if only attention moves
information between positions, else with prompts of equal length, because the states of convolutions
and recurrent layers would run over padding. No list of models is complete, so modes are tried out.

`RowCache` has one buffer per layer, from which finished rows are removed. It replaces transformers'
DynamicCache, which copies all keys and values for every token. `HfCache` has transformers' own
layers, for models with sliding windows or states.

With grouped queries and a padding mask, transformers repeats keys and values for every query head.
Decoding has one query token, which attends to all keys, so the query heads of a group are passed as
query positions instead: the result is the same, and the cache is not copied.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_replay.errors import ModelError

GROWTH_TOKENS = 256
"""Minimum growth of a full cache; it grows by half of its length if that is more."""


class RowLayer(DynamicLayer):
    """Keys and values [R, heads, length, head_dim] of one layer, in buffers with room to grow."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        """Copies prefilled keys and values into buffers of `capacity` tokens."""
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
        """Called by transformers in every forward pass: appends keys and values of new tokens, and
        returns all of the layer's. A full buffer grows by `GROWTH_TOKENS` or half."""
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


class HfCache(DynamicCache):
    """A cache of the layer classes that transformers chooses for a model's configuration."""

    def move_rows(self, targets: torch.Tensor, sources: torch.Tensor, rows: int) -> None:
        """Copy row `sources[i]` over row `targets[i]`, then keep the first `rows`."""
        kept = torch.arange(rows, device=targets.device)
        kept[targets] = sources
        self.reorder_cache(kept)


def expanded_cache(prefills: Sequence[Cache], prompt_of_row_R: torch.Tensor, room: int) -> RowCache:
    """Make a cache whose row i continues prompt `prompt_of_row_R[i]`. Prompts are numbered through
    all `prefills`, which are left-padded to one length, and are emptied. The cache has capacity for
    `room` further tokens before it grows."""
    layers = []
    for index in range(len(prefills[0].layers)):
        states = [prefill.layers[index] for prefill in prefills]
        keys = torch.cat([state.keys for state in states])[prompt_of_row_R]
        values = torch.cat([state.values for state in states])[prompt_of_row_R]
        layers.append(RowLayer(keys, values, keys.shape[-2] + room))
        for state in states:  # free the prefill layer by layer
            state.reset()
    return RowCache(layers=layers)


DECODE_ATTENTION = "grpo_replay_decode"
"""Name of `decode_attention` for `model.set_attn_implementation`."""


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention output [R, length, heads, head_dim], and None for the attention
    weights, as transformers expects; for one query token with grouped queries without copying the
    cache.

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


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


logger = logging.getLogger(__name__)

CACHE_NAMES = ("past_key_values", "cache", "cache_params")
"""Names of a forward pass's argument for a cache; transformers 5.24 renamed the first."""


@dataclass(frozen=True, slots=True)
class DecodeMode:
    """How a model is decoded. `hf_cache`: with transformers' cache classes. `padded`: a batch may
    have prompts of several lengths. `forward_arguments`: names of the model's."""

    attention: str
    hf_cache: bool
    padded: bool
    forward_arguments: frozenset[str]

    def inputs(
        self,
        input_ids: torch.Tensor,
        cache: Cache,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> dict[str, Any]:
        """Returns the arguments of a forward pass, by the names that this model's forward takes."""
        cache_name = next(name for name in CACHE_NAMES if name in self.forward_arguments)
        arguments: dict[str, Any] = {"input_ids": input_ids, cache_name: cache, "use_cache": True}
        if "position_ids" in self.forward_arguments:
            arguments["position_ids"] = position_ids
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        return arguments


def decode_modes(model: PreTrainedModel) -> list[DecodeMode]:
    """List the modes that may decode a model correctly, fastest first; empty for a model without a
    cache. Which one does is tried out by `first_working_mode`."""
    names = frozenset(inspect.signature(model.forward).parameters)
    if not names.intersection(CACHE_NAMES):
        return []
    layer_types = {type(layer) for layer in DynamicCache(config=model.config).layers}
    fused = model._supports_sdpa and not caps_scores(model.config)
    modes = []
    if layer_types == {DynamicLayer}:
        attention = DECODE_ATTENTION if fused else "eager"
        modes.append(DecodeMode(attention, hf_cache=False, padded=True, forward_arguments=names))
    attention = "sdpa" if fused else "eager"
    if layer_types <= {DynamicLayer, DynamicSlidingWindowLayer}:
        modes.append(DecodeMode(attention, hf_cache=True, padded=True, forward_arguments=names))
    modes.append(DecodeMode(attention, hf_cache=True, padded=False, forward_arguments=names))
    return modes


def caps_scores(config: PreTrainedConfig) -> bool:
    """Whether attention scores have a soft cap, which torch's fused attention leaves out."""
    return getattr(config, "attn_logit_softcapping", None) is not None


class DecodeFailed(Exception):
    """The code of a model raised an error in a decode mode; `__cause__` is that error."""


@contextmanager
def model_code() -> Iterator[None]:
    """Turn errors of the enclosed calls, into a model and its cache, into DecodeFailed, except a
    lack of memory. Errors elsewhere in a trial are bugs of this package, and not caught."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise DecodeFailed from error


def first_working_mode(
    model: PreTrainedModel, matches_forward_pass: Callable[[DecodeMode], bool]
) -> DecodeMode:
    """Return the first mode for which `matches_forward_pass`, and set its attention in the model.
    Raises ModelError if there is none."""
    for mode in decode_modes(model):
        try:
            with model_code():
                model.set_attn_implementation(mode.attention)
            if matches_forward_pass(mode):
                return mode
        except DecodeFailed as failure:
            kind, why = model.config.model_type, failure.__cause__
            logger.debug("%s cannot be decoded with %s: %r", kind, mode, why)
    raise ModelError(
        f"sampling.backend hf: it cannot decode a model of type {model.config.model_type} with a "
        "cache of transformers and get the log-probs of the model; use sampling.backend vllm"
    )
