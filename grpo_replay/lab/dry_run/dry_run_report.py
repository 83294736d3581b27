"""`train --dry-run`: would the recipe start, what would it take, and if it does not fit, with which
overrides it would.

Nothing is started and no weights are read, unless a first look is asked for. `start_checks` looks
at the parts of the recipe, `planner` at the device of one rank, `estimates` at tokens and hours,
`first_look` at a few groups of the first step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_replay.errors import GrpoReplayError, ModelError, RecipeError
from grpo_replay.lab.dry_run.estimates import (
    DecodeFloor,
    Expected,
    Known,
    Speed,
    assumed_speed,
    busiest,
    describe_replay,
    describe_step,
    describe_storage,
    describe_time,
    expected_longest,
    expected_of,
    known_gpu,
)
from grpo_replay.lab.dry_run.first_look import FirstLook, first_look, no_look_at
from grpo_replay.lab.dry_run.planner import (
    DTYPE_BYTES,
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
from grpo_replay.storage.checkpoint import GIB, to_gib

if TYPE_CHECKING:
    from grpo_replay.prompts.prompt_set import PromptSet

DEFAULT_OUTPUT = Path("runs")
SMALLEST_DEFAULT_GIB = 75
"""From this size on, a GPU whose name is not known is taken for an H100."""


def dry_run(
    recipe: Recipe,
    gpu_memory_gib: float | None = None,
    output_dir: Path = DEFAULT_OUTPUT,
    known: Known | None = None,
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

    sampling, findings, known = recipe.sampling, Findings(), known or Known()
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
    """The first look, and what is known with it: what the user states goes before."""
    if sample is None:
        return None, known
    if findings.exit_code or (plan is not None and not plan.fits):
        findings.unchecked.append("the first look: the run would not start")
        return None, known
    if (reason := no_look_at(recipe)) is not None:
        findings.unchecked.append(f"the first look: {reason}")
        return None, known
    try:
        look, seen = first_look(recipe, sample)
    except GrpoReplayError as error:
        findings.refuse(error)
        return None, known
    measured = {**(seen.measured or {}), **(known.measured or {})}
    return look, replace(known, measured=measured, speed=known.speed or seen.speed)


def _figures(
    recipe: Recipe,
    known: Known,
    plan: MemoryPlan | None,
    machines: Machines,
    findings: Findings,
) -> dict[str, dict[str, Any]]:
    """The sections step, replay, storage and time; what they assume is added to the findings."""
    expected = expected_of(recipe, known.measured, known.prompt_tokens)
    step = describe_step(recipe, expected)
    stored = describe_replay(recipe, expected)
    storage = describe_storage(recipe, stored, expected)
    storage |= _checkpoint_sizes(plan, recipe.checkpoint.keep, bool(recipe.eval.benchmarks))
    speed = _choose_speed(known, expected, plan, recipe.model.dtype, machines)
    findings.assumptions += _assumptions(expected, recipe.sampling, machines)
    findings.assumptions.append(_describe_speed(speed, machines, recipe.sampling))
    floor, ranks = _decode_floor(recipe, expected, plan, speed, machines), machines.total_ranks
    time = describe_time(
        recipe, step, stored["first_replay_step"], expected, speed, ranks, machines.on_cuda, floor
    )
    seconds = [time.get(f"generation_seconds_{which}") for which in ("per_step", "at_least")]
    if floor is not None and seconds[0] == seconds[1]:  # the longest completion decides the hours
        share = busiest(recipe, step["generated_rollouts"], ranks)
        findings.assumptions.append(floor.describe(share))
    return {"step": step, "replay": stored, "storage": storage, "time": time}


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


def _choose_speed(
    known: Known, expected: Expected, plan: MemoryPlan | None, dtype: str, machines: Machines
) -> Speed | None:
    """Stated, else measured, else assumed for a GPU. None if nothing is known: an unnamed GPU with
    less memory than an H100 is a slower one."""
    speed = known.stated_speed(expected.mu) or known.speed
    if speed is not None or plan is None or not _is_known_gpu(machines):
        return speed
    return assumed_speed(plan.shape, expected, dtype, machines.gpu)


def _is_known_gpu(machines: Machines) -> bool:
    """Whether there is a GPU that has a name, or may be taken for an H100."""
    large = machines.capacity >= SMALLEST_DEFAULT_GIB * GIB
    return machines.on_cuda and (machines.gpu is not None or large)


def _decode_floor(
    recipe: Recipe, expected: Expected, plan: MemoryPlan | None, speed: Speed | None,
    machines: Machines,
) -> DecodeFloor | None:  # fmt: skip
    """The least time of a step's generation; None where the speed is stated or measured on as many
    GPUs, where the GPU is not known, and where no step waits for its own completions."""
    sampling = recipe.sampling
    gpus = sampling.server_gpus or machines.total_ranks
    waits = not recipe.run.is_async and sampling.collection.replay_journal is None
    if plan is None or speed is None or speed.holds_for(gpus) or not waits:
        return None
    if not _is_known_gpu(machines):
        return None
    shape, each = plan.shape, DTYPE_BYTES[recipe.sampled_dtype]
    return DecodeFloor(
        longest=expected_longest(
            expected.completion_tokens, sampling.max_completion_length, sampling.rollouts_per_step
        ),
        weight_bytes=(1 if sampling.is_quantized else each)
        * (shape.active_parameters or shape.parameters)
        / sampling.gpus_per_model,
        gpu=known_gpu(machines.gpu),
        rounds=1 + sampling.max_refills,
    )


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


def _describe_speed(speed: Speed | None, machines: Machines, sampling: SamplingSection) -> str:
    if speed is None:
        of = "this machine"
        if machines.elsewhere:
            of = (
                f"GPUs of {to_gib(machines.capacity):g} GiB (from 75 GiB, that of an H100 is taken)"
            )
        return f"no hours: the speed of {of} is not known"
    what = "GPU" if machines.on_cuda else "process"
    gpus = sampling.server_gpus
    servers = f", {gpus} more for servers" if gpus else ""
    number = gpus or machines.total_ranks
    linear = "" if speed.holds_for(number) else f", however many {what}s there are"
    return (
        f"hours: {speed.generated:,.0f} tokens generated and {speed.trained:,.0f} trained a second "
        f"by each {what}{linear} ({speed.source}){servers}; evaluations and checkpoints are not "
        "counted"
    )
