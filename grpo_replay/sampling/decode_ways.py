"""How the `hf` sampler decodes a model: the first way that gives the model's own log-probs.

The fastest way has its own cache and attention, for models whose every layer attends to all tokens.
Others decode with transformers' cache classes: with padded prompts where all that moves between
positions is attention, else (states of convolutions and recurrent layers would run over padding)
with prompts of one length at a time. No list of what models do is complete, so a way is tried out.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from grpo_replay.engine.models import load_config
from grpo_replay.errors import ModelError
from grpo_replay.recipe import ModelSection
from grpo_replay.sampling.kv_cache import NAME as DECODE_ATTENTION

logger = logging.getLogger(__name__)

CACHE_NAMES = ("past_key_values", "cache_params")
"""Arguments of a forward pass that take a cache."""


@dataclass(frozen=True, slots=True)
class DecodeWay:
    """`own_cache`: transformers' cache classes; `padded`: prompts of several lengths in one batch;
    `takes`: arguments of the model's forward pass."""

    attention: str
    own_cache: bool
    padded: bool
    takes: frozenset[str]

    def inputs(
        self,
        input_ids: torch.Tensor,
        cache: Cache,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> dict[str, Any]:
        """Arguments of a forward pass."""
        cache_name = next(name for name in CACHE_NAMES if name in self.takes)
        given: dict[str, Any] = {"input_ids": input_ids, cache_name: cache, "use_cache": True}
        if "position_ids" in self.takes:
            given["position_ids"] = position_ids
        if attention_mask is not None:
            given["attention_mask"] = attention_mask
        return given


def decode_ways(model: PreTrainedModel) -> list[DecodeWay]:
    """The ways that may decode a model rightly, fastest first."""
    takes = frozenset(inspect.signature(model.forward).parameters)
    if not takes.intersection(CACHE_NAMES):
        return []
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    fused = model._supports_sdpa and not caps_scores(model.config)
    ways = []
    if kinds == {DynamicLayer}:
        attention = DECODE_ATTENTION if fused else "eager"
        ways.append(DecodeWay(attention, own_cache=False, padded=True, takes=takes))
    attention = "sdpa" if fused else "eager"
    if kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        ways.append(DecodeWay(attention, own_cache=True, padded=True, takes=takes))
    ways.append(DecodeWay(attention, own_cache=True, padded=False, takes=takes))
    return ways


def caps_scores(config: PreTrainedConfig) -> bool:
    """Whether attention scores have a soft cap, which torch's fused attention leaves out."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def first_that_works(
    model: PreTrainedModel, gives_own_logprobs: Callable[[DecodeWay], bool]
) -> DecodeWay:
    """The first way for which `gives_own_logprobs`; the model then has its attention.

    Raises ModelError if there is none."""
    for way in decode_ways(model):
        try:
            model.set_attn_implementation(way.attention)
            if gives_own_logprobs(way):
                return way
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            logger.debug("%s cannot be decoded with %s: %r", model.config.model_type, way, error)
    raise cannot_decode(model.config)


_FAILURES = (
    TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, AssertionError
)  # fmt: skip
"""Raised by models that do not take a cache, mask or attention of the kind."""


def refuse_without_cache(model: ModelSection) -> None:
    """Raises ModelError for a model whose forward pass takes no cache."""
    config = load_config(model)
    found: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    kind = found[0] if isinstance(found, list | tuple) else found
    if kind is None:  # code from the model's repository
        return
    if not set(inspect.signature(kind.forward).parameters).intersection(CACHE_NAMES):
        raise cannot_decode(config)


def cannot_decode(config: PreTrainedConfig) -> ModelError:
    return ModelError(
        f"sampling.backend hf: it cannot decode a model of type {config.model_type} with a cache "
        "of transformers and get the log-probs of the model; use sampling.backend vllm"
    )
