"""Evaluation of a model from the command line: opens all components and runs `evaluate`."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import rank_environment
from grpo_replay.distributed.failures import run_collectively
from grpo_replay.distributed.long_work import run_on_main
from grpo_replay.engine.models import load_tokenizer, resolve_model_path
from grpo_replay.engine.sequence_length import check_evaluation_room
from grpo_replay.evaluation.cache import generations_folder
from grpo_replay.evaluation.evaluate import EvaluationPlan, Progress, evaluate, plan_evaluation
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.model_source import ModelSource, model_sha256, used_revision
from grpo_replay.evaluation.regrading import add_gradings
from grpo_replay.evaluation.verifier_trial import try_verifier
from grpo_replay.recipe import Recipe
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.open_sampler import open_sampler

logger = logging.getLogger(__name__)


def evaluate_model(
    recipe: Recipe,
    source: ModelSource,
    generations: Path,
    world_size: int,
    on_progress: Callable[[Progress], None] | None,
    stack: ExitStack,
) -> EvaluationReport | None:
    """The report of `source` under `recipe.eval` on rank 0, None elsewhere.

    `stack` closes the sampler and the verifiers. Errors are raised on all ranks together.
    """
    comm = _open_comm(recipe, world_size)
    settings = recipe.reward.alone(recipe.eval.reward)
    scorer = stack.enter_context(RewardScorer.open(settings, as_verdicts=True))
    tokenizer = load_tokenizer(recipe.model)
    plan = run_collectively(comm, lambda: plan_that_fits(tokenizer, recipe))
    for notice in run_on_main(comm, lambda: try_verifier(recipe, plan)) or []:
        logger.warning(notice)
    path = resolve_model_path(source.path)
    sampler = open_sampler(recipe, path, comm)
    stack.callback(sampler.close)
    revision = used_revision(recipe.model.revision, path)
    sha256 = run_collectively(comm, lambda: model_sha256(path, source.checked, revision))
    report = evaluate(
        sampler,
        tokenizer,
        plan,
        comm,
        scorer,
        model=_model_document(recipe, source, revision, sha256),
        generations_folder=generations_folder(generations, sha256, recipe),
        on_progress=on_progress if comm.is_main else None,
    )
    if report is None:
        return None
    return add_gradings(report, recipe.eval.other_rewards, recipe.reward)


def plan_that_fits(tokenizer: Any, recipe: Recipe) -> EvaluationPlan:
    """The plan of `recipe.eval`. As `plan_evaluation`, and raises RecipeError if the model has no
    room for a prompt and its longest completion."""
    plan = plan_evaluation(tokenizer, recipe)
    longest = max((len(each.request.prompt_token_ids) for each in plan.samples), default=0)
    check_evaluation_room(recipe, longest)
    return plan


def _model_document(
    recipe: Recipe, source: ModelSource, revision: str | None, sha256: str
) -> dict[str, Any]:
    """The `model` section of the report."""
    return {
        "name": source.name,
        "path": source.path,
        "revision": revision,
        "step": source.step,
        "sha256": sha256,
        "recipe": recipe.name,
        "dtype": recipe.sampled_dtype,
    }


def _open_comm(recipe: Recipe, world_size: int) -> Comm:
    from grpo_replay.distributed.processes import choose_device, initialize_processes

    if recipe.sampling.backend != "vllm_server":
        choose_device(recipe.engine, rank_environment().local_rank)  # refused now, not by torch
    if world_size == 1:
        return Comm()
    comm, _ = initialize_processes(recipe)
    return comm
