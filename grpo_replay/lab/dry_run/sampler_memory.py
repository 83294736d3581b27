"""Memory of a sampler on the device of one rank, in bytes: vLLM's and that of transformers."""

from dataclasses import dataclass

from grpo_replay.lab.dry_run.memory import ModelShape
from grpo_replay.storage.stored_sizes import FP32, GIB

VLLM_GRAPHS = int(1.0 * GIB)
"""vLLM's CUDA graphs (assumed; logs show 0.5 GiB for an 8B model and 1.6 GiB for 27B)."""
VLLM_BUFFERS = int(0.5 * GIB)
"""Other vLLM memory outside its own allocator, and its profile run (assumed)."""
PINNED_ROUNDING = 1.5
"""Pinned host memory per byte of weights: torch rounds every block up to a power of two. Computed
from the sizes of vLLM's fused tensors: 1.34 for Qwen3-4B, 1.40 for 1.7B and 1.63 for 0.6B."""

HF_CACHE_ROOM, HF_CACHE_GROWTH = 512, 256
"""Completion tokens that fit the first cache of the `hf` sampler, and its minimum growth:
`sampling.decoding.INITIAL_CAPACITY` and `sampling.kv_cache.GROWTH_TOKENS`."""


@dataclass(frozen=True, slots=True)
class SamplerMemory:
    """Bytes that a sampler adds to the device of one rank, while generating (`awake`) and while
    training (`asleep`), and the capacity of its KV cache in tokens (None: no fixed limit). `host`
    is the host memory that holds its weights while it sleeps after an evaluation."""

    awake: int
    asleep: int
    cache_tokens: int | None
    host: int = 0


def vllm_memory(
    shape: ModelShape, dtype_bytes: int, capacity: int, share: float, tensor_parallel: int,
    sleeps: bool, graphs: bool = True,
) -> SamplerMemory:  # fmt: skip
    """vLLM takes `share` of the device; the rest after weights, counters and overhead is KV cache.

    `cache_tokens` is 0 or less if the weights do not fit. A sleeping vLLM keeps what is outside its
    own allocator: CUDA graphs and buffers.
    """
    awake = int(share * capacity)
    overhead = VLLM_BUFFERS + (VLLM_GRAPHS if graphs else 0)
    weights = dtype_bytes * shape.parameters // tensor_parallel + _vllm_counters(shape, capacity)
    per_token = dtype_bytes * shape.kv_elements_per_token // tensor_parallel
    tokens = (awake - weights - overhead) // per_token
    if not sleeps:
        return SamplerMemory(awake, awake, int(tokens))
    return SamplerMemory(awake, overhead, int(tokens), host=int(PINNED_ROUNDING * weights))


def _vllm_counters(shape: ModelShape, capacity: int) -> int:
    """Token counts of repetition penalties, which the V2 runner always allocates with the weights:
    4 bytes and one bit per vocabulary entry for each of 1,024 requests, or 256 below 70 GiB
    (vLLM 0.32, v1/worker/gpu/sample/penalties.py)."""
    requests = 1024 if capacity >= 70 * GIB else 256
    return requests * (4 * shape.vocabulary + 4 * -(-shape.vocabulary // 32))


def hf_memory(
    shape: ModelShape, dtype_bytes: int, rows: int, prompt_tokens: int, completion_tokens: int,
    on_cuda: bool = False,
) -> SamplerMemory:  # fmt: skip
    """A second copy of the weights, the KV cache of `rows` rows of maximum length, and two fp32
    copies of the logits of one decoding step.

    A GPU allocates all of the cache's buffers; on a CPU only pages that are written count. While a
    cache grows, the keys or values of one layer exist twice.
    """
    weights = dtype_bytes * shape.parameters
    capacity, before = hf_cache_tokens(prompt_tokens, completion_tokens)
    if not on_cuda:
        capacity = prompt_tokens + completion_tokens
    per_token = dtype_bytes * shape.kv_elements_per_token * rows
    cache = per_token * capacity + per_token * before // (2 * shape.layers)
    logits = 2 * FP32 * rows * shape.vocabulary
    return SamplerMemory(weights + cache + logits, weights, None)


def hf_cache_tokens(prompt_tokens: int, completion_tokens: int) -> tuple[int, int]:
    """Tokens that a row of the decoder's cache has room for when the longest completion ends, and
    had before it last grew; 0 if it never grew (`sampling.kv_cache.RowLayer`)."""
    capacity, before = prompt_tokens + min(completion_tokens, HF_CACHE_ROOM), 0
    while capacity < prompt_tokens + completion_tokens:
        length = capacity + 1
        capacity, before = length + max(HF_CACHE_GROWTH, length // 2), capacity
    return capacity, before
