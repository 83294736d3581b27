"""`train --dry-run`: would the recipe start, what would it take, and if it does not fit, with which
overrides it would.

The checks are those of a start (`training.opening`). Nothing is opened and no weights are read,
unless a first look is asked for. `planner` looks at the device of one rank, `estimates` at tokens,
`first_look` at a few groups of the first step.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_replay.errors import GrpoReplayError, ModelError, NotFetchedError, RecipeError
from grpo_replay.lab.dry_run.estimates import (
    Known,
    describe_replay,
    describe_step,
    describe_storage,
    seconds_of_step,
)
from grpo_replay.lab.dry_run.first_look import FirstLook, first_look
from grpo_replay.lab.dry_run.planner import (
    Generation,
    Machines,
    MemoryPlan,
    advise,
    find_machines,
    plan_memory,
    with_known_model,
)
from grpo_replay.lab.planning.expected import Expected, expected_of
from grpo_replay.recipe import ModelSection, Recipe, SamplingSection
from grpo_replay.storage.run_directory import RunDirectory, default_run_dir
from grpo_replay.training.disk_room import to_gib

if TYPE_CHECKING:
    from grpo_replay.training.opening import RunOpener


@dataclass(slots=True)
class Findings:
    """Sentences of the report by kind: a problem is what a start would be refused with, unchecked
    is what cannot be seen from this machine. `exit_code` is that of the first problem."""

    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    exit_code: int = 0

    def refuse(self, problem: GrpoReplayError) -> None:
        """Add a problem, once. What is not in the local cache may be where the run runs."""
        if isinstance(problem, NotFetchedError):
            self.unchecked.append(str(problem))
            return
        self.exit_code = self.exit_code or problem.exit_code
        if str(problem) not in self.problems:
            self.problems.append(str(problem))


def dry_run(
    recipe: Recipe,
    gpu_memory_gib: float | None = None,
    output_dir: Path | None = None,
    ranks_of_nodes: Sequence[int] | None = None,
    sample: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """All results as JSON values; None means unknown.

    `fits` is True if nothing was found that would stop the run, False if something was, and None
    if its memory could not be counted. `advice` has overrides for one that does not fit. `prompt`
    is the first one as the model sees it, if the prompts were read. `notices` are those of a start.
    The sentences of `Findings` are in lists by kind, and `exit_code` is the one that the run would
    end with.

    With `gpu_memory_gib`, assume GPUs of that size. The run would begin in `output_dir` (None: in a
    new folder), or with `resume` go on there. `ranks_of_nodes`: one node of `engine.num_processes`
    if None. With `sample`, a run that would start takes a first look at so many groups.
    """
    sampling, findings, known, evaluation = recipe.sampling, Findings(), Known(), None
    machines = find_machines(
        recipe.engine.device,
        ranks_of_nodes or [recipe.engine.num_processes],
        sampling.servers_launched * sampling.vllm.tensor_parallel_size,
        gpu_memory_gib,
    )
    with ExitStack() as stack:
        folder = RunDirectory(output_dir or default_run_dir(recipe.name))
        opener = _check_start(recipe, folder, resume, machines, findings, stack)
    if opener.prompts is not None:
        known = replace(known, prompt_tokens=opener.prompts.mean_prompt)
    if (plan := opener.evaluation) is not None:
        longest = plan.document["max_completion_length"]
        evaluation = Generation(len(plan.samples), plan.longest_prompt, longest)
    memory = _try_plan(recipe, machines, evaluation, findings)
    look, known = _try_look(recipe, sample, memory, known, findings)
    figures = _figures(recipe, known, memory, machines, findings)
    return {
        "recipe": recipe.name,
        "fits": False if findings.exit_code else None if memory is None else True,
        "advice": _advice(recipe, memory, machines, evaluation),
        "hardware": machines.describe(),
        "model": None if memory is None else _describe_model(recipe.model, memory),
        "memory": None if memory is None else memory.describe(),
        "sampler": None if memory is None else _describe_sampler(sampling.backend, memory),
        **figures,
        "prompt": None if opener.prompts is None else opener.prompts.sample(1)[0].text,
        "first_look": None if look is None else asdict(look),
        "notices": [asdict(notice) for notice in opener.notices],
        **asdict(findings),
    }


def _check_start(
    recipe: Recipe,
    folder: RunDirectory,
    resume: bool,
    machines: Machines,
    findings: Findings,
    stack: ExitStack,
) -> "RunOpener":
    """What a start would check, with all that it would be refused with."""
    from grpo_replay.distributed.comm import Comm
    from grpo_replay.engine.processes import choose_device
    from grpo_replay.terminal.quiet import quiet_libraries
    from grpo_replay.training.opening import Place, RunOpener

    ranks, elsewhere = max(machines.ranks), machines.elsewhere or len(machines.ranks) > 1
    stack.enter_context(quiet_libraries())
    gpu_bytes = machines.capacity if machines.on_cuda else None
    place = Place(machines.total_ranks, ranks, gpu_bytes, is_plan=True, elsewhere=elsewhere)
    opener = RunOpener(
        recipe, Comm(), None, folder, stack,
        resume=resume, place=place, known_model=with_known_model(recipe.model),
    )  # fmt: skip
    try:
        for rank in () if elsewhere else range(ranks):
            choose_device(recipe.engine, rank)
    except GrpoReplayError as error:
        findings.refuse(error)
    for problem in opener.problems():
        findings.refuse(problem)
    findings.unchecked += opener.unchecked
    return opener


def _advice(
    recipe: Recipe, plan: MemoryPlan | None, machines: Machines, evaluation: Generation | None
) -> dict[str, Any] | None:
    """Overrides with which a plan that does not fit would; None if none are needed or found."""
    if plan is None or plan.fits:
        return None
    advice = advise(recipe, machines, evaluation)
    return None if advice is None else advice.describe()


def _try_look(
    recipe: Recipe, sample: int | None, plan: MemoryPlan | None, known: Known, findings: Findings
) -> tuple[FirstLook | None, Known]:
    """The first look, and what is known with it."""
    if sample is None:
        return None, known
    if findings.exit_code:
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
    storage |= _model_sizes(plan, recipe)
    findings.assumptions += _assumptions(expected, recipe.sampling, machines)
    speed, overlaps = known.speed, recipe.run.is_async
    seconds = None if speed is None else seconds_of_step(step, speed, overlaps)
    return {"step": {**step, "seconds": seconds}, "replay": stored, "storage": storage}


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
    if not plan.fits:
        findings.exit_code = findings.exit_code or 2
    return plan


def _model_sizes(plan: MemoryPlan | None, recipe: Recipe) -> dict[str, Any]:
    """Of one checkpoint, the largest, and of all that are there at once; of what is offloaded to
    host memory; and of an update of the sampler."""
    section = recipe.checkpoint
    names = (
        *("checkpoint_gib", "checkpoints_gib_most"),
        *("offloaded_host_gib_per_rank", "push_mib"),
    )
    if plan is None:
        return dict.fromkeys(names)
    usual, merged = map(to_gib, plan.checkpoint_size)
    count = section.keep + 1
    kept = round(count * usual + merged * (count if section.merged == "all" else 1), 3)
    push = round(plan.push_bytes(recipe.pushes_adapters) / 2**20, 2)
    sizes = (round(usual + merged, 3), kept, to_gib(plan.engine.host), push)
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
        if sampling.facts.fills_memory:
            graphs = "" if sampling.vllm.enforce_eager else "1 GiB for vLLM's graphs and "
            stay = ", which stay while it sleeps" if sampling.vllm.enable_sleep_mode else ""
            vllm = f", {graphs}0.5 GiB for vLLM's buffers{stay}"
        yield f"1 GiB for CUDA's context and NCCL{vllm}"
