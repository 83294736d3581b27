"""Weights by their Hugging Face names: the names of a complete set, the check that a sync delivers
all of them, gathering from a model that DeepSpeed has sharded, and LoRA.

A sampler that misses a tensor keeps its old one without an error: after a push without the tied
output head, the mean gap was 0.2 nats. So names, shapes and precision of what arrives are compared
with the model's configuration before a new policy version is used.

LoRA (Hu et al., arXiv 2106.09685) with peft: trained adapters on a frozen base. The adapters of a
linear layer W are A [r, in] and B [out, r]; the layer computes x·Wᵀ + (α/r)·x·Aᵀ·Bᵀ. B starts at
zero, so that the policy starts as the base. Samplers get A and B as the engine has them
(`full_adapters`); where they do not take these, and in files for others, the merged weight
W + (α/r)·B·A (`full_tensors`), under the name that it has in the base. The output head has no
adapters: `policy_module.LogprobHead` owns its weight and never calls it.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_replay.engine.models import DTYPES, load_config
from grpo_replay.errors import RecipeError, SamplerError, did_you_mean
from grpo_replay.recipe import LoraSection, ModelSection
from grpo_replay.types import NamedTensors

ADAPTER = "default"
"""peft's name of the only set of adapters; part of their parameters' names."""

MISSING_PEFT = "model.lora needs peft, which is not installed: pip install 'grpo-replay[lora]'"


class LoraAdapters:
    """The LoRA adapters on a model's layers, which are changed in place."""

    def __init__(self, wrapped: Any) -> None:
        """`wrapped` is peft's model around the policy."""
        from peft.tuners.lora import LoraLayer

        self._wrapped, self.config = wrapped, wrapped.peft_config[ADAPTER]
        self.parameters = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
        self._layers = [layer for layer in wrapped.modules() if isinstance(layer, LoraLayer)]

    @classmethod
    def attach(cls, model: PreTrainedModel, settings: LoraSection, seed: int) -> "LoraAdapters":
        """Freeze a model and put adapters on its linear layers. A is a function of `seed`; the
        global random state does not change.

        Raises RecipeError if peft is not installed, for a target that the model does not have, and
        for settings that a pair of A and B on an unchanged base cannot express.
        """
        try:
            from peft import get_peft_model
        except ImportError as error:
            raise RecipeError(MISSING_PEFT) from error
        config = lora_config(settings, lora_targets(model, settings.target_modules))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # The engine decides the precision: DeepSpeed holds fp32 master weights of bf16 ones.
            with refused_as("model.lora"):
                wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
        _refuse_other_adapters(model)
        return cls(wrapped)

    def set_dropout(self, active: bool) -> None:
        """Switch dropout on or off. It is for updates alone: log-probs are the pushed policy's."""
        for layer in self._layers:
            layer.lora_dropout.train(active)

    @contextmanager
    def dropout(self, seed: int, device: torch.device) -> Iterator[None]:
        """A context in which dropout is active, with masks that are a function of `seed`; the
        global random state is restored afterwards."""
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            self.set_dropout(True)
            try:
                yield
            finally:
                self.set_dropout(False)

    @contextmanager
    def without(self) -> Iterator[None]:
        """A context in which the model computes like the base. All modules run nevertheless,
        because ZeRO-3 needs the same order of modules each time."""
        scalings = [dict(layer.scaling) for layer in self._layers]
        try:
            for layer in self._layers:
                layer.scaling[ADAPTER] = 0.0
            yield
        finally:
            for layer, scaling in zip(self._layers, scalings, strict=True):
                layer.scaling.update(scaling)

    def save(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write adapters in peft's format, from their full tensors by name in the model."""
        state = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        self._wrapped.save_pretrained(folder, state_dict=state, save_embedding_layers=False)


@contextmanager
def refused_as(section: str) -> Iterator[None]:
    """Turns a library's error about its settings into a RecipeError that names the section."""
    try:
        yield
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise RecipeError(f"{section}: {'; '.join(problems)}; correct or remove it") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecipeError(f"{section}: {error}; correct or remove it") from error


def lora_config(settings: LoraSection, targets: Sequence[str] | None) -> Any:
    """Make peft's configuration for the layers `targets`. Raises RecipeError if peft refuses it."""
    from peft import LoraConfig

    with refused_as("model.lora"):
        return LoraConfig(
            **{**settings.model_dump(), "target_modules": targets, "task_type": "CAUSAL_LM"}
        )


def _refuse_other_adapters(model: nn.Module) -> None:
    """Raises RecipeError for trainable parameters other than A and B of a linear layer (DoRA's
    magnitudes, biases), and for adapters that change the base at the start (PiSSA, OLoRA)."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_adapter(name):
            raise RecipeError(
                f"model.lora: its settings train {name}; samplers and checkpoints get A and B of "
                "linear layers alone: remove use_dora, bias, lora_bias or the setting that asks "
                "for it"
            )
        if f".lora_B.{ADAPTER}." in name and not parameter.is_meta and parameter.any():
            raise RecipeError(
                f"model.lora.init_lora_weights: {name} does not begin at zero, so that the first "
                "policy would not be the base; remove it, or set it to true or gaussian"
            )


def is_adapter(name: str) -> bool:
    """Returns whether a parameter of this name belongs to an adapter."""
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name


def lora_targets(model: PreTrainedModel, targets: Sequence[str] | None) -> list[str]:
    """Return the names, without their parents (`q_proj`), of the linear layers that get adapters:
    `targets`, or if None all but the output head. Raises RecipeError for an unknown target."""
    head = model.get_output_embeddings()
    available = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    for target in targets or ():
        if target not in available:
            raise RecipeError(
                f"model.lora.target_modules: {target!r} is no linear layer of the model that can "
                f"have adapters{did_you_mean(target, available)}; there are: "
                f"{', '.join(sorted(available))}"
            )
    return sorted(available if targets is None else set(targets))


def parameter_counts(model: ModelSection) -> tuple[int, int] | None:
    """Count the parameters of the model and of its LoRA adapters (0 without LoRA), from its
    configuration alone. None for a model that cannot be built without its weights."""
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(load_config(model), trust_remote_code=False)
    except (RuntimeError, ValueError, LookupError, AttributeError, TypeError, ImportError):
        return None
    model_parameters = sum(parameter.numel() for parameter in empty.parameters())
    if model.lora.r is None:
        return model_parameters, 0
    layers = adapted_layers(empty, model.lora.target_modules).values()
    return model_parameters, sum(
        model.lora.r * (layer.in_features + layer.out_features) for layer in layers
    )


def adapted_layers(model: PreTrainedModel, targets: Sequence[str] | None) -> dict[str, nn.Linear]:
    """Return the linear layers that get adapters, by their full names."""
    last_names, head = lora_targets(model, targets), model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
        and name.rpartition(".")[2] in last_names
    }  # fmt: skip


MOST_PROBLEMS = 8
"""Problems named in one message; a wrong model has hundreds."""


@dataclass(frozen=True)
class ExpectedWeights:
    """Shapes and dtype of a policy's parameters, under all names, and persistent buffers."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    """Precision of the policy. Tensors may come in it or in float32, never in less."""

    @property
    def bytes_needed(self) -> int:
        """Bytes of a complete set in the policy's precision; a tied tensor counts for each name."""
        return sum(prod(shape) for shape in self.shapes.values()) * self.dtype.itemsize


def expected_weights(model: ModelSection) -> ExpectedWeights:
    """Returns the tensors of a complete set of weights, from the model's configuration alone."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            load_config(model), trust_remote_code=model.trust_remote_code
        )
    return weights_of(empty, DTYPES[model.dtype])


def expected_adapters(model: ModelSection) -> tuple[ExpectedWeights, Any]:
    """Return the shapes and dtype of a complete set of adapters, from the model's configuration
    alone, and peft's configuration of them. Raises RecipeError."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            load_config(model), trust_remote_code=model.trust_remote_code
        )
        config = LoraAdapters.attach(empty, model.lora, seed=0).config
    return weights_of(empty, DTYPES[model.dtype]), config


