"""Measures the activations of forward and backward by tracing the model on the meta device.

The sizes are exact; nothing is allocated or computed. LoRA's adapters are traced without peft, as
layers that compute and save what peft's do.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_replay.engine.models import DTYPES
from grpo_replay.engine.policy_module import PolicyModule, find_body, find_head
from grpo_replay.engine.weights import adapted_layers
from grpo_replay.errors import ModelError, first_line
from grpo_replay.lab.dry_run.memory import ForwardMemory, ModelShape
from grpo_replay.recipe import LoraSection, ModelSection
from grpo_replay.terminal.quiet import quiet_libraries

# Names with "flash" in them make transformers look for that package.
_FUSED, _EAGER = "grpo_replay_fused_memory", "grpo_replay_eager_memory"
_TRACED_LAYERS = (2, 4)
_OWN_ERRORS = (RuntimeError, ValueError, LookupError, AttributeError, TypeError)
"""What transformers and torch raise for a model that the meta device cannot run."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of meta tensors that are created while it is active: those alive `now`, and
    the `peak`. A storage shared by several tensors counts once, until it is garbage collected."""

    def __init__(self, model: nn.Module) -> None:
        """Parameters and buffers of `model` are not counted."""
        super().__init__()
        self.now = 0
        self.peak = 0
        weights = [*model.parameters(), *model.buffers()]
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in weights)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for every operation: runs it and counts its outputs' new
        storages."""
        run = _grouped_mm if func is torch.ops.aten._grouped_mm.default else func
        result = run(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage once, until it is garbage collected."""
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


def _grouped_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Multiplies grouped matrices (MoE) in any dtype; torch's meta device takes bfloat16 only."""
    dtype = args[0].dtype
    converted = [arg.to(torch.bfloat16) if _is_float(arg) else arg for arg in args]
    return torch.ops.aten._grouped_mm.default(*converted, **kwargs).to(dtype)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _FusedAttention(torch.autograd.Function):
    """Attention of the right shapes without computing: saves for the backward pass what a flash
    kernel saves, namely queries, keys, values, output and one fp32 per query."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
        # [rows, heads, tokens, head_dim] in memory as [rows, tokens, heads, head_dim]
        rows, heads, tokens, _ = query.shape
        output = value.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
        log_sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _fused_probe(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    return _FusedAttention.apply(query, key, value).transpose(1, 2).contiguous(), None


def _eager_probe(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Computes transformers' eager attention without its mask, which cannot be built on the meta
    device: the scores of all pairs of tokens exist in memory."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


def model_shape(config: PreTrainedConfig, lora: LoraSection | None = None) -> ModelShape:
    """Returns a model's sizes from its configuration alone; tied parameters count once. Cached.

    Raises ModelError if the model cannot be built or lacks a size."""
    key = (config.to_json_string(use_diff=False), None if lora is None else lora.model_dump_json())
    if key not in _shapes:
        with _untraceable(config):
            _shapes[key] = _model_shape(config, lora)
    return _shapes[key]


_shapes: dict[tuple[str, str | None], ModelShape] = {}


def _model_shape(config: PreTrainedConfig, lora: LoraSection | None) -> ModelShape:
    """Builds the model on the meta device, and counts its parameters before LoRA is attached."""
    model = _meta_model(config, torch.float32, "eager")
    head = find_head(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    adapters = _attach_adapters(model, lora)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return ModelShape(
        parameters=total,
        tied_head=head.weight is model.get_input_embeddings().weight,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        kv_elements_per_token=2 * config.num_hidden_layers * kv_heads * head_dim,
        attention_width=config.num_attention_heads * head_dim,
        max_positions=getattr(config, "max_position_embeddings", None),
        adapters=sum(adapters),
    )


class _AdaptedLinear(nn.Module):
    """A linear layer with LoRA's A and B, as peft's layer computes it."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        dtype = base.weight.dtype
        self.base = base
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.down = nn.Linear(base.in_features, rank, bias=False, device="meta", dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, device="meta", dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))


