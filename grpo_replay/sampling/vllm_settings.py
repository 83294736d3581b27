"""vLLM's settings for a recipe: one table, for engines in this process and for launched servers."""

from collections.abc import MutableMapping
from typing import Any

from grpo_replay.engine.models import resolve_model_path
from grpo_replay.engine.sequence_length import model_length
from grpo_replay.errors import ModelError
from grpo_replay.recipe import ModelSection, Recipe

CPU_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Bound threads would hold the trainer's, which runs in the same process, to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""What vLLM needs to know on a machine without a GPU; what the user has set stays."""


def set_environment(environment: MutableMapping[str, str], on_gpu: bool) -> None:
    """Say what vLLM reads from the environment, except what is said already."""
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not on_gpu:
        for name, value in CPU_VARIABLES.items():
            environment.setdefault(name, value)


def engine_arguments(recipe: Recipe, section: ModelSection, on_gpu: bool) -> dict[str, Any]:
    """Keywords of vLLM's EngineArgs; for a server, the command line options of the same names.

    No tokenizer is loaded: token ids go in and come out, and stop tokens travel with requests; the
    model's generation_config.json decides nothing (vLLM would add its stop tokens).
    Raises ModelError for a random initialisation, which no file holds.
    """
    if section.random_init:
        raise ModelError(
            f"model.path {section.path!r} with model.random_init: vLLM reads weights from files; "
            "write the initial model to a folder and sample from that"
        )
    vllm = recipe.sampling.vllm
    arguments: dict[str, Any] = {
        "model": resolve_model_path(section.path),
        "revision": section.revision,
        "trust_remote_code": section.trust_remote_code,
        "dtype": section.dtype if vllm.dtype == "auto" else vllm.dtype,
        "max_model_len": model_length(recipe, section),
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "async_scheduling": vllm.async_scheduling,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "tensor_parallel_size": vllm.tensor_parallel_size,
        # Compiling a model for a CPU takes longer than a small run; on GPUs graphs pay.
        "enforce_eager": vllm.enforce_eager or not on_gpu,
    }
    if on_gpu:
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    return arguments
