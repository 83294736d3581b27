"""Computes memory of engine and sampler per rank, in bytes, from the sizes of model and recipe.

Activations are not computed here but measured by `lab.dry_run.trace`, which also gives the sizes of
the model (`ModelShape`). The terms of the engine are those of DeepSpeed 0.19, checked against
benchmarks/memory.py. With P parameters, N ranks and b bytes per element of the model's dtype:

    ZeRO                      0 fp32   0 bf16       1            2            3
    parameters                P·4      P·2          P·b          P·b          P·b/N
    gradients at the update   P·4      P·(2 + 4)    P·b          2·P·b/N      2·P·b/N
    master weights            -        P·4          P·4/N        P·4/N        P·4/N
    Adam's moments            P·8      P·8          P·8/N        P·8/N        P·8/N

From ZeRO-2 on, the gradient shard of a micro-batch exists in addition to the accumulated one.
ZeRO-3 holds the accumulated shard permanently, and in bf16 both until the end of the step. While
the optimizer steps over its shard, it also needs a flat fp32 gradient (4 bytes per element);
AdamW, fused, has no temporaries.

With LoRA, the first line is of base and adapters, and P in the others counts the adapters alone. A
sampler that takes adapters has a base and adapters too, and keeps the base while it sleeps.
"""

from dataclasses import dataclass
from typing import NamedTuple

from grpo_replay.training.disk_room import FP32, GIB, MOMENTS

CUDA_CONTEXT = int(1.0 * GIB)
"""CUDA context, cuBLAS workspace and NCCL's buffers of one process (assumed, not measured)."""
PROCESS = int(0.41 * GIB)
"""A CPU rank with a negligible model: Python, torch, transformers, DeepSpeed (measured)."""
PROCESS_ZERO = int(0.455 * GIB)
"""The same with ZeRO 1 to 3, whose optimizers load more (measured)."""

COMPILED_SHARE = 0.64
"""Of what layers save for the backward pass, the share that they save when compiled: torch computes
the rest again (measured on an H200, the same for Qwen3's shapes of 0.6B and 1.7B)."""

VLLM_GRAPHS = int(1.0 * GIB)
"""vLLM's CUDA graphs (assumed; logs show 0.5 GiB for an 8B model and 1.6 GiB for 27B)."""
VLLM_BUFFERS = int(0.5 * GIB)
"""Other vLLM memory outside its own allocator, and its profile run (assumed)."""


