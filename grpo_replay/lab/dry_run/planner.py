"""The machines of a planned run, whether engine and sampler fit on the device of one rank, and with
which overrides they would.

`memory` has the arithmetic, `trace` measures activations and the sizes of the model.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from grpo_replay.recipe import (
    EngineSection,
    ModelSection,
    Recipe,
    SamplingSection,
    parse_overrides,
    resolve_recipe,
)
from grpo_replay.training.disk_room import GIB, CheckpointSize, checkpoint_size, to_gib

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_GPU_GIB = 80.0
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LORA_RANK = 16
LORA_RATE = 10
"""Rank of the adapters that are advised, and how many times the learning rate of all parameters."""
FEW_ROLLOUTS = 64
"""Of a batch of the `hf` sampler, that is advised."""
SHARES = [round(0.05 * twentieths, 2) for twentieths in range(2, 19)]
"""Shares of a GPU for vLLM that are tried."""

ROOM = 0.05
"""Share of the memory that advice leaves free. A plan that leaves less fits, but tightly: memory in
pieces, or a GPU that shows less than it is sold with, may use it up."""

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
class Machines:
    """The nodes of a run, and the device of one rank.

    `ranks` has those of each node, `gpus` the GPUs that a node has for ranks (None on a CPU).
    `capacity` is in bytes. `elsewhere`: the run will not use the GPUs of this machine, whose size
    is then stated or assumed. `gpu` is the name of the GPU, if known.
    """

    device: str
    ranks: tuple[int, ...]
    capacity: int
    gpus: int | None = None
    elsewhere: bool = False
    gpu: str | None = None

    @property
    def total_ranks(self) -> int:
        return sum(self.ranks)

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def with_ranks(self, ranks: int) -> "Machines":
        """The same nodes with so many ranks on each."""
        return replace(self, ranks=(ranks,) * len(self.ranks))

    def describe(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "nodes": len(self.ranks),
            "processes": self.total_ranks,
            "memory_gib_per_process": to_gib(self.capacity),
            "assumed": self.elsewhere,
            "gpu": self.gpu,
        }


def find_machines(
    device: str,
    ranks: Sequence[int],
    server_gpus: int = 0,
    gpu_memory_gib: float | None = None,
) -> Machines:
    """The machines to plan for: those with the `device` of the recipe, or with `auto` GPUs if this
    machine has one or `gpu_memory_gib` is given. `server_gpus` of a node are taken by vLLM servers.

    Without a GPU here, or with `gpu_memory_gib`, as many GPUs as the recipe uses are assumed. The
    capacity of a CPU rank is an equal share of this machine's memory.
    """
    import torch

    found = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not found and gpu_memory_gib is None):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Machines("cpu", tuple(ranks), memory // max(ranks))
    if gpu_memory_gib is not None or not found:
        size = DEFAULT_GPU_GIB if gpu_memory_gib is None else gpu_memory_gib
        return Machines("cuda", tuple(ranks), int(size * GIB), max(ranks), elsewhere=True)
    smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(found))
    name = torch.cuda.get_device_name(0)
    return Machines("cuda", tuple(ranks), smallest, max(0, found - server_gpus), gpu=name)


def with_known_model(model: ModelSection) -> ModelSection:
    """The section, with a published Qwen id replaced by its shipped configuration."""
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
        """Whether it fits with less than `ROOM` left."""
        return self.fits and self.capacity - self.peak < ROOM * self.capacity

    def push_bytes(self, adapters: bool) -> int:
        """Of an update of the sampler's weights, a tied head included, or of its adapters."""
        shape = self.shape
        tied = shape.vocabulary * shape.hidden if shape.tied_head else 0
        return self.setting.dtype_bytes * (shape.adapters if adapters else shape.parameters + tied)

    @property
    def checkpoint_size(self) -> CheckpointSize:
        shape, setting = self.shape, self.setting
        return checkpoint_size(
            shape.parameters, setting.dtype_bytes, setting.zero_stage, shape.adapters
        )

    def describe(self) -> dict[str, Any]:
        phases = self.phases()
        parts = {f"{name}_gib": to_gib(value) for name, value in self.engine.to_json().items()}
        return {
            **parts,
            "sampler_awake_gib": to_gib(self.sampler.awake),
            "sampler_asleep_gib": to_gib(self.sampler.asleep),
            "phases_gib": {name: to_gib(value) for name, value in phases.items()},
            "peak_phase": max(phases, key=lambda name: phases[name]),
            "peak_gib": to_gib(self.peak),
            "capacity_gib": to_gib(self.capacity),
            "fits": self.fits,
            "tight": self.tight,
        }


def known_config(model: ModelSection) -> "PreTrainedConfig":
    """The configuration of a model, without a download if it is a published one.

    Raises ModelError if it cannot be read."""
    from grpo_replay.engine.models import load_config

    return load_config(with_known_model(model))


@dataclass(frozen=True, slots=True)
class Generation:
    """Rollouts that a sampler is asked for at once, and their longest, in tokens."""

    rollouts: int
    prompt_tokens: int
    completion_tokens: int


