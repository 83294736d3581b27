"""Writes and reads the policy of a checkpoint: whole weights in model/, or with LoRA adapters in
adapter/, which belong to the base model of the run's recipe."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_replay.engine.models import (
    OWN_SETTINGS,
    base_digest,
    load_policy,
    refuse_other_base,
    section_at,
)
from grpo_replay.engine.weights import ADAPTER, LoraAdapters, full_tensors, pushed_weights
from grpo_replay.recipe import Recipe
from grpo_replay.storage.checkpoint import ADAPTER_FOLDER, MODEL_FOLDER, read_state
from grpo_replay.types import NamedTensors

_CHUNK_TOKENS = 256  # float64 log-probs over a vocabulary of 150,000: 0.3 GB


def write_model(
    folder: Path, model: PreTrainedModel, state: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> None:
    """Write weights, by their names in the model, in Hugging Face format. `dtype` is the weights'
    dtype if it is not the model's."""
    model.save_pretrained(folder, state_dict=state)
    if dtype is not None:
        config = copy.deepcopy(model.config)
        config.dtype = dtype
        config.save_pretrained(folder)
    _rewrite(folder / "config.json", lambda saved: _older_names(model, saved) | saved)


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a tokenizer in Hugging Face format, with names that transformers 4 knows too."""
    tokenizer.save_pretrained(folder)

    def renamed(saved: dict[str, Any]) -> dict[str, Any]:
        if saved.get("tokenizer_class") == "TokenizersBackend":
            saved["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(saved.get("extra_special_tokens"), list):
            saved["additional_special_tokens"] = saved.pop("extra_special_tokens")
        return saved

    _rewrite(folder / "tokenizer_config.json", renamed)


def _older_names(model: PreTrainedModel, saved: dict[str, Any]) -> dict[str, Any]:
    """Returns settings under the names of transformers 4, which transformers 5 drops: without them
    transformers 4 silently takes its defaults. The names are those of the model's own config.json;
    for rotary embeddings those that transformers 5 reads as the same `rope_parameters`."""
    config, own = model.config, getattr(model, OWN_SETTINGS, {})
    dropped = {name: value for name, value in own.items() if name not in saved}
    older = {name: getattr(config, name) for name in dropped if name in config.attribute_map}
    if "dtype" in saved:
        older["torch_dtype"] = saved["dtype"]
    settings = config.to_dict()
    rope = settings.pop("rope_parameters", None)
    rotary = {name: value for name, value in dropped.items() if "rope" in name or "rotary" in name}
    for names in (rotary, _rotary_names(rope or {})):
        reloaded = type(config).from_dict(copy.deepcopy(settings | names)).to_dict()
        if reloaded.get("rope_parameters") == rope:
            return older | names
    return older


def _rotary_names(rope: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` that all layers share, under the names of transformers 4."""
    top_level = {
        name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope
    }
    scaling = {name: value for name, value in rope.items() if name not in top_level}
    return top_level | {"rope_scaling": None if rope.get("rope_type") == "default" else scaling}


def _rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    changed = change(json.loads(file.read_text(encoding="utf-8")))
    text = json.dumps(changed, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(f"{text}\n", encoding="utf-8")


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The adapters in a folder of peft's format, by their names in the model, in float32."""
    tensors = load_file(folder / "adapter_model.safetensors")
    return {_name_in_model(name): tensor.float() for name, tensor in tensors.items()}


def _name_in_model(name: str) -> str:
    layer, _, kind = name.removeprefix("base_model.model.").rpartition(".lora_")
    return f"{layer}.lora_{kind[0]}.{ADAPTER}.weight"


def adapted_policy(recipe: Recipe, checkpoint: Path) -> PreTrainedModel:
    """Load the recipe's model with the adapters of a checkpoint, not merged, on the CPU. Raises
    ModelError if the base model is not the one that the run began with."""
    policy = load_policy(recipe.model, recipe.run.seed, recipe.sampling.fp32_head)
    refuse_other_base(recipe.model, read_state(checkpoint).base, base_digest(policy))
    LoraAdapters.attach(policy, recipe.model.lora, recipe.run.seed)
    adapters = pushed_weights(policy)
    with torch.no_grad():
        for name, tensor in read_adapter(checkpoint / ADAPTER_FOLDER).items():
            adapters[name].copy_(tensor)
    return policy.eval()


def adapted_tensors(recipe: Recipe, checkpoint: Path) -> NamedTensors:
    """Returns the tensors of a push that gives the sampler the adapters of a checkpoint."""
    policy = adapted_policy(recipe, checkpoint)
    if recipe.pushes_adapters:
        return pushed_weights(policy).items()
    return full_tensors(policy, 2**29)


class PlainPolicy:
    """The policy of a checkpoint on the CPU; without a checkpoint, the initial model."""

    def __init__(self, recipe: Recipe, checkpoint: Path | None) -> None:
        if checkpoint is not None and (checkpoint / ADAPTER_FOLDER).is_dir():
            self._model = adapted_policy(recipe, checkpoint)
            return
        folder = None if checkpoint is None else checkpoint / MODEL_FOLDER
        section = recipe.model if folder is None else section_at(recipe.model, str(folder))
        self._model = load_policy(section, recipe.run.seed, recipe.sampling.fp32_head)

    @torch.no_grad()
    def logprobs(
        self, prompt_token_ids: np.ndarray, completion_token_ids: np.ndarray, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute log-probs and entropies of a completion's tokens, float64 [T], in nats, by plain
        transformers: an independent check of the engine."""
        completion = len(completion_token_ids)
        ids = np.concatenate([prompt_token_ids, completion_token_ids]).astype(np.int64)
        inputs, targets = torch.from_numpy(ids)[None], torch.from_numpy(ids[-completion:])
        logits_TV = self._model(input_ids=inputs, logits_to_keep=completion + 1).logits[0, :-1]
        target_logprobs, entropies = [], []
        for chunk_TV, targets_T in zip(
            logits_TV.split(_CHUNK_TOKENS), targets.split(_CHUNK_TOKENS), strict=True
        ):
            logprobs_TV = torch.log_softmax(chunk_TV.double() / temperature, dim=-1)
            target_logprobs.append(logprobs_TV.gather(1, targets_T[:, None])[:, 0])
            entropies.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1))
        return torch.cat(target_logprobs).numpy(), torch.cat(entropies).numpy()