def write_adapters(folder: Path, named_tensors: NamedTensors, config: Any) -> None:
    """Write adapters, by their names in the model, into an empty folder in peft's format."""
    state = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor.detach().cpu().contiguous()
        for name, tensor in named_tensors
    }
    save_file(state, folder / "adapter_model.safetensors")
    config.save_pretrained(folder)


def weights_of(model: nn.Module, dtype: torch.dtype) -> ExpectedWeights:
    """Returns the tensors of a complete push (`pushed_weights`) of a model that is not sharded."""
    shapes = {name: tuple(tensor.shape) for name, tensor in pushed_weights(model).items()}
    return ExpectedWeights(shapes, dtype)


def pushed_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors of a model that a push replaces: its adapters if it has any, else all."""
    named = dict(named_weights(model))
    return {name: tensor for name, tensor in named.items() if is_adapter(name)} or named


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map the further names of tied tensors to their first name."""
    firsts: dict[int, str] = {}
    names = {name: firsts.setdefault(id(tensor), name) for name, tensor in named_weights(model)}
    return {name: first for name, first in names.items() if name != first}


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a complete set of a model's weights: its parameters under all of their names, and its
    persistent buffers. `named_parameters()` alone yields a tied tensor once."""
    yield from model.named_parameters(remove_duplicate=False)
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


class CheckedWeights:
    """Yields the tensors that are as expected, and collects `problems` of the others.

    Iterating raises only what the source raises. `drain` exhausts the source, so that no rank
    leaves a collective gather early; after it `problems` also names the missing tensors.
    """

    def __init__(self, named_tensors: NamedTensors, expected: ExpectedWeights) -> None:
        self.problems: list[str] = []
        self._source = iter(named_tensors)
        self._expected = expected
        self._seen: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the good tensors of the source; bad ones are noted and skipped."""
        for name, tensor in self._source:
            problem = self._problem(name, tensor)
            self._seen.add(name)
            if problem:
                self.problems.append(problem)
            else:
                yield name, tensor

    def drain(self) -> None:
        """Exhaust the source; missing tensors are then problems."""
        for _ in self:
            pass
        missing = [name for name in self._expected.shapes if name not in self._seen]
        self.problems.extend(f"missing tensor {name}" for name in missing)
        self._seen.update(missing)

    def _problem(self, name: str, tensor: torch.Tensor) -> str | None:
        """Describes a tensor that is unknown, repeated, of another shape or of lower precision."""
        expected = self._expected
        shape = expected.shapes.get(name)
        if shape is None:
            return f"unknown tensor {name}"
        if name in self._seen:
            return f"{name} arrived twice"
        if tuple(tensor.shape) != shape:
            return f"{name} has shape {list(tensor.shape)}, expected {list(shape)}"
        if tensor.is_floating_point() and tensor.dtype not in (expected.dtype, torch.float32):
            return f"{name} is {_short(tensor.dtype)}, the policy is {_short(expected.dtype)}"
        return None