def plan_memory(
    recipe: Recipe,
    machines: Machines,
    config: "PreTrainedConfig | None" = None,
    evaluation: Generation | None = None,
) -> MemoryPlan:
    """The engine and sampler in memory, for the largest micro-batch that the budget allows and the
    positions of the model have room for. `config` is the `known_config` of the recipe's model, if
    it was read already; `evaluation` is what an evaluation samples, if it is known.

    Raises ModelError if the configuration cannot be read or the model not be traced, RecipeError if
    vLLM is to have room for more than the positions.
    """
    from grpo_replay.lab.dry_run import trace
    from grpo_replay.sampling.sampler_protocol import model_length

    known = recipe.model_copy(update={"model": with_known_model(recipe.model)})
    config = config or known_config(recipe.model)
    shape = trace.model_shape(config, known.model.lora)
    if machines.on_cuda:
        counts = shape.parameters + shape.adapters, shape.trained
        known = known.on_gpus(machines.total_ranks, machines.capacity, *counts)
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
    stage = known.zero_stage(machines.total_ranks)
    setting = _engine_setting(known.engine, stage, known.model, known.loss.beta > 0, machines)
    forward = trace.forward_memory(known.model, config, batch, machines.on_cuda)
    if known.compiles(stage, machines.on_cuda) and not known.model.gradient_checkpointing:
        forward = forward.compiled()
    held = shape if known.pushes_adapters else replace(shape, adapters=0)
    sampler = plan_sampler(
        known.sampling, prompt, DTYPE_BYTES[known.sampled_dtype], held, machines, evaluation
    )
    return MemoryPlan(
        shape, setting, model_length(*limits, config),
        engine_memory(shape, forward, setting), sampler, machines.capacity,
    )  # fmt: skip


def _engine_setting(
    engine: EngineSection, stage: int, model: ModelSection, has_reference: bool, machines: Machines
) -> EngineSetting:
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
    evaluation: Generation | None = None,
) -> SamplerMemory:  # fmt: skip
    """What the sampler takes of the device of a rank, in a step or in an evaluation; `prompt` is
    the longest of a step, in tokens."""
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
        held = dtype_bytes * shape.parameters + cache  # nothing sleeps on a CPU
        return SamplerMemory(held, held, cache // (dtype_bytes * shape.kv_elements_per_token))
    step = Generation(sampling.rollouts_per_step, prompt, sampling.max_completion_length)
    most = (
        hf_memory(
            shape, dtype_bytes,
            min(-(-each.rollouts // machines.total_ranks), sampling.max_batch_rollouts),
            each.prompt_tokens, each.completion_tokens, machines.on_cuda,
        )
        for each in (step, evaluation)
        if each is not None
    )  # fmt: skip
    return max(most, key=lambda each: each.awake)


@dataclass(frozen=True, slots=True)
class Advice:
    """Overrides with which the run fits."""

    overrides: tuple[str, ...]
    plan: MemoryPlan

    def describe(self) -> dict[str, Any]:
        return {"set": list(self.overrides), "peak_gib": to_gib(self.plan.peak)}


def advise(
    recipe: Recipe, machines: Machines, evaluation: Generation | None = None
) -> Advice | None:
    """The first of `remedies` with which the recipe fits with `ROOM` to spare, if it helps with
    another share of the GPU for vLLM; None if none does."""
    given, config = recipe.model_dump(mode="json"), known_config(recipe.model)
    for remedy in remedies(recipe, machines):
        for words in _with_other_shares(recipe.sampling, machines, remedy):
            with suppress(RecipeError):  # it contradicts another setting
                tried = resolve_recipe([given, parse_overrides(words)])
                there = machines.with_ranks(tried.engine.num_processes)
                plan = plan_memory(tried, there, config, evaluation)
                if plan.fits and not plan.tight:
                    return Advice(tuple(words), plan)
    return None


def _with_other_shares(
    sampling: SamplingSection, machines: Machines, words: list[str]
) -> Iterator[list[str]]:
    """The overrides as they are, then with other shares of the GPU for vLLM, the nearest first."""
    yield words
    if sampling.facts.fills_memory and machines.on_cuda:
        share = sampling.vllm.gpu_memory_utilization
        for other in sorted(SHARES, key=lambda each: abs(each - share)):
            yield [*words, f"sampling.vllm.gpu_memory_utilization={other}"]


def remedies(recipe: Recipe, machines: Machines) -> Iterator[list[str]]:
    """Overrides that save memory: what only moves memory, what costs time, and then what changes
    the run. Never more GPUs than a node has."""
    model, engine, longest = recipe.model, recipe.engine, recipe.longest_rollout
    if machines.gpus and max(machines.ranks) != machines.gpus:
        yield [f"engine.num_processes={machines.gpus}"]
    yield []  # another share for vLLM alone
    sampling = recipe.sampling
    if not sampling.facts.reads_vllm_settings and sampling.max_batch_rollouts > FEW_ROLLOUTS:
        yield [f"sampling.max_batch_rollouts={FEW_ROLLOUTS}"]
    if not model.gradient_checkpointing:
        yield ["model.gradient_checkpointing=true"]
    if recipe.batch.max_tokens_per_microbatch > longest:
        yield [f"batch.max_tokens_per_microbatch={longest}"]
    if recipe.engine.zero_stage != 3 and machines.total_ranks > 1:
        yield ["engine.zero_stage=3"]
    if model.dtype == "float32":
        yield ["model.dtype=bfloat16"]
    if model.lora.r is None and recipe.loss.beta == 0:
        rate = f"optimizer.learning_rate={LORA_RATE * recipe.optimizer.learning_rate:g}"
        yield [f"model.lora.r={LORA_RANK}", rate]
    if machines.on_cuda and not engine.offload_optimizer and model.lora.r is None:
        yield ["engine.zero_stage=3", "engine.offload=optimizer"]
