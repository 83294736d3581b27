"""`train --dry-run`: would the recipe start, what would it take, and what if it does not fit.

The checks are those of a start (`training.opening`). Nothing is opened and no weights are read,
unless a first look is asked for. `planner` looks at the device of one rank, `estimates` at tokens,
`first_look` at a few groups of the first step.
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
    """Sentences of the report by kind: a problem is what the run would end with, unchecked is what
    cannot be seen from this machine. `exit_code` is that of the first problem."""

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


@dataclass(frozen=True, slots=True)
class DryRun:
    """What was found. `memory` is None if it could not be counted. `advice` is what a run that does
    not fit would take if it were another. `prompt` is the first one as the model sees it, if the
    prompts were read; `notices` are those of a start."""

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
        """Whether nothing was found that would stop the run; None if its memory is not known."""
        return False if self.findings.problems else None if self.memory is None else True

    def to_json(self) -> dict[str, Any]:
        """All as JSON values; None means unknown."""
        return {
            "recipe": self.recipe,
            "fits": self.fits,
            "advice": [each.to_json() for each in self.advice],
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

    With `gpu_memory_gib`, assume GPUs of that size. The run would begin in `output_dir` (None: in a
    new folder), or with `resume` go on there. `ranks_of_nodes`: one node of `engine.num_processes`
    if None. With `sample`, a run that would start takes a first look at so many groups.
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
    """What a start would check, with all that it would be refused with."""
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
    """Memory of engine and sampler; None if the configuration of the model cannot be read, or the
    model cannot be traced."""
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
        tight = plan.longest_rollouts_at_once == 0
        more = "; vLLM's share has no room for one longest rollout" if tight else ""
        findings.refuse(RecipeError(f"not enough memory: {plan.peak_text}{more}"))
    return plan


def _try_look(recipe: Recipe, sample: int | None, findings: Findings) -> FirstLook | None:
    """The first look, if one is asked for and possible."""
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