def refuse_problems(problems: Sequence[str], version: int) -> None:
    """Raises SamplerError if there are problems: names the first ones and counts the rest."""
    if not problems:
        return
    named = "; ".join(problems[:MOST_PROBLEMS])
    rest = len(problems) - MOST_PROBLEMS
    more = f"; and {rest} more" if rest > 0 else ""
    raise SamplerError(f"weights of version {version} cannot be sampled with: {named}{more}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


NamedTensor = tuple[str, torch.Tensor]
BASE_LAYER = ".base_layer."
"""Part of the name of a weight that peft has put adapters on."""


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """A weight and its tensors: itself alone, or W, A and B to be merged."""

    name: str
    tensors: tuple[torch.Tensor, ...]
    scaling: float = 0.0

    def whole(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the weight, in its own precision or `dtype`; adapters are merged in fp32."""
        weight, *adapters = (tensor.detach() for tensor in self.tensors)
        if not adapters:
            return weight.to(dtype) if dtype and weight.is_floating_point() else weight
        a, b = (tensor.float() for tensor in adapters)
        merged = torch.addmm(weight.float(), b, a, alpha=self.scaling)
        return merged.to(dtype or weight.dtype)


def full_tensors(
    model: nn.Module, bucket_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[NamedTensor]:
    """Returns the full tensors of `named_weights`, in their own precision or `dtype`, with adapters
    merged into their weights. Under ZeRO-3 all ranks gather one bucket at a time together, so every
    rank must exhaust the iterator."""
    return _gathered_weights(_merged_weights(model), bucket_bytes, dtype)


def full_adapters(model: nn.Module, bucket_bytes: int) -> Iterator[NamedTensor]:
    """The full tensors of the adapters alone, gathered likewise, by their names in the model."""
    named = model.named_parameters()
    weights = [_Weight(name, (tensor,)) for name, tensor in named if is_adapter(name)]
    return _gathered_weights(weights, bucket_bytes)


def _merged_weights(model: nn.Module) -> Iterator[_Weight]:
    """Yields a model's weights under the names that they have without LoRA; a weight with adapters
    comes with its A and B, to be merged once they are gathered."""
    for name, tensor in named_weights(model):
        if is_adapter(name):
            continue
        layer_name, separator, kind = name.rpartition(BASE_LAYER)
        if separator and kind == "weight":
            layer: Any = model.get_submodule(layer_name)
            adapters = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            yield _Weight(f"{layer_name}.weight", (tensor, *adapters), layer.scaling[ADAPTER])
        else:
            yield _Weight(name.replace(BASE_LAYER, "."), (tensor,))


def _gathered_weights(
    weights: Iterable[_Weight], bucket_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[NamedTensor]:
    for bucket in _buckets(weights, bucket_bytes):
        with _gathered(tensor for weight in bucket for tensor in weight.tensors):
            for weight in bucket:
                yield weight.name, weight.whole(dtype)


def _buckets(weights: Iterable[_Weight], bucket_bytes: int) -> Iterator[list[_Weight]]:
    """Split the weights, in order, into lists of at most `bucket_bytes` of whole tensors (ZeRO-3
    has the size of a sharded one as `ds_numel`). A larger weight is alone."""
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
    """Returns a context in which ZeRO-3 parameters are whole on every rank. Collective."""
    sharded = {id(tensor): tensor for tensor in tensors if hasattr(tensor, "ds_id")}
    if not sharded:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(sharded.values()))