def _attach_adapters(model: PreTrainedModel, lora: LoraSection | None) -> list[int]:
    """Freezes a model on the meta device and wraps its adapted layers in place. Returns the sizes
    of LoRA's A and B matrices; without LoRA does nothing and returns an empty list."""
    if lora is None or lora.r is None:
        return []
    model.requires_grad_(False)
    for name, layer in adapted_layers(model, lora.target_modules).items():
        parent, _, leaf = name.rpartition(".")
        adapted = _AdaptedLinear(layer, lora.r, lora.lora_dropout)
        setattr(model.get_submodule(parent), leaf, adapted)
    return [p.numel() for p in model.parameters() if p.requires_grad]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A micro-batch to trace: `rows` sequences of `length` tokens. The policy's head computes the
    last `completion` of them, `chunk_tokens` at a time, at `temperature`."""

    rows: int
    length: int
    completion: int
    chunk_tokens: int
    temperature: float = 1.0


def forward_memory(
    section: ModelSection, config: PreTrainedConfig, batch: Microbatch, on_cuda: bool = False
) -> ForwardMemory:
    """Measures the activations of a micro-batch of the model `section` (configuration `config`).

    Two copies of the model with 2 and 4 layers are traced, and the result extrapolated linearly to
    its number of layers. Parameters and their gradients are not included: the engine holds them.
    Cached, because most alternatives of a plan do not change it. Raises ModelError if it fails.
    """
    key = (section.model_dump_json(), config.to_json_string(use_diff=False), batch, on_cuda)
    if key not in _traced:
        with _untraceable(config), quiet_libraries():
            _traced[key] = _forward_memory(section, config, batch, on_cuda)
    return _traced[key]


_traced: dict[tuple[Any, ...], ForwardMemory] = {}


@contextmanager
def _untraceable(config: PreTrainedConfig) -> Iterator[None]:
    """Turns what transformers or torch raise on the meta device into a ModelError."""
    try:
        yield
    except _OWN_ERRORS as error:
        raise ModelError(
            f"a model of type {config.model_type} cannot be traced without its weights: "
            f"{first_line(error)}"
        ) from error


def _forward_memory(
    section: ModelSection, config: PreTrainedConfig, batch: Microbatch, on_cuda: bool
) -> ForwardMemory:
    """Traces two depths and extrapolates; a model of at most two layers is traced as it is."""
    few, more = (min(layers, config.num_hidden_layers) for layers in _TRACED_LAYERS)
    stores_scores = stores_attention_scores(section, config, on_cuda)
    first = trace(section, config, few, batch, stores_scores)
    if few == more:
        return first
    second = trace(section, config, more, batch, stores_scores)
    steps = (config.num_hidden_layers - few) / (more - few)
    return ForwardMemory(*(int(a + (b - a) * steps) for a, b in zip(first, second, strict=True)))


def stores_attention_scores(model: ModelSection, config: PreTrainedConfig, on_cuda: bool) -> bool:
    """Returns whether the trainer's attention stores the score of every pair of tokens: eager does,
    and sdpa on a GPU in float32 with grouped queries, for which torch has no fused kernel."""
    if model.attn_implementation == "eager":
        return True
    heads = getattr(config, "num_attention_heads", None)
    has_grouped_queries = getattr(config, "num_key_value_heads", None) not in (None, heads)
    is_sdpa = model.attn_implementation == "sdpa"
    return is_sdpa and on_cuda and model.dtype == "float32" and has_grouped_queries


def trace(
    section: ModelSection,
    config: PreTrainedConfig,
    layers: int,
    batch: Microbatch,
    stores_scores: bool = False,
) -> ForwardMemory:
    """Measures one forward and backward pass of the policy with `layers` layers on the meta device.
    `saved` is what is alive when the backbone has returned, before the head."""
    attention = _EAGER if stores_scores else _FUSED
    model = _meta_model(_with_layers(config, layers), DTYPES[section.dtype], attention)
    _attach_adapters(model, section.lora)
    if section.gradient_checkpointing:
        # Restoring the random state has no meaning on the meta device.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.train()
    policy = PolicyModule(model, batch.temperature, batch.chunk_tokens)
    saved = 0

    def note_saved_bytes(_module: Any, _inputs: Any, _output: Any) -> None:
        nonlocal saved
        saved = live.now

    find_body(model).register_forward_hook(note_saved_bytes)
    with _gradients_dropped(model), LiveBytes(model) as live:
        ids = torch.zeros(batch.rows, batch.length, dtype=torch.int64, device="meta")
        positions = torch.zeros(batch.rows * batch.completion, dtype=torch.int64, device="meta")
        targets = torch.zeros_like(positions)
        logprobs, _ = policy(ids, positions, targets)
        logprobs.sum().backward()
    return ForwardMemory(saved=saved, peak=live.peak)


@contextmanager
def _gradients_dropped(model: nn.Module) -> Iterator[None]:
    """Within the block, drops the gradient of a parameter once it is complete, so that the peak
    does not include gradients: `memory.py` adds them."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    trained = [p for p in model.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(drop) for p in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    values = {**config.to_dict(), "num_hidden_layers": layers}
    values.pop("layer_types", None)
    return type(config).from_dict(values)


def _meta_model(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Builds a model whose tensors have no memory, with our `attention` probe. The configuration is
    copied, since transformers writes `dtype` into it."""
    ALL_ATTENTION_FUNCTIONS.register(_FUSED, _fused_probe)
    ALL_ATTENTION_FUNCTIONS.register(_EAGER, _eager_probe)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            deepcopy(config), dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
