"""Whole tensors of a model that DeepSpeed may have sharded, with LoRA adapters merged."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_replay.engine.lora import ADAPTER, is_adapter
from grpo_replay.engine.weight_names import named_weights

NamedTensor = tuple[str, torch.Tensor]
BASE_LAYER = ".base_layer."
"""In the name of a weight that peft has put adapters on."""


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """A weight and the tensors it is made of: itself, or W, A and B to be merged."""

    name: str
    tensors: tuple[torch.Tensor, ...]
    scaling: float = 0.0

    def whole(self) -> torch.Tensor:
        """The weight, in its own precision; merged in fp32."""
        weight, *adapters = (tensor.detach() for tensor in self.tensors)
        if not adapters:
            return weight
        a, b = (each.float() for each in adapters)
        return torch.addmm(weight.float(), b, a, alpha=self.scaling).to(weight.dtype)


def full_tensors(model: nn.Module, bucket_bytes: int) -> Iterator[NamedTensor]:
    """`named_weights` of the model in full, without adapters: these are merged into the weight that
    they belong to. Under ZeRO-3 one bucket at a time is gathered, by all ranks together, so every
    rank must exhaust the iterator."""
    return _gathered_weights(_weights(model), bucket_bytes)


def full_adapters(model: nn.Module, bucket_bytes: int) -> Iterator[NamedTensor]:
    """The adapters alone, likewise, by their names in the model."""
    named = model.named_parameters()
    weights = [_Weight(name, (tensor,)) for name, tensor in named if is_adapter(name)]
    return _gathered_weights(weights, bucket_bytes)


def _weights(model: nn.Module) -> Iterator[_Weight]:
    for name, tensor in named_weights(model):
        if is_adapter(name):
            continue
        place, separator, kind = name.rpartition(BASE_LAYER)
        if separator and kind == "weight":
            layer: Any = model.get_submodule(place)
            adapters = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            yield _Weight(f"{place}.weight", (tensor, *adapters), layer.scaling[ADAPTER])
        else:
            yield _Weight(name.replace(BASE_LAYER, "."), (tensor,))


def _gathered_weights(weights: Iterable[_Weight], bucket_bytes: int) -> Iterator[NamedTensor]:
    for bucket in _buckets(weights, bucket_bytes):
        with _gathered(tensor for weight in bucket for tensor in weight.tensors):
            for weight in bucket:
                yield weight.name, weight.whole()


def _buckets(weights: Iterable[_Weight], bucket_bytes: int) -> Iterator[list[_Weight]]:
    bucket: list[_Weight] = []
    size = 0
    for weight in weights:
        bytes_needed = sum(
            getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()
            for tensor in weight.tensors
        )
        if bucket and size + bytes_needed > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += bytes_needed
    if bucket:
        yield bucket


def _gathered(tensors: Iterable[torch.Tensor]) -> Any:
    """A context in which the ZeRO-3 parameters among the tensors are gathered."""
    sharded = {id(tensor): tensor for tensor in tensors if hasattr(tensor, "ds_id")}
    if not sharded:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(sharded.values()))
