"""Functions of both vLLM samplers: engine arguments, sampling parameters of requests, and
validation of completions."""

from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np

from grpo_replay.engine.models import load_config, resolve_model_path
from grpo_replay.errors import ModelError, RecipeError, SamplerError
from grpo_replay.recipe import LoraSection, ModelSection, SamplingSection, VllmSection
from grpo_replay.sampling.sampler_protocol import model_length, refuse_impossible
from grpo_replay.types import Completion, GenerationRequest

NO_LOGPROB = -9999.0
"""The value that a vLLM server sends for NaN and minus infinity, which JSON cannot express."""


def sampling_parameters(
    request: GenerationRequest, stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the keywords of vLLM's SamplingParams for a request. Every field that a model's
    generation_config.json could change is set. `logprobs=0` is the sampled token's."""
    return {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p if request.temperature > 0 else 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed,
        "logprobs": 0,
        "stop_token_ids": list(stop_token_ids),
        # Otherwise the stop tokens of generation_config.json would end completions too. With
        # another tokenizer, which the recipe may name, they are ordinary tokens.
        "ignore_eos": True,
        "detokenize": False,
    }


def check_request(request: GenerationRequest, max_model_len: int, vocabulary: int) -> None:
    """Raises RecipeError or SamplerError for a request that vLLM would refuse."""
    limit = f"the sampler's {max_model_len} tokens: raise sampling.vllm.max_model_len, or"
    refuse_impossible(request, vocabulary, max_model_len, limit)


def build_completion(
    request: GenerationRequest,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    versions: tuple[int, int],
    stop_token_ids: Sequence[int],
) -> Completion:
    """Validate vLLM's output and make a completion of it. `versions` are the policy versions that
    sampled the first and the last token. Raises SamplerError for a missing or non-finite log-prob,
    an aborted request, or an end that is neither a stop token nor the maximum length."""
    name = f"completion {tuple(request.key)} of policy version {versions[0]}"
    if len(logprobs) != len(token_ids) or not token_ids:
        raise SamplerError(f"{name}: {len(token_ids)} tokens with {len(logprobs)} log-probs")
    logprobs_T = _checked_logprobs(logprobs, name)
    stopped = finish_reason == "stop" and token_ids[-1] in stop_token_ids
    ended = stopped and len(token_ids) <= request.max_tokens
    truncated = finish_reason == "length" and len(token_ids) == request.max_tokens
    if finish_reason is None or not (ended or truncated):
        raise SamplerError(
            f"{name}: finished by {finish_reason!r} after {len(token_ids)} of at most "
            f"{request.max_tokens} tokens, the last of them {token_ids[-1]} (stop tokens "
            f"{list(stop_token_ids)}): the sampler aborted it"
        )
    return Completion(
        key=request.key,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        sampler_logprobs=logprobs_T,
        finish_reason=finish_reason,
        policy_version=versions[0],
        policy_version_end=versions[1],
    )


def _checked_logprobs(logprobs: Sequence[float], name: str) -> np.ndarray:
    """Returns the log-probs as float32 [T]. Raises SamplerError, which names the completion, for
    one that is not finite, also where a server sends `NO_LOGPROB` for it."""
    logprobs_T = np.asarray(logprobs, dtype=np.float32)
    bad = ~np.isfinite(logprobs_T) | (logprobs_T <= NO_LOGPROB)
    if bad.any():
        raise SamplerError(
            f"{name}: the log-prob of token {bad.argmax()} is not finite; the weights hold NaN "
            "or infinity: take an earlier checkpoint, and look at grad_norm and loss of the steps "
            "before"
        )
    return logprobs_T


CPU_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Binding threads to cores would also bind those of the trainer in the same process.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Defaults of vLLM's environment variables on a machine without a GPU."""


def set_environment(environment: MutableMapping[str, str], on_gpu: bool) -> None:
    """Set variables that vLLM reads, unless the user has set them."""
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not on_gpu:
        for name, value in CPU_VARIABLES.items():
            environment.setdefault(name, value)


def log_through_root(environment: MutableMapping[str, str]) -> None:
    """Stop vLLM from logging to stdout, which is for results. Call before vLLM is imported."""
    environment.setdefault("VLLM_CONFIGURE_LOGGING", "0")


def engine_arguments(
    sampling: SamplingSection,
    section: ModelSection,
    longest: int,
    on_gpu: bool,
    adapters: int = 1,
) -> dict[str, Any]:
    """Return the keywords of vLLM's EngineArgs, which are also the options of a server. `longest`
    is the maximum tokens of a sequence, `adapters` the number of LoRA adapters in memory.

    No tokenizer is loaded: requests and completions are token ids, and stop tokens are sent with
    each request. The model's generation_config.json is ignored (vLLM would add its stop tokens).
    Raises ModelError if vLLM computes other log-probs for the model than transformers, RecipeError
    for adapters that vLLM does not support.
    """
    length = model_length(sampling, section, longest)
    _refuse_wider_window(section, length)
    vllm = sampling.vllm
    dtype = section.dtype if vllm.dtype == "auto" else vllm.dtype
    with_adapters = sampling.takes_adapters(section)
    if with_adapters and on_gpu and dtype == "float32":
        raise RecipeError(
            "model.dtype float32 with model.lora: vLLM's kernels for adapters take bfloat16 on a "
            "GPU: set model.dtype bfloat16, or sampling.lora merged"
        )
    return {
        "model": resolve_model_path(section.path),
        "revision": section.revision,
        "trust_remote_code": section.trust_remote_code,
        "dtype": dtype,
        "max_model_len": length,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "async_scheduling": vllm.async_scheduling,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "tensor_parallel_size": vllm.tensor_parallel_size,
        # On a CPU, compiling takes longer than a small run. On a GPU, CUDA graphs are worth it.
        "enforce_eager": vllm.enforce_eager or not on_gpu,
        **(_lora_arguments(section.lora, adapters) if with_adapters else {}),
        **vllm.extra_settings,
        **_device_arguments(vllm, on_gpu),
    }


ADAPTERS_AT_ONCE = 4
"""Maximum adapter versions among the running requests of one server."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that vLLM 0.32 supports (config/lora.py); other ranks use the next larger one."""


def _lora_arguments(lora: LoraSection, adapters: int) -> dict[str, Any]:
    """Returns vLLM's options for so many adapter versions, with the smallest rank that it supports
    and that holds them. Raises RecipeError for a higher rank."""
    rank = max(lora.r or 0, *lora.extra_settings.get("rank_pattern", {}).values(), 0)
    max_rank = next((supported for supported in LORA_RANKS if supported >= rank), None)
    if max_rank is None:
        raise RecipeError(
            f"model.lora.r {rank}: vLLM takes adapters of rank {LORA_RANKS[-1]} at most: lower it, "
            "or set sampling.lora merged"
        )
    return {
        "enable_lora": True,
        "max_lora_rank": max_rank,
        "max_loras": min(adapters, ADAPTERS_AT_ONCE),
        "max_cpu_loras": adapters,
    }


def _device_arguments(vllm: VllmSection, on_gpu: bool) -> dict[str, Any]:
    if on_gpu:
        return {"gpu_memory_utilization": vllm.gpu_memory_utilization}
    # With chunked prefill, vLLM 0.32 rewinds the generator of a seeded request. A CPU's generator
    # cannot be rewound, and the engine dies ("CPU Generator does not use offset").
    return {"enable_chunked_prefill": False}


def _refuse_wider_window(section: ModelSection, length: int) -> None:
    """Raises ModelError for Cohere 2 with a window shorter than the longest sequence: the windows
    of vLLM 0.32 hold one token more than those of transformers (its `commandr.py`)."""
    config = load_config(section)
    if config.model_type == "cohere2" and config.sliding_window < length:
        raise ModelError(
            f"model.path {section.path!r} of type cohere2: vLLM's sliding windows hold one token "
            f"more than the trainer's {config.sliding_window}, and sequences are of up to {length} "
            "tokens; use sampling.backend hf, or shorter sequences"
        )
