"""`train --dry-run`: would the recipe start, what would it take, and if it does not fit, with which
overrides it would.

Nothing is started and no weights are read, unless a first look is asked for. `start_checks` looks
at the parts of the recipe, `planner` at the device of one rank, `estimates` at tokens, `first_look`
at a few groups of the first step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_replay.errors import GrpoReplayError, ModelError, RecipeError
from grpo_replay.lab.dry_run.estimates import (
    Expected,
    Known,
    describe_replay,
    describe_step,
    describe_storage,
    expected_of,
    seconds_of_step,
)
from grpo_replay.lab.dry_run.first_look import FirstLook, first_look
from grpo_replay.lab.dry_run.planner import (
    Advice,
    Findings,
    Generation,
    Machines,
    MemoryPlan,
    advise,
    find_machines,
    plan_memory,
    warning_of_rounds,
    with_known_model,
)
from grpo_replay.recipe import ModelSection, Recipe, SamplingSection
from grpo_replay.storage.checkpoint import to_gib

if TYPE_CHECKING:
    from grpo_replay.prompts.prompt_set import PromptSet

DEFAULT_OUTPUT = Path("runs")


def dry_run(
    recipe: Recipe,
    gpu_memory_gib: float | None = None,
    output_dir: Path = DEFAULT_OUTPUT,
    ranks_of_nodes: Sequence[int] | None = None,
    sample: int | None = None,
    resume: bool | None = None,
) -> dict[str, Any]:
    """All results as JSON values; None means unknown.

    `fits` is True if nothing was found that would stop the run, False if something was, and None
    if its memory could not be counted. `advice` has overrides for one that does not fit. `prompt`
    is the first one as the model sees it, if the prompts were read. The sentences of `Findings` are
    in lists by kind, and `exit_code` is the one that the run would end with.

    With `gpu_memory_gib`, assume GPUs of that size. The free disk space is that of
    `output_dir`, which need not exist. `ranks_of_nodes`: one node of `engine.num_processes` if
    None. With `sample`, a run that would start takes a first look at so many groups. `resume` is
    whether the run goes on in `output_dir` or begins there; if None, it is given another folder.
    """
    from grpo_replay.lab.dry_run.start_checks import check_disk_space

    sampling, findings, known = recipe.sampling, Findings(), Known()
    machines = find_machines(
        recipe.engine.device,
        ranks_of_nodes or [recipe.engine.num_processes],
        sampling.servers_launched * sampling.vllm.tensor_parallel_size,
        gpu_memory_gib,
    )
    prompts, evaluation = _check_start(recipe, output_dir, resume, machines, findings)
    if prompts is not None:
        known = replace(known, prompt_tokens=prompts.mean_prompt)
    plan = _try_plan(recipe, machines, evaluation, findings)
    look, known = _try_look(recipe, sample, plan, known, findings)
    figures = _figures(recipe, known, plan, machines, findings)
    if plan is not None:
        keep = recipe.checkpoint.keep
        check_disk_space(plan.checkpoint_bytes, keep, output_dir, machines, findings)
    advice = _advice(recipe, plan, machines, evaluation, findings)
    return {
        "recipe": recipe.name,
        "fits": False if findings.exit_code else None if plan is None else True,
        "advice": None if advice is None else advice.describe(),
        "hardware": machines.describe(),
        "model": None if plan is None else _describe_model(recipe.model, plan),
        "memory": None if plan is None else plan.describe(),
        "sampler": None if plan is None else _describe_sampler(sampling.backend, plan),
        **figures,
        "prompt": None if prompts is None else prompts.sample(1)[0].text,
        "first_look": None if look is None else asdict(look),
        **asdict(findings),
    }


def _check_start(
    recipe: Recipe, output_dir: Path, resume: bool | None, machines: Machines, findings: Findings
) -> "tuple[PromptSet | None, Generation | None]":
    """What is found before memory, in the order of a run: the first problem has its exit code.
    Returns the prompts, and what an evaluation samples, if they could be read."""
    from grpo_replay.lab.dry_run.start_checks import check_output_directory, check_parts

    if resume is not None:
        check_output_directory(recipe, output_dir, resume, machines, findings)
    known_model = with_known_model(recipe.model)
    prompts, evaluation = check_parts(recipe, known_model, machines, findings)
    if evaluation is None:
        return prompts, None
    longest = evaluation.document["max_completion_length"]
    return prompts, Generation(len(evaluation.samples), evaluation.longest_prompt, longest)


def _advice(
    recipe: Recipe,
    plan: MemoryPlan | None,
    machines: Machines,
    evaluation: Generation | None,
    findings: Findings,
) -> Advice | None:
    """Overrides that may fit, unless the plan does. Notes that a plan which does not fit would not
    start."""
    if plan is None:
        return None
    advice = None if plan.fits and _has_gpus(machines) else advise(recipe, machines, evaluation)
    prompt = recipe.prompts.max_prompt_length
    slow = warning_of_rounds(plan, recipe.sampling, prompt, machines)
    findings.warnings += [] if slow is None else [slow]
    if not plan.fits:
        findings.exit_code = findings.exit_code or 2
    return advice


def _try_look(
    recipe: Recipe, sample: int | None, plan: MemoryPlan | None, known: Known, findings: Findings
) -> tuple[FirstLook | None, Known]:
    """The first look, and what is known with it."""
    if sample is None:
        return None, known
    if findings.exit_code or (plan is not None and not plan.fits):
        findings.unchecked.append("the first look: the run would not start")
        return None, known
    if (ranks := recipe.engine.num_processes) > 1:
        findings.unchecked.append(
            f"the first look: --sample looks in one process, engine.num_processes is {ranks}: add "
            "--num-processes 1"
        )
        return None, known
    try:
        look, seen = first_look(recipe, sample)
    except GrpoReplayError as error:
        findings.refuse(error)
        return None, known
    return look, replace(known, measured=seen.measured, speed=seen.speed)


def _figures(
    recipe: Recipe,
    known: Known,
    plan: MemoryPlan | None,
    machines: Machines,
    findings: Findings,
) -> dict[str, dict[str, Any]]:
    """The sections step, replay and storage; what they assume is added to the findings."""
    expected = expected_of(recipe, known.measured, known.prompt_tokens)
    step = describe_step(recipe, expected)
    stored = describe_replay(recipe, expected)
    storage = describe_storage(recipe, stored, expected)
    storage |= _checkpoint_sizes(plan, recipe.checkpoint.keep, bool(recipe.eval.benchmarks))
    findings.assumptions += _assumptions(expected, recipe.sampling, machines)
    speed, overlaps = known.speed, recipe.run.is_async
    seconds = None if speed is None else seconds_of_step(step, speed, overlaps)
    return {"step": {**step, "seconds": seconds}, "replay": stored, "storage": storage}


def _has_gpus(machines: Machines) -> bool:
    return machines.gpus is None or max(machines.ranks) <= machines.gpus


def _try_plan(
    recipe: Recipe, machines: Machines, evaluation: Generation | None, findings: Findings
) -> MemoryPlan | None:
    """Memory of engine and sampler; None if the configuration of the model cannot be read, or the
    model cannot be traced."""
    try:
        plan = plan_memory(recipe, machines, evaluation=evaluation)
    except ModelError as error:
        findings.unchecked.append(f"sizes of the model: {error}")
        return None
    except RecipeError as error:
        findings.refuse(error)
        return None
    if with_known_model(recipe.model) is not recipe.model:
        findings.assumptions.append(
            f"sizes of {recipe.model.path} from the configuration shipped with the package"
        )
    return plan


def _checkpoint_sizes(plan: MemoryPlan | None, keep: int, evaluates: bool) -> dict[str, Any]:
    names = ("checkpoint_gib", "checkpoints_gib_most", "offloaded_host_gib_per_rank",
             "sampler_host_gib_per_rank")  # fmt: skip
    if plan is None:
        return dict.fromkeys(names)
    one = to_gib(plan.checkpoint_bytes)
    host = plan.sampler.host if evaluates else 0
    sizes = (one, round(one * (keep + 1), 3), to_gib(plan.engine.host), to_gib(host))
    return dict(zip(names, sizes, strict=True))


def _describe_model(model: ModelSection, plan: MemoryPlan) -> dict[str, Any]:
    shape = plan.shape
    return {
        "path": model.path,
        "parameters": shape.parameters,
        "adapter_parameters": shape.adapters,
        "tied_head": shape.tied_head,
        "dtype": model.dtype,
    }


def _describe_sampler(backend: str, plan: MemoryPlan) -> dict[str, Any]:
    tokens, longest = plan.sampler.cache_tokens, plan.model_length
    return {
        "backend": backend,
        "kv_cache_tokens": tokens,
        "model_length_tokens": longest,
        "longest_rollouts_at_once": None if tokens is None else max(0, tokens) // longest,
    }


def _assumptions(
    expected: Expected, sampling: SamplingSection, machines: Machines
) -> Iterator[str]:
    why = expected.sources
    yield f"{expected.survival:.1%} of rollouts are in groups that are kept ({why['survival']})"
    yield (
        f"{expected.completion_tokens:,.0f} tokens a completion ({why['completion_tokens']}) and "
        f"{expected.prompt_tokens:,.0f} a prompt ({why['prompt_tokens']}) on average"
    )
    yield "memory is for a micro-batch full of the longest rollouts"
    if machines.elsewhere:
        yield f"GPUs of {to_gib(machines.capacity):g} GiB, {machines.gpus} on each node"
    if machines.on_cuda:
        vllm = ""
        if sampling.vllm_in_ranks:
            graphs = "" if sampling.vllm.enforce_eager else "1 GiB for vLLM's graphs and "
            stay = ", which stay while it sleeps" if sampling.vllm.enable_sleep_mode else ""
            vllm = f", {graphs}0.5 GiB for vLLM's buffers{stay}"
        yield f"1 GiB for CUDA's context and NCCL{vllm}"
