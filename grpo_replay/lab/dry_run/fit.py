"""Whether engine and sampler of a recipe fit on the device of one rank, and what to change if not.

`memory` and `sampler_memory` have the arithmetic, `trace` measures activations and the sizes of the
model.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_replay.errors import RecipeError
from grpo_replay.lab.dry_run.memory import EngineMemory, EngineSetting, ModelShape, engine_memory
from grpo_replay.lab.dry_run.sampler_memory import SamplerMemory, hf_memory, vllm_memory
from grpo_replay.recipe import ModelSection, Recipe, parse_overrides, resolve_recipe
from grpo_replay.storage.stored_sizes import GIB, to_gib

DEFAULT_GPU_GIB = 80.0
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

PUBLISHED = {
    f"qwen/qwen3-{size}{suffix}": f"builtin:qwen3-{size}"
    for size in ("0.6b", "1.7b", "4b")
    for suffix in ("", "-base")
} | {"qwen/qwen2.5-7b": "builtin:qwen2.5-7b"}
"""Hub ids whose sizes are known without a download."""
CHAT_POSITIONS = 40_960
"""Positions of Qwen3's chat models. The shipped configurations are the base models', which have
32,768 and else the same sizes."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The device of one rank. `capacity` is in bytes; `assumed` is true if this machine has no such
    device and a size was assumed."""

    device: str
    processes: int
    capacity: int
    assumed: bool


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Memory of the engine and the sampler on one rank."""

    shape: ModelShape
    model_length: int  # tokens of prompt plus completion that the sampler has room for
    engine: EngineMemory
    sampler: SamplerMemory

    def phases(self) -> dict[str, int]:
        """Bytes on the device of one rank in each phase of a step."""
        return {
            "generation": self.engine.at_rest + self.sampler.awake,
            "forward_backward": self.engine.backward_peak + self.sampler.asleep,
            "optimizer_step": self.engine.step_peak + self.sampler.asleep,
        }


def find_hardware(recipe: Recipe, gpu_memory_gib: float | None) -> Hardware:
    """The device to plan for: that of the recipe, or with `auto` a GPU if this machine has one or
    `gpu_memory_gib` is given.

    The capacity of a CPU rank is an equal share of this machine's memory.
    """
    import torch

    found = torch.cuda.device_count()
    wanted, processes = recipe.engine.device, recipe.engine.num_processes
    if wanted == "cpu" or (wanted == "auto" and not found and gpu_memory_gib is None):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Hardware("cpu", processes, memory // processes, assumed=False)
    if gpu_memory_gib is not None:
        return Hardware("cuda", processes, int(gpu_memory_gib * GIB), assumed=True)
    if found:
        smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(found))
        return Hardware("cuda", processes, smallest, assumed=False)
    return Hardware("cuda", processes, int(DEFAULT_GPU_GIB * GIB), assumed=True)


def with_known_model(recipe: Recipe) -> Recipe:
    """The recipe, with a published Qwen id replaced by its shipped configuration."""
    name = recipe.model.path.lower()
    shipped = PUBLISHED.get(name)
    if shipped is None:
        return recipe
    model = recipe.model.model_dump() | {"path": shipped}
    if name.startswith("qwen/qwen3-") and not name.endswith("-base"):
        overrides = {"max_position_embeddings": CHAT_POSITIONS, **recipe.model.config_overrides}
        model["config_overrides"] = overrides
    return recipe.model_copy(update={"model": ModelSection(**model)})


