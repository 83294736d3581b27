"""Plans memory: the hardware of a run, whether engine and sampler fit on the device of one rank,
and with which overrides they would.

`memory` has the arithmetic, `trace` measures activations and the sizes of the model.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo_replay.errors import RecipeError
from grpo_replay.lab.dry_run.memory import (
    EngineMemory,
    EngineSetting,
    ModelShape,
    SamplerMemory,
    engine_memory,
    hf_memory,
    vllm_memory,
)
from grpo_replay.lab.dry_run.rows import Row, Section
from grpo_replay.recipe import (
    EngineSection,
    ModelSection,
    Recipe,
    SamplingSection,
    parse_overrides,
    resolve_recipe,
)
from grpo_replay.recipe.recipe import GpuSizes
from grpo_replay.training.disk_room import GIB, CheckpointSize, checkpoint_size, to_gib

if TYPE_CHECKING:
    from grpo_replay.evaluation.benchmarks import EvaluationPlan

ENGINE_PARTS = {
    "base": "process, CUDA context",
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer shard (master weights, moments)",
    "reference": "reference copy",
    "gathered": "gathered parameters (ZeRO-3)",
    "bucket": "gradient bucket",
    "activations": "activations kept for the backward pass",
    "backward_work": "logits chunk and backward work",
    "flat_copy": "flat gradients (ZeRO-0)",
    "step_work": "while the optimizer steps",
}

DEFAULT_GPU_GIB = 80.0
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LORA_RANK = 16
LORA_RATE = 10
"""Rank of the adapters that are advised, and the factor from the learning rate of full training."""
FREE_SHARE = 0.05
"""Share of the memory that a run should leave free. A run that leaves less is "tight":
fragmentation, or a GPU with less memory than its nominal size, may use up the rest."""

PUBLISHED = {
    f"qwen/qwen3-{size}{suffix}": f"builtin:qwen3-{size}"
    for size in ("0.6b", "1.7b", "4b")
    for suffix in ("", "-base")
} | {"qwen/qwen2.5-7b": "builtin:qwen2.5-7b"}
"""Hub ids whose sizes are known without a download."""
CHAT_POSITIONS = 40_960
"""Positions of Qwen3's chat models. The shipped configurations are those of the base models, which
have 32,768 and otherwise the same sizes."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The nodes of a run, and the device of one rank.

    `ranks` counts the ranks of every node; `capacity` is a rank's device memory in bytes.
    `elsewhere`: the run will use other GPUs than this machine's, whose size is stated or assumed.
    `gpu` is the name of the GPU, if known.
    """

    device: str
    ranks: tuple[int, ...]
    capacity: int
    elsewhere: bool = False
    gpu: str | None = None

    @property
    def total_ranks(self) -> int:
        return sum(self.ranks)

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def section(self) -> Section:
        """Returns the rows of the hardware."""
        return Section("hardware", "Hardware", [
            Row("gpu", "GPU", self.gpu),
            Row("device", "device", self.device),
            Row("nodes", "nodes", len(self.ranks)),
            Row("processes", "processes", self.total_ranks),
            Row("memory_gib_per_process", "memory of a process, GiB", to_gib(self.capacity)),
            Row("assumed", "assumed", self.elsewhere),
        ])  # fmt: skip


def find_machines(
    device: str, ranks: Sequence[int], gpu_memory_gib: float | None = None
) -> Machines:
    """Returns the machines to plan for: with the recipe's `device`, where `auto` means GPUs if this
    machine has one or `gpu_memory_gib` is given. `ranks` counts the ranks of every node.

    With `gpu_memory_gib`, or without a GPU here, GPUs elsewhere are assumed, of that size or of
    `DEFAULT_GPU_GIB`. Otherwise the smallest GPU of this machine counts. The capacity of a CPU rank
    is an equal share of this machine's memory.
    """
    import torch

    gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not gpus and gpu_memory_gib is None):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Machines("cpu", tuple(ranks), memory // max(ranks))
    if gpu_memory_gib is not None or not gpus:
        size = DEFAULT_GPU_GIB if gpu_memory_gib is None else gpu_memory_gib
        return Machines("cuda", tuple(ranks), int(size * GIB), elsewhere=True)
    smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus))
    return Machines("cuda", tuple(ranks), smallest, gpu=torch.cuda.get_device_name(0))


def with_known_model(model: ModelSection) -> ModelSection:
    """Replaces a Qwen id of `PUBLISHED` by the configuration of the same sizes in this package, so
    that a dry run downloads nothing; a chat model of Qwen3 also gets its number of positions.
    Another section is returned as it is (the same object)."""
    name = model.path.lower()
    shipped = PUBLISHED.get(name)
    if shipped is None:
        return model
    values = model.model_dump() | {"path": shipped}
    if name.startswith("qwen/qwen3-") and not name.endswith("-base"):
        overrides = {"max_position_embeddings": CHAT_POSITIONS, **model.config_overrides}
        values["random_init"] = overrides
    return ModelSection(**values)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of the engine and the sampler on one rank."""

    shape: ModelShape
    setting: EngineSetting
    model_length: int  # tokens of prompt plus completion that the sampler has room for
    engine: EngineMemory
    sampler: SamplerMemory
    capacity: int

    def phases(self) -> dict[str, int]:
        """Bytes on the device of one rank in each phase of a step."""
        return {
            "generation": self.engine.at_rest + self.sampler.awake,
            "forward_backward": self.engine.backward_peak + self.sampler.asleep,
            "optimizer_step": self.engine.step_peak + self.sampler.asleep,
        }

    @property
    def peak(self) -> int:
        return max(self.phases().values())

    @property
    def fits(self) -> bool:
        """Whether every phase fits, and vLLM's cache holds one longest rollout."""
        tokens = self.sampler.cache_tokens
        if tokens is not None and tokens < self.model_length:
            return False  # vLLM refuses to start
        return self.peak <= self.capacity

    @property
    def tight(self) -> bool:
        """Whether it fits with less than `FREE_SHARE` left."""
        return self.fits and self.capacity - self.peak < FREE_SHARE * self.capacity

    def push_bytes(self, adapters: bool) -> int:
        """Returns the bytes of one push to the sampler: LoRA's `adapters` alone, or all weights,
        where a tied head is sent in addition to the embeddings."""
        shape = self.shape
        tied = shape.vocabulary * shape.hidden if shape.tied_head else 0
        return self.setting.dtype_bytes * (shape.adapters if adapters else shape.parameters + tied)

    @property
    def checkpoint_size(self) -> CheckpointSize:
        shape, setting = self.shape, self.setting
        return checkpoint_size(
            shape.parameters, setting.dtype_bytes, setting.zero_stage, shape.adapters
        )

    @property
    def peak_phase(self) -> str:
        phases = self.phases()
        return max(phases, key=lambda name: phases[name])

    @property
    def peak_text(self) -> str:
        """Peak and capacity in words."""
        sizes = f"{self.peak / GIB:.1f} of {self.capacity / GIB:.1f} GiB"
        return f"{sizes} at the peak ({self.peak_phase.replace('_', ' ')})"

    @property
    def longest_rollouts_at_once(self) -> int | None:
        """Sequences of `model_length` that vLLM's cache has room for; None if it has no limit."""
        tokens = self.sampler.cache_tokens
        return None if tokens is None else max(0, tokens) // self.model_length


