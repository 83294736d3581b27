"""The reward functions in a dry run: loaded and tried in a worker process, as a run does."""

from typing import TYPE_CHECKING

from grpo_replay.errors import GrpoReplayError
from grpo_replay.lab.dry_run.findings import Findings
from grpo_replay.recipe import BUILTIN_VERIFIERS, Recipe, RewardSection
from grpo_replay.rewards.scorer import RewardScorer, check_workers
from grpo_replay.rewards.trial import CHECKED_ANSWERS, Sample, notices_of_workers, try_rewards

if TYPE_CHECKING:
    from grpo_replay.prompts.prompt_set import PromptSet


def check_rewards(
    recipe: Recipe, prompts: "PromptSet | None", runs_here: bool, findings: Findings
) -> None:
    """Add problems with the reward functions and with the reference answers. Without prompts, which
    only the run will read, functions are only loaded. The number of workers is only compared with
    the cores of this machine if the run `runs_here`."""
    section, verifier = recipe.reward, recipe.eval.reward
    sampled = () if prompts is None else prompts.sample(CHECKED_ANSWERS)
    total = 0 if prompts is None else len(prompts)
    try:
        if runs_here:
            ranks = recipe.engine.num_processes
            findings.assumptions += notices_of_workers(section.workers, ranks)
            check_workers(section.workers)
        _try(section, Sample(sampled, total, "prompts.source"), findings)
        if recipe.eval.benchmarks and verifier not in BUILTIN_VERIFIERS:
            _try(section.alone(verifier), Sample((), 0, "eval.benchmarks"), findings)
    except GrpoReplayError as error:
        findings.problems.append(str(error))


def _try(section: RewardSection, sample: Sample, findings: Findings) -> None:
    if not sample.problems and all(f.function in BUILTIN_VERIFIERS for f in section.functions):
        return
    with RewardScorer.open(section.model_copy(update={"workers": 1})) as scorer:
        scorer.wait_ready()
        findings.assumptions += try_rewards(section, scorer, sample)