def plan_engine(recipe: Recipe, on_cuda: bool, capacity: int) -> EnginePlan:
    """The engine and sampler in memory, for the largest micro-batch that the budget allows.

    Raises ModelError if the configuration cannot be read, RecipeError if not even a prompt of one
    token and the longest completion fit in the positions of the model.
    """
    from grpo_replay.engine.models import load_config
    from grpo_replay.engine.sequence_length import check_training_room, model_length
    from grpo_replay.lab.dry_run import trace

    shape = trace.model_shape(load_config(recipe.model), recipe.model.lora)
    check_training_room(recipe, 1)
    prompt, completion = recipe.prompts.max_prompt_length, recipe.sampling.max_completion_length
    longest = min(prompt + completion, shape.max_positions or prompt + completion)
    rows = max(1, recipe.batch.max_tokens_per_microbatch // longest)
    forward = trace.forward_memory(recipe, rows, longest, completion, on_cuda)
    zero = recipe.engine.zero
    setting = EngineSetting(
        zero_stage=recipe.zero_stage(recipe.engine.num_processes),
        ranks=recipe.engine.num_processes,
        dtype_bytes=DTYPE_BYTES[recipe.model.dtype],
        on_cuda=on_cuda,
        bucket_elements=zero.reduce_bucket_size,
        live_elements=zero.max_live_parameters,
        offload_optimizer=recipe.engine.offload_optimizer,
        offload_parameters=recipe.engine.offload_parameters,
        reference_copy=recipe.loss.beta > 0 and recipe.model.lora.rank is None,
    )
    sampler = plan_sampler(recipe, shape, on_cuda, capacity)
    length = model_length(recipe, recipe.model)
    return EnginePlan(shape, length, engine_memory(shape, forward, setting), sampler)


def plan_sampler(recipe: Recipe, shape: ModelShape, on_cuda: bool, capacity: int) -> SamplerMemory:
    sampling, vllm, size = recipe.sampling, recipe.sampling.vllm, DTYPE_BYTES[recipe.sampled_dtype]
    if sampling.backend == "vllm_server":
        return SamplerMemory(0, 0, None)  # on machines or GPUs of its own
    if sampling.backend == "vllm" and on_cuda:
        return vllm_memory(
            shape, size, capacity, vllm.gpu_memory_utilization, vllm.tensor_parallel_size,
            vllm.sleep_mode, graphs=not vllm.enforce_eager,
        )  # fmt: skip
    if sampling.backend == "vllm":
        cache = GIB * int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
        held = size * shape.parameters + cache  # nothing sleeps on a CPU
        return SamplerMemory(held, held, cache // (size * shape.kv_elements_per_token))
    rows = -(-recipe.rollouts_per_step // recipe.engine.num_processes)
    return hf_memory(
        shape, size, min(rows, sampling.max_batch_rollouts),
        recipe.prompts.max_prompt_length, sampling.max_completion_length, on_cuda,
    )  # fmt: skip


def fits_in(plan: EnginePlan, capacity: int) -> bool:
    """Whether every phase fits in `capacity` bytes and vLLM's cache holds one longest rollout."""
    tokens = plan.sampler.cache_tokens
    if tokens is not None and tokens < plan.model_length:
        return False  # vLLM refuses to start
    return max(plan.phases().values()) <= capacity


def first_change(recipe: Recipe, hardware: Hardware) -> dict[str, Any] | None:
    """The first single override of the recipe with which the run fits, or else the most effective
    one."""
    best: tuple[int, dict[str, Any]] | None = None
    for override in candidate_changes(recipe):
        try:
            changed = resolve_recipe([recipe.model_dump(mode="json"), parse_overrides([override])])
            known = with_known_model(changed)
            plan = plan_engine(known, hardware.device == "cuda", hardware.capacity)
        except RecipeError:
            continue  # it contradicts another setting
        peak = max(plan.phases().values())
        fits = fits_in(plan, hardware.capacity)
        answer = {"set": override, "peak_gib": to_gib(peak), "fits": fits}
        if fits:
            return answer
        if best is None or peak < best[0]:
            best = (peak, answer)
    return None if best is None else best[1]


def candidate_changes(recipe: Recipe) -> Iterator[str]:
    """Overrides that save memory, from the cheapest to the most expensive."""
    longest = recipe.prompts.max_prompt_length + recipe.sampling.max_completion_length
    in_process = recipe.sampling.backend == "vllm"
    vllm, engine = recipe.sampling.vllm, recipe.engine
    if in_process and not vllm.sleep_mode:
        yield "sampling.vllm.sleep_mode=true"
    if engine.logprob_chunk_tokens is not None:
        yield "engine.logprob_chunk_tokens=null"
    if not recipe.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    stage = recipe.zero_stage(engine.num_processes)
    if stage < 3 and engine.num_processes > 1:
        yield "engine.zero_stage=3"
    if recipe.batch.max_tokens_per_microbatch > longest:
        yield f"batch.max_tokens_per_microbatch={longest}"
    if recipe.model.dtype == "float32":
        yield "model.dtype=bfloat16"
    if in_process:
        for share in (0.5, 0.4, 0.3, 0.7, 0.8):
            yield f"sampling.vllm.gpu_memory_utilization={share}"
    if stage > 0 and not engine.offload_optimizer and engine.device != "cpu":
        yield "engine.offload_optimizer=true"
    if stage > 0:
        yield f"engine.num_processes={2 * engine.num_processes}"
    yield f"sampling.max_completion_length={recipe.sampling.max_completion_length // 2}"