def memory_sections(recipe: Recipe, plan: MemoryPlan | None) -> list[Section]:
    """Returns a plan's sections: model, memory, sampler; without rows if there is no plan."""
    if plan is None:
        return [Section("model", ""), Section("memory", ""), Section("sampler", "")]
    shape, model, sampler = plan.shape, recipe.model, plan.sampler
    engine = asdict(plan.engine)
    return [
        Section("model", "Model", [
            Row("path", "model", model.path),
            Row("parameters", "parameters", shape.parameters),
            Row("adapter_parameters", "parameters of LoRA's adapters", shape.adapters),
            Row("tied_head", "tied head", shape.tied_head),
            Row("dtype", "precision", model.dtype),
        ]),
        Section("memory", "Memory of a process, GiB", [
            *(Row(f"{key}_gib", label, to_gib(engine[key])) for key, label in ENGINE_PARTS.items()),
            Row("sampler_awake_gib", "sampler, while generating", to_gib(sampler.awake)),
            Row("sampler_asleep_gib", "sampler, while training", to_gib(sampler.asleep)),
            *(Row(f"{key}_gib", f"in all: {key.replace('_', ' ')}", to_gib(size))
              for key, size in plan.phases().items()),
            Row("peak_phase", "", plan.peak_phase),
            Row("peak_gib", "", to_gib(plan.peak)),
            Row("capacity_gib", "", to_gib(plan.capacity)),
            Row("fits", "", plan.fits),
            Row("tight", "", plan.tight),
        ]),
        Section("sampler", "Sampler", [
            Row("backend", "backend", recipe.sampling.backend),
            Row("kv_cache_tokens", "tokens in vLLM's KV cache, per engine", sampler.cache_tokens),
            Row("model_length_tokens", "tokens of the longest sequence", plan.model_length),
            Row("longest_rollouts_at_once", "of these at once, per engine",
                plan.longest_rollouts_at_once),
        ]),
    ]  # fmt: skip


