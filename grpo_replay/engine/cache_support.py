"""Whether transformers can decode a model with a cache, as its configuration alone shows."""

import inspect
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig

from grpo_replay.engine.models import load_config
from grpo_replay.errors import ModelError
from grpo_replay.recipe import Recipe

CACHE_NAMES = ("past_key_values", "cache_params")
"""Arguments of a forward pass that take a cache."""


def check_cache(recipe: Recipe) -> None:
    """Raises ModelError, before weights are loaded, if the `hf` sampler is to decode a model that
    takes no cache."""
    if recipe.sampling.backend != "hf":
        return
    config = load_config(recipe.model)
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
