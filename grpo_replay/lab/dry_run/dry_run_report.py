"""The report of `train --dry-run`: an estimate of the memory, disk and tokens of a run.

`dry_run` loads the configuration of the model and, if available, tokenizer and prompts. It loads
no weights and starts no ranks. What could not be checked is listed in `unchecked`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_replay.errors import ModelError
from grpo_replay.lab.dry_run.assumptions import Expected, expected_of
from grpo_replay.lab.dry_run.duration import Speed, choose_speed, describe_time
from grpo_replay.lab.dry_run.findings import Findings
from grpo_replay.lab.dry_run.fit import (
    EnginePlan,
    Hardware,
    find_hardware,
    first_change,
    fits_in,
    plan_engine,
    with_known_model,
)
from grpo_replay.lab.dry_run.hub import cache_only_if_unreachable
from grpo_replay.lab.dry_run.memory import ModelShape
from grpo_replay.lab.dry_run.room import check_room
from grpo_replay.lab.dry_run.sizes import (
    describe_asynchrony,
    describe_host_copies,
    describe_network,
    describe_replay,
    describe_step,
    describe_storage,
    server_gpus,
)
from grpo_replay.lab.dry_run.start_checks import check_disk_space, check_parts, lacks_peft
from grpo_replay.recipe import Recipe
from grpo_replay.storage.stored_sizes import to_gib

DEFAULT_OUTPUT = Path("runs")


@dataclass(frozen=True, slots=True)
class DryRunReport:
    """All results of a dry run. Sections hold JSON values; None means unknown."""

    recipe: str
    hardware: dict[str, Any]
    model: dict[str, Any] | None
    memory: dict[str, Any] | None
    sampler: dict[str, Any] | None
    step: dict[str, Any]
    replay: dict[str, Any]
    storage: dict[str, Any]
    time: dict[str, Any]
    network: dict[str, Any] | None
    fits: bool | None
    first_change: dict[str, Any] | None
    findings: Findings = field(default_factory=Findings)

    def to_json(self) -> dict[str, Any]:
        names = [name for name in self.__dataclass_fields__ if name != "findings"]
        document = {name: getattr(self, name) for name in names}
        return {
            **document,
            "problems": self.findings.problems,
            "unchecked": self.findings.unchecked,
            "assumptions": self.findings.assumptions,
        }


@dataclass(frozen=True, slots=True)
class Known:
    """What the user states or a finished run measured; the rest is assumed.

    `measured` holds fields of `Expected`, `speed` that of the run; the stated speeds are completion
    tokens per second of one GPU.
    """

    generated_tokens_per_second: float | None = None
    trained_tokens_per_second: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    speed: Speed | None = None


def dry_run(
    recipe: Recipe,
    gpu_memory_gib: float | None = None,
    output_dir: Path = DEFAULT_OUTPUT,
    known: Known | None = None,
) -> DryRunReport:
    """The report. With `gpu_memory_gib`, assume GPUs of that size. The free disk space is that of
    `output_dir`, which need not exist.

    Raises RecipeError for settings that do not match the configuration of the model.
    """
    with cache_only_if_unreachable():
        return _report(recipe, gpu_memory_gib, output_dir, known or Known())


def _report(
    recipe: Recipe, gpu_memory_gib: float | None, output_dir: Path, facts: Known
) -> DryRunReport:
    findings = Findings()
    hardware = find_hardware(recipe, gpu_memory_gib)
    prompts = check_parts(recipe, hardware.device, findings)
    check_room(recipe, prompts, findings)
    known = with_known_model(recipe)
    plan = _plan(recipe, known, hardware, findings)
    expected = expected_of(recipe, facts.measured)
    step, replay = describe_step(recipe, expected), describe_replay(recipe, expected)
    storage = describe_storage(recipe, replay, plan, expected)
    check_disk_space(storage, output_dir, hardware.device, findings)
    _note_assumptions(recipe, expected, hardware, findings)
    speed = choose_speed(
        recipe, expected, None if plan is None else plan.shape, hardware,
        facts.generated_tokens_per_second, facts.trained_tokens_per_second, facts.speed,
    )  # fmt: skip
    _note_time(recipe, speed, hardware, findings)
    fits = None if plan is None else fits_in(plan, hardware.capacity)
    return DryRunReport(
        recipe=recipe.name,
        hardware=_describe_hardware(hardware),
        model=None if plan is None else _describe_model(recipe, plan.shape),
        memory=None if plan is None else _describe_memory(plan, hardware),
        sampler=None if plan is None else _describe_sampler(recipe, plan),
        step=step,
        replay=replay,
        storage=storage,
        time=describe_time(recipe, step, replay, expected, speed, hardware),
        network=None if plan is None else describe_network(recipe, plan.shape),
        fits=fits,
        first_change=first_change(recipe, hardware) if fits is False else None,
        findings=findings,
    )


def _plan(
    recipe: Recipe, known: Recipe, hardware: Hardware, findings: Findings
) -> EnginePlan | None:
    """Memory of engine and sampler; None if the configuration of the model cannot be read, or its
    LoRA adapters cannot be counted."""
    if lacks_peft(recipe):
        findings.unchecked.append("sizes of the model: LoRA adapters are counted with peft")
        return None
    try:
        plan = plan_engine(known, hardware.device == "cuda", hardware.capacity)
    except ModelError as error:
        findings.unchecked.append(f"sizes of the model: {error}")
        return None
    if known is not recipe:
        findings.assumptions.append(
            f"sizes of {recipe.model.path} from the configuration shipped with the package"
        )
    _note_attention(known, hardware, findings)
    findings.assumptions += describe_host_copies(known, plan.shape, hardware)
    findings.assumptions += describe_asynchrony(known, plan.shape)
    return plan


def _describe_hardware(hardware: Hardware) -> dict[str, Any]:
    return {
        "device": hardware.device,
        "processes": hardware.processes,
        "memory_gib_per_process": to_gib(hardware.capacity),
        "assumed": hardware.assumed,
    }


def _describe_model(recipe: Recipe, shape: ModelShape) -> dict[str, Any]:
    return {
        "path": recipe.model.path,
        "parameters": shape.parameters,
        "adapter_parameters": shape.adapters,
        "tied_head": shape.tied_head,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "vocabulary": shape.vocabulary,
        "dtype": recipe.model.dtype,
        "logprob_chunk_tokens": recipe.logprob_chunk_tokens(shape.vocabulary),
    }


def _describe_memory(plan: EnginePlan, hardware: Hardware) -> dict[str, Any]:
    engine, phases = plan.engine, plan.phases()
    parts = {f"{name}_gib": to_gib(value) for name, value in engine.to_json().items()}
    peak = max(phases, key=lambda name: phases[name])
    return {
        **parts,
        "sampler_awake_gib": to_gib(plan.sampler.awake),
        "sampler_asleep_gib": to_gib(plan.sampler.asleep),
        "phases_gib": {name: to_gib(value) for name, value in phases.items()},
        "peak_phase": peak,
        "peak_gib": to_gib(phases[peak]),
        "capacity_gib": to_gib(hardware.capacity),
    }


def _describe_sampler(recipe: Recipe, plan: EnginePlan) -> dict[str, Any]:
    tokens, longest = plan.sampler.cache_tokens, plan.model_length
    return {
        "backend": recipe.sampling.backend,
        "kv_cache_tokens": tokens,
        "model_length_tokens": longest,
        "longest_rollouts_at_once": None if tokens is None else max(0, tokens) // longest,
    }


def _note_attention(recipe: Recipe, hardware: Hardware, findings: Findings) -> None:
    from grpo_replay.engine.attention_kernel import float32_warning
    from grpo_replay.engine.models import load_config

    longest = recipe.prompts.max_prompt_length + recipe.sampling.max_completion_length
    config, on_cuda = load_config(recipe.model), hardware.device == "cuda"
    warning = float32_warning(recipe.model, config, longest, on_cuda)
    if warning is not None:
        findings.assumptions.append(warning)


def _note_assumptions(
    recipe: Recipe, expected: Expected, hardware: Hardware, findings: Findings
) -> None:
    why = expected.sources
    findings.assumptions += [
        f"{expected.survival:.1%} of rollouts are in groups that are kept ({why['survival']})",
        f"{expected.completion_tokens:,.0f} tokens a completion ({why['completion_tokens']}) and "
        f"{expected.prompt_tokens:,.0f} a prompt ({why['prompt_tokens']}) on average",
        "memory is for a micro-batch full of the longest rollouts",
    ]
    if hardware.assumed:
        findings.assumptions.append(f"GPUs of {to_gib(hardware.capacity):g} GiB")
    if hardware.device == "cuda":
        findings.assumptions.append(f"1 GiB for CUDA's context and NCCL{_vllm_assumption(recipe)}")


def _note_time(recipe: Recipe, speed: Speed | None, hardware: Hardware, findings: Findings) -> None:
    how = "--from-run DIR, --trained-tokens-per-second or --generated-tokens-per-second"
    if speed is None:
        findings.assumptions.append(f"no hours: the speed of this machine is not known; give {how}")
        return
    what = "GPU" if hardware.device == "cuda" else "process"
    gpus = server_gpus(recipe)
    servers = f", {gpus} more for servers" if gpus else ""
    findings.assumptions.append(
        f"hours: {speed.generated:,.0f} tokens generated and {speed.trained:,.0f} trained a second "
        f"by each {what} ({speed.source}){servers}; evaluations and checkpoints are not counted"
        + (f"; better: {how}" if speed.assumed else "")
    )


def _vllm_assumption(recipe: Recipe) -> str:
    if recipe.sampling.backend != "vllm":
        return ""
    graphs = "" if recipe.sampling.vllm.enforce_eager else "1 GiB for vLLM's graphs and "
    stay = ", which stay while it sleeps" if recipe.sampling.vllm.sleep_mode else ""
    return f", {graphs}0.5 GiB for vLLM's buffers{stay}"