def plan_memory(
    recipe: Recipe, machines: Machines, evaluation: "EvaluationPlan | None" = None
) -> MemoryPlan:
    """Plans the memory of engine and sampler on one rank, for the largest micro-batch: as many of
    the longest rollouts as `batch.max_tokens_per_microbatch` allows, at least one, cut at the
    model's positions. `evaluation` is what an evaluation samples, if known.

    Raises ModelError if the configuration cannot be read or the model cannot be traced, RecipeError
    if the recipe asks vLLM for longer sequences than the model has positions.
    """
    from grpo_replay.engine.models import load_config
    from grpo_replay.lab.dry_run import trace
    from grpo_replay.sampling.sampler_protocol import model_length

    known = recipe.model_copy(update={"model": with_known_model(recipe.model)})
    config = load_config(known.model)
    shape = trace.model_shape(config, known.model.lora)
    sizes = GpuSizes(machines.capacity, shape.parameters + shape.adapters, shape.trained)
    limits = known.sampling, known.model, known.longest_sequence
    prompt, completion = known.prompts.max_prompt_length, known.sampling.max_completion_length
    longest = min(prompt + completion, shape.max_positions or prompt + completion)
    batch = trace.Microbatch(
        rows=max(1, known.batch.max_tokens_per_microbatch // longest),
        length=longest,
        completion=min(completion, longest - 1),
        chunk_tokens=known.logprob_chunk_tokens(shape.vocabulary, machines.on_cuda),
        temperature=known.sampling.temperature,
    )
    stage = known.zero_stage(machines.total_ranks, sizes if machines.on_cuda else None)
    setting = _engine_setting(known.engine, stage, known.model, known.loss.beta > 0, machines)
    forward = trace.forward_memory(known.model, config, batch, machines.on_cuda)
    if known.compiles(stage, machines.on_cuda) and not known.model.gradient_checkpointing:
        forward = forward.compiled()
    sampled_shape = shape if known.pushes_adapters else replace(shape, adapters=0)
    sampler = plan_sampler(
        known.sampling, prompt, DTYPE_BYTES[known.sampled_dtype], sampled_shape, machines,
        evaluation,
    )  # fmt: skip
    return MemoryPlan(
        shape, setting, model_length(*limits, config),
        engine_memory(shape, forward, setting), sampler, machines.capacity,
    )  # fmt: skip


def _engine_setting(
    engine: EngineSection, stage: int, model: ModelSection, has_reference: bool, machines: Machines
) -> EngineSetting:
    """Collects what decides the engine's memory; with LoRA the reference is the base."""
    return EngineSetting(
        zero_stage=stage,
        ranks=machines.total_ranks,
        dtype_bytes=DTYPE_BYTES[model.dtype],
        on_cuda=machines.on_cuda,
        bucket_elements=engine.zero.reduce_bucket_size,
        live_elements=engine.zero.stage3_max_live_parameters,
        offload_optimizer=engine.offload_optimizer,
        offload_parameters=engine.offload_parameters,
        reference_copy=has_reference and model.lora.r is None,
    )


def plan_sampler(
    sampling: SamplingSection, prompt: int, dtype_bytes: int, shape: ModelShape, machines: Machines,
    evaluation: "EvaluationPlan | None" = None,
) -> SamplerMemory:  # fmt: skip
    """Plans the sampler's memory on one rank. `prompt` is a step's longest prompt, in tokens.

    Servers take none (they have GPUs of their own); vLLM takes its share, on a CPU the weights and
    VLLM_CPU_KVCACHE_SPACE; our own takes what a step or an evaluation needs, whichever is more.
    """
    vllm = sampling.vllm
    if sampling.facts.on_servers:
        return SamplerMemory(0, 0, None)  # on machines or GPUs of its own
    if sampling.facts.fills_memory and machines.on_cuda:
        return vllm_memory(
            shape, dtype_bytes, machines.capacity, vllm.gpu_memory_utilization,
            vllm.tensor_parallel_size, vllm.enable_sleep_mode, graphs=not vllm.enforce_eager,
        )  # fmt: skip
    if sampling.facts.fills_memory:
        cache = GIB * int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
        constant = dtype_bytes * shape.parameters + cache  # vLLM does not sleep on a CPU
        tokens = cache // (dtype_bytes * shape.kv_elements_per_token)
        return SamplerMemory(constant, constant, tokens)
    loads = [(sampling.rollouts_per_step, prompt, sampling.max_completion_length)]
    if evaluation is not None:
        longest = evaluation.document["max_completion_length"]
        loads.append((len(evaluation.samples), evaluation.longest_prompt, longest))
    candidates = (
        hf_memory(
            shape, dtype_bytes,
            min(-(-rollouts // machines.total_ranks), sampling.max_batch_rollouts),
            prompt_tokens, completion_tokens, machines.on_cuda,
        )
        for rollouts, prompt_tokens, completion_tokens in loads
    )  # fmt: skip
    return max(candidates, key=lambda memory: memory.awake)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Overrides (as for `--set`) that save memory, and the memory plan with them."""

    overrides: Sequence[str]
    plan: MemoryPlan

    def to_json(self) -> dict[str, Any]:
        peak = to_gib(self.plan.peak)
        return {"set": list(self.overrides), "peak_gib": peak, "fits": self.plan.fits}


def alternatives(
    recipe: Recipe, machines: Machines, evaluation: "EvaluationPlan | None" = None
) -> Iterator[Alternative]:
    """Plans the run anew, one at a time, with each change that saves memory and that the recipe
    does not have yet: the smallest micro-batch, LoRA, an offloaded optimizer. Yields the plans
    whether they fit or not; a change that contradicts another setting is skipped."""
    model, longest = recipe.model, recipe.longest_rollout
    changes: list[list[str]] = []
    if recipe.batch.max_tokens_per_microbatch > longest:
        changes.append([f"batch.max_tokens_per_microbatch={longest}"])
    if model.lora.r is None:
        rate = f"optimizer.learning_rate={LORA_RATE * recipe.optimizer.learning_rate:g}"
        changes.append([f"model.lora.r={LORA_RANK}", rate])
    if machines.on_cuda and not recipe.engine.offload_optimizer and model.lora.r is None:
        changes.append(["engine.zero_stage=3", "engine.offload=optimizer"])
    settings = recipe.model_dump(mode="json")
    for overrides in changes:
        with suppress(RecipeError):
            changed = resolve_recipe([settings, parse_overrides(overrides)])
            yield Alternative(overrides, plan_memory(changed, machines, evaluation))