class ForwardMemory(NamedTuple):
    """Bytes of activations of one micro-batch, as measured by `lab.dry_run.trace`: `saved` by the
    backbone for the backward pass, and the `peak` over forward and backward."""

    saved: int
    peak: int

    def compiled(self) -> "ForwardMemory":
        """Returns the same for compiled layers, which save `COMPILED_SHARE` as much."""
        saved = int(COMPILED_SHARE * self.saved)
        return ForwardMemory(saved, self.peak - self.saved + saved)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, in elements. `parameters` counts tied weights once; `kv_elements_per_token`
    is over all layers; `attention_width` is heads · head_dim. `adapters` are the parameters of
    LoRA, which are in none of these; 0 if all parameters train."""

    parameters: int
    tied_head: bool
    layers: int
    hidden: int
    vocabulary: int
    kv_elements_per_token: int
    attention_width: int
    max_positions: int | None
    adapters: int = 0

    @property
    def trained(self) -> int:
        return self.adapters or self.parameters


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """Settings that decide the engine's memory. `bucket_elements` and `live_elements` are
    DeepSpeed's reduce_bucket_size and stage3_max_live_parameters."""

    zero_stage: int
    ranks: int
    dtype_bytes: int
    on_cuda: bool
    bucket_elements: int
    live_elements: int
    offload_optimizer: bool = False
    offload_parameters: bool = False
    reference_copy: bool = False


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on the device of one rank. `gradients`, `bucket` and `gathered` exist in the backward
    pass, `flat_copy` after it, `step_work` in the optimizer step. `host` is for offloading."""

    parameters: int
    gradients: int
    optimizer: int
    reference: int
    bucket: int
    flat_copy: int
    gathered: int
    activations: int
    backward_work: int
    step_work: int
    base: int
    host: int

    @property
    def at_rest(self) -> int:
        """Bytes between updates, and while the sampler generates."""
        return self.base + self.parameters + self.optimizer + self.reference

    @property
    def backward_peak(self) -> int:
        """Bytes in the backward pass, or when gradients are flattened after it if that is more."""
        during = self.bucket + self.gathered + self.activations + self.backward_work
        return self.at_rest + self.gradients + max(during, self.flat_copy)

    @property
    def step_peak(self) -> int:
        return self.at_rest + self.step_work

    @property
    def peak(self) -> int:
        return max(self.backward_peak, self.step_peak)


def engine_memory(
    shape: ModelShape, forward: ForwardMemory, setting: EngineSetting
) -> EngineMemory:
    """Computes the engine's memory on one rank by the table at the top of this module.

    `owned` are the parameters whose optimizer state is on this rank: a shard from ZeRO-1 on.
    Offloading the optimizer moves its state and its step to host memory, and leaves the gradients
    on the device; offloading parameters moves these.
    """
    count, size, stage = shape.parameters + shape.adapters, setting.dtype_bytes, setting.zero_stage
    trained = shape.trained
    shard = -(-trained // setting.ranks)
    owned = shard if stage >= 1 else trained
    low_precision = size < FP32
    parameters = size * (-(-count // setting.ranks) if stage == 3 else count)
    master_weights = FP32 * owned if stage >= 1 or low_precision else 0
    optimizer = master_weights + MOMENTS * owned
    gradients = size * (trained if stage <= 1 else 2 * shard)
    if stage == 0 and low_precision:
        gradients += FP32 * trained
    host = 0
    step_work = _step_work(shape, setting, owned, gradients)
    if setting.offload_optimizer:
        host, optimizer, step_work = optimizer + step_work, 0, gradients
    if setting.offload_parameters:
        host, parameters = host + parameters, 0
    permanent_gradients = 0  # counted with the optimizer, for they exist at rest too
    if stage == 3 and not setting.offload_optimizer:
        permanent_gradients = size * shard
    return EngineMemory(
        parameters=parameters,
        gradients=gradients - permanent_gradients,
        optimizer=optimizer + permanent_gradients,
        reference=size * shape.parameters if setting.reference_copy else 0,
        bucket=_bucket(trained, setting),
        flat_copy=_flat_copy(trained, setting),
        gathered=size * min(count, setting.live_elements) if stage == 3 else 0,
        activations=forward.saved,
        backward_work=forward.peak - forward.saved,
        step_work=step_work,
        base=_base(setting),
        host=host,
    )


def _base(setting: EngineSetting) -> int:
    if setting.on_cuda:
        return CUDA_CONTEXT
    return PROCESS_ZERO if setting.zero_stage > 0 else PROCESS


def _bucket(count: int, setting: EngineSetting) -> int:
    """Returns the buffer that reduces gradients: on a GPU all of it, on a CPU its written pages."""
    if setting.zero_stage == 0:
        return 0
    elements = setting.bucket_elements
    return setting.dtype_bytes * (elements if setting.on_cuda else min(count, elements))


def _flat_copy(count: int, setting: EngineSetting) -> int:
    """Returns the bytes of the flat gradients that fp32 ZeRO-0 on several ranks reduces, a bucket
    at a time; 0 elsewhere. The fp32 copies of bf16 gradients are counted in `gradients`."""
    if setting.zero_stage > 0 or setting.dtype_bytes < FP32 or setting.ranks == 1:
        return 0
    return FP32 * min(count, setting.bucket_elements)


def _step_work(shape: ModelShape, setting: EngineSetting, owned: int, gradients: int) -> int:
    """Returns the bytes that exist, beyond those at rest, while the optimizer steps over its
    `owned` parameters: a flat fp32 gradient, with ZeRO-3 also the bucket and in bf16 a gradient
    shard. ZeRO-0 has the `gradients` themselves."""
    if setting.zero_stage == 0:
        return gradients
    kept = 0
    if setting.zero_stage == 3:
        kept = _bucket(shape.trained, setting)
        if setting.dtype_bytes < FP32:
            kept += setting.dtype_bytes * owned
    return kept + FP32 * owned


@dataclass(frozen=True, slots=True)
class SamplerMemory:
    """Bytes that a sampler adds to the device of one rank, while generating (`awake`) and while
    training (`asleep`), and the capacity of its KV cache in tokens (None: no fixed limit)."""

    awake: int
    asleep: int
    cache_tokens: int | None


def vllm_memory(
    shape: ModelShape, dtype_bytes: int, capacity: int, share: float, tensor_parallel: int,
    sleeps: bool, graphs: bool = True,
) -> SamplerMemory:  # fmt: skip
    """Computes the memory of vLLM in a rank's process: it takes `share` of the device, and what
    weights, counters and overhead leave of that is KV cache.

    `cache_tokens` is 0 or less if the weights do not fit. A vLLM that sleeps keeps what is outside
    its own allocator, CUDA graphs and buffers; one that cannot sleep keeps all.
    """
    awake = int(share * capacity)
    overhead = VLLM_BUFFERS + (VLLM_GRAPHS if graphs else 0)
    elements = shape.parameters + shape.adapters
    weights = dtype_bytes * elements // tensor_parallel + _vllm_counters(shape, capacity)
    per_token = dtype_bytes * shape.kv_elements_per_token // tensor_parallel
    tokens = (awake - weights - overhead) // per_token
    return SamplerMemory(awake, overhead if sleeps else awake, int(tokens))


def _vllm_counters(shape: ModelShape, capacity: int) -> int:
    """Returns the bytes of vLLM's token counts for repetition penalties, which its V2 runner always
    allocates: 4 bytes and one bit per vocabulary entry and request, for 1,024 requests, or 256 on a
    GPU below 70 GiB (vLLM 0.32, v1/worker/gpu/sample/penalties.py)."""
    requests = 1024 if capacity >= 70 * GIB else 256
    return requests * (4 * shape.vocabulary + 4 * -(-shape.vocabulary // 32))


def hf_memory(
    shape: ModelShape, dtype_bytes: int, rows: int, prompt_tokens: int, completion_tokens: int,
    on_cuda: bool = False,
) -> SamplerMemory:  # fmt: skip
    """Computes the memory of our transformers sampler: a second copy of the weights (which stays
    while it sleeps), the KV cache of `rows` rows of maximum length, and two fp32 copies of the
    logits of one decoding step.

    A GPU allocates all of the cache's buffers; on a CPU only pages that are written count. While a
    cache grows, the keys or values of one layer exist twice. With grouped queries the keys and
    values of a layer are repeated for all heads (attention with a mask, in transformers).
    """
    weights = dtype_bytes * (shape.parameters + shape.adapters)
    capacity, previous_capacity = hf_cache_tokens(prompt_tokens, completion_tokens)
    longest = prompt_tokens + completion_tokens
    if not on_cuda:
        capacity = longest
    per_token = dtype_bytes * shape.kv_elements_per_token * rows
    growing = per_token * previous_capacity // (2 * shape.layers)
    cache = per_token * capacity + growing
    repeated = 2 * shape.attention_width
    if repeated * shape.layers > shape.kv_elements_per_token:
        cache += dtype_bytes * rows * longest * repeated
    logits = 2 * FP32 * rows * shape.vocabulary
    return SamplerMemory(weights + cache + logits, weights, None)


def hf_cache_tokens(prompt_tokens: int, completion_tokens: int) -> tuple[int, int]:
    """Returns the capacity in tokens per row of the decoder's KV cache when the longest completion
    ends, and its capacity before it last grew (0 if it never grew), by the growth rule of
    `sampling.decode_modes.RowLayer`."""
    from grpo_replay.sampling.decode_modes import GROWTH_TOKENS
    from grpo_replay.sampling.decoding import INITIAL_CAPACITY

    capacity, previous = prompt_tokens + min(completion_tokens, INITIAL_CAPACITY), 0
    while capacity < prompt_tokens + completion_tokens:
        length = capacity + 1
        capacity, previous = length + max(GROWTH_TOKENS, length // 2), capacity
    return capacity, previous
