"""Whole tensors of a model that DeepSpeed may have sharded."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from grpo_replay.engine.weight_names import named_weights

NamedTensor = tuple[str, torch.Tensor]


def full_tensors(model: nn.Module, bucket_bytes: int) -> Iterator[NamedTensor]:
    """`named_weights` of the model in full. Under ZeRO-3 one bucket at a time is gathered, by all
    ranks together, so every rank must exhaust the iterator."""
    for bucket in _buckets(list(named_weights(model)), bucket_bytes):
        with _gathered(tensor for _, tensor in bucket):
            for name, tensor in bucket:
                yield name, tensor.detach()


def _buckets(named: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in named:
        numel = getattr(tensor, "ds_numel", tensor.numel())
        bytes_needed = numel * tensor.element_size()
        if bucket and size + bytes_needed > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
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
