"""`train --dry-run`: would the recipe start, what would it take, and what would fit instead?

The checks are those of a start (`training.opening`). Nothing is opened and no weights are read,
unless a first look is asked for. `planner` plans the device memory of one rank, `estimates`
rollouts, tokens and disk; `first_look` trains one step on a few groups.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_replay.errors import GrpoReplayError, ModelError, NotFetchedError, RecipeError
from grpo_replay.lab.dry_run.estimates import step_section, storage_sections
from grpo_replay.lab.dry_run.first_look import FirstLook, first_look, look_section
from grpo_replay.lab.dry_run.planner import (
    Alternative,
    Machines,
    MemoryPlan,
    alternatives,
    find_machines,
    memory_sections,
    plan_memory,
    with_known_model,
)
from grpo_replay.lab.dry_run.rows import Section
from grpo_replay.lab.planning.expected import Expected, expected_of
from grpo_replay.recipe import Recipe
from grpo_replay.storage.run_directory import RunDirectory, default_run_dir
from grpo_replay.training import Notice

if TYPE_CHECKING:
    from grpo_replay.evaluation.benchmarks import EvaluationPlan
    from grpo_replay.training.opening import RunOpener


@dataclass(slots=True)
class Findings:
    """Sentences of a dry run by kind. A problem is an error with which a start would end; unchecked
    is what cannot be known on this machine. `exit_code` is that of the first problem, 0 without."""

    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    exit_code: int = 0

    def refuse(self, problem: GrpoReplayError) -> None:
        """Add a problem, unless it is there already. A file that is not in the local cache is only
        "unchecked": the machine of the run may have it."""
        if isinstance(problem, NotFetchedError):
            self.unchecked.append(str(problem))
            return
        self.exit_code = self.exit_code or problem.exit_code
        if str(problem) not in self.problems:
            self.problems.append(str(problem))


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run. `memory` is None if it could not be planned. `advice` has the
    alternatives to a run that does not fit. `prompt` is the first prompt as the model sees it, if
    the prompts could be read; `notices` are those of a start."""

    recipe: str
    findings: Findings
    sections: Sequence[Section]
    memory: MemoryPlan | None
    look: FirstLook | None
    advice: Sequence[Alternative]
    prompt: str | None
    notices: Sequence[Notice]

    @property
    def fits(self) -> bool | None:
        """Whether the run would start and fit; None if there is no problem and its memory is
        unknown. (Too little memory is a problem.)"""
        if self.findings.problems:
            return False
        return None if self.memory is None else True

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as JSON values; None means unknown."""
        return {
            "recipe": self.recipe,
            "fits": self.fits,
            "advice": [alternative.to_json() for alternative in self.advice],
            **{section.name: section.to_json() for section in self.sections},
            "prompt": self.prompt,
            "notices": [asdict(notice) for notice in self.notices],
            **asdict(self.findings),
        }


def dry_run(
    recipe: Recipe,
    gpu_memory_gib: float | None = None,
    output_dir: Path | None = None,
    ranks_of_nodes: Sequence[int] | None = None,
    sample: int | None = None,
    resume: bool = False,
) -> DryRun:
    """Check the recipe as a start would, and estimate what the run would take.

    With `gpu_memory_gib`, GPUs of that size are assumed. The run would begin in `output_dir` (None:
    in a new folder), or with `resume` go on there. `ranks_of_nodes` counts the ranks of every node
    (None: one node of `engine.num_processes`). With `sample`, and unless there is a problem, a
    first look at that many groups is taken. Alternatives are computed if the run does not fit.
    """
    findings = Findings()
    ranks = ranks_of_nodes or [recipe.engine.num_processes]
    machines = find_machines(recipe.engine.device, ranks, gpu_memory_gib)
    with ExitStack() as stack:
        folder = RunDirectory(output_dir or default_run_dir(recipe.name))
        opener = _check_start(recipe, folder, resume, machines, findings, stack)
    prompts, evaluation = opener.prompts, opener.evaluation
    memory = _try_plan(recipe, machines, evaluation, findings)
    look = _try_look(recipe, sample, findings)
    measured = {} if look is None else look.measured
    expected = expected_of(recipe, measured, None if prompts is None else prompts.mean_prompt)
    findings.assumptions += _assumptions(expected, machines)
    fits = memory is None or memory.fits
    return DryRun(
        recipe.name,
        findings,
        sections=[
            machines.section(),
            *memory_sections(recipe, memory),
            step_section(recipe, expected, None if look is None else look.speed),
            *storage_sections(recipe, expected, memory),
            look_section(look),
        ],
        memory=memory,
        look=look,
        advice=[] if fits else list(alternatives(recipe, machines, evaluation)),
        prompt=None if prompts is None else prompts.sample(1)[0].text,
        notices=opener.notices,
    )


def _check_start(
    recipe: Recipe,
    folder: RunDirectory,
    resume: bool,
    machines: Machines,
    findings: Findings,
    stack: ExitStack,
) -> "RunOpener":
    """Runs the checks of a start, adds everything it would be refused for to `findings`, and
    returns the opener, which has the prompts and the evaluation that it read. Devices are checked
    only if the run would use this machine's."""
    from grpo_replay.distributed.comm import Comm
    from grpo_replay.engine.processes import choose_device
    from grpo_replay.terminal.quiet import quiet_libraries
    from grpo_replay.training.opening import Hardware, RunOpener

    ranks, elsewhere = max(machines.ranks), machines.elsewhere or len(machines.ranks) > 1
    stack.enter_context(quiet_libraries())
    gpu_bytes = machines.capacity if machines.on_cuda else None
    hardware = Hardware(machines.total_ranks, ranks, gpu_bytes, is_plan=True, elsewhere=elsewhere)
    opener = RunOpener(
        recipe, Comm(), None, folder, stack,
        resume=resume, hardware=hardware, known_model=with_known_model(recipe.model),
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


def _try_plan(
    recipe: Recipe,
    machines: Machines,
    evaluation: "EvaluationPlan | None",
    findings: Findings,
) -> MemoryPlan | None:
    """Plans the memory of engine and sampler, and adds to `findings` if it does not fit; None if
    the model cannot be read or traced, or the recipe is refused."""
    try:
        plan = plan_memory(recipe, machines, evaluation)
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
        cache_too_small = plan.longest_rollouts_at_once == 0
        reason = "; vLLM's share has no room for one longest rollout" if cache_too_small else ""
        findings.refuse(RecipeError(f"not enough memory: {plan.peak_text}{reason}"))
    return plan


def _try_look(recipe: Recipe, sample: int | None, findings: Findings) -> FirstLook | None:
    """Takes the first look at `sample` groups. None if `sample` is None, the run would not start,
    has several processes, or the step fails; `findings` says why."""
    if sample is None:
        return None
    if findings.problems:
        findings.unchecked.append("the first look: the run would not start")
        return None
    if (ranks := recipe.engine.num_processes) > 1:
        findings.unchecked.append(
            f"the first look: --sample looks in one process, engine.num_processes is {ranks}: add "
            "--num-processes 1"
        )
        return None
    try:
        return first_look(recipe, sample)
    except GrpoReplayError as error:
        findings.refuse(error)
        return None


def _assumptions(expected: Expected, machines: Machines) -> Iterator[str]:
    """Yields the numbers that the estimates assume, as sentences with their sources."""
    why = expected.sources
    yield f"{expected.survival:.1%} of rollouts are in groups that are kept ({why['survival']})"
    yield (
        f"{expected.completion_tokens:,.0f} tokens a completion ({why['completion_tokens']}) and "
        f"{expected.prompt_tokens:,.0f} a prompt ({why['prompt_tokens']}) on average"
    )
    yield "memory is for a micro-batch full of the longest rollouts"
    if machines.on_cuda:
        yield (
            "1 GiB for CUDA's context and NCCL; vLLM beside the trainer keeps 1 GiB of graphs and "
            "0.5 GiB of buffers"
        )
