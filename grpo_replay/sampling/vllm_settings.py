"""vLLM's settings for a recipe, shared by in-process engines and launched servers."""

from collections.abc import MutableMapping
from typing import Any

from grpo_replay.engine.models import load_config, resolve_model_path
from grpo_replay.engine.sequence_length import model_length
from grpo_replay.errors import ModelError
from grpo_replay.recipe import ModelSection, Recipe

CPU_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Binding threads to cores would also bind those of the trainer in the same process.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Defaults of vLLM's environment variables on a machine without a GPU."""


def set_environment(environment: MutableMapping[str, str], on_gpu: bool) -> None:
    """Set the variables that vLLM reads, except those that the user has set."""
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not on_gpu:
        for name, value in CPU_VARIABLES.items():
            environment.setdefault(name, value)


def log_through_root(environment: MutableMapping[str, str]) -> None:
    """Before vLLM is imported in this process: it would log to stdout, which is for results."""
    environment.setdefault("VLLM_CONFIGURE_LOGGING", "0")


def engine_arguments(recipe: Recipe, section: ModelSection, on_gpu: bool) -> dict[str, Any]:
    """Keywords of vLLM's EngineArgs, or the command line options of the same names for a server.

    No tokenizer is loaded: requests and completions are token ids, and stop tokens are sent with
    each request. The model's generation_config.json is ignored (vLLM would add its stop tokens).
    Raises ModelError for a random initialisation, because vLLM reads weights from files, and for a
    model whose log-probs vLLM computes otherwise than transformers.
    """
    if section.random_init:
        raise ModelError(
            f"model.path {section.path!r} with model.random_init: vLLM reads weights from files; "
            "write the initial model to a folder and sample from that"
        )
    length = model_length(recipe, section)
    _refuse_wider_window(section, length)
    vllm = recipe.sampling.vllm
    arguments: dict[str, Any] = {
        "model": resolve_model_path(section.path),
        "revision": section.revision,
        "trust_remote_code": section.trust_remote_code,
        "dtype": section.dtype if vllm.dtype == "auto" else vllm.dtype,
        "max_model_len": length,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "async_scheduling": vllm.async_scheduling,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "tensor_parallel_size": vllm.tensor_parallel_size,
        # On a CPU, compiling takes longer than a small run. On a GPU, CUDA graphs are worth it.
        "enforce_eager": vllm.enforce_eager or not on_gpu,
    }
    if on_gpu:
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    else:
        # vLLM 0.32 rewinds the generator of a seeded request after a part of a prompt; that of a
        # CPU cannot be rewound, and the engine dies ("CPU Generator does not use offset").
        arguments["enable_chunked_prefill"] = False
    return arguments


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
