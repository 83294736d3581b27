"""An evaluation outside training: its recipe, and one process of it."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import rank_environment
from grpo_replay.distributed.failures import run_collectively
from grpo_replay.errors import UsageError
from grpo_replay.evaluation.cache import generations_folder
from grpo_replay.evaluation.evaluate import Progress, add_gradings, evaluate
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.model_source import ModelSource, model_sha256, used_revision
from grpo_replay.evaluation.sampling_plan import EvaluationPlan, plan_evaluation, try_verifier
from grpo_replay.recipe import (
    Recipe,
    find_recipe,
    parse_overrides,
    read_recipe_layer,
    recipe_source,
    resolve_recipe,
)
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.terminal.quiet import quiet_libraries
from grpo_replay.tiny import BASES

logger = logging.getLogger(__name__)


def resolve_evaluation(
    source: ModelSource,
    recipe: str | Recipe | None = None,
    overrides: Sequence[str] = (),
    choices: Mapping[str, Any] | None = None,
) -> Recipe:
    """The recipe of an evaluation of `source`.

    It starts from `recipe`, else the run's own recipe, else the recipe of a builtin tiny model,
    else paper A's benchmarks with its settings for 0.6B and 1.7B. `overrides` (as after --set) and
    then `choices` (sections) override it. Raises RecipeError, and UsageError if no benchmark is
    named.
    """
    place = "the default recipe"
    layer: dict[str, Any] = {"eval": {"benchmarks": ["paper"]}}
    if isinstance(recipe, Recipe):
        place, layer = f"recipe {recipe.name}", recipe.model_dump(mode="json")
    elif (path := recipe_path(source, recipe)) is not None:
        place, layer = recipe_source(path), read_recipe_layer(path, saved=recipe is None)
        layer.setdefault("name", path.stem)
        if recipe is None and isinstance(layer.get("model"), dict):
            layer["model"].pop("tokenizer", None)  # a checkpoint has its own
    changes = parse_overrides(overrides)
    if "path" in changes.get("model", {}):
        raise UsageError("--set model.path: eval takes the model from --ckpt")
    layers = [layer, changes, dict(choices or {})]
    found = resolve_recipe(layers, (place, "--set", "the options of eval"))
    if not found.eval.benchmarks:
        raise UsageError(
            f"{place} names no benchmarks to evaluate: add --benchmark, such as --benchmark paper, "
            "--benchmark math500, or --benchmark my.jsonl"
        )
    return _of_these_weights(found, source.path)


def _of_these_weights(recipe: Recipe, path: str) -> Recipe:
    """The recipe with the model at `path`, whose weights are always loaded, even if training
    started from random ones."""
    own = {"path": path, "random_init": False}
    longest = recipe.eval.max_completion_length or recipe.sampling.max_completion_length
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=own),
            "sampling": recipe.sampling.model_copy(update={"max_completion_length": longest}),
        }
    )


def recipe_path(source: ModelSource, recipe: str | None) -> Path | None:
    """The file of the recipe to evaluate under; None for the default one."""
    if recipe is not None:
        return find_recipe(recipe)
    name = source.path.removeprefix("builtin:")
    return find_recipe(name) if source.path != name and name in BASES else source.recipe


def evaluate_model(
    recipe: Recipe,
    source: ModelSource,
    generations: Path,
    world_size: int,
    on_progress: Callable[[Progress], None] | None = None,
) -> EvaluationReport | None:
    """The report of `source` under `recipe.eval` on rank 0, None elsewhere; opens and closes what
    it needs. Completions are cached in `generations`. Errors are raised on all ranks together."""
    if recipe.engine.threads_per_process is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(recipe.engine.threads_per_process))
    with quiet_libraries(), ExitStack() as stack:
        from grpo_replay.distributed.failures import run_on_main
        from grpo_replay.engine.models import load_tokenizer, resolve_model_path
        from grpo_replay.sampling.sampler_protocol import open_sampler

        comm = _open_comm(recipe, world_size)
        verifiers = recipe.reward.alone(recipe.eval.verifier)
        scorer = stack.enter_context(RewardScorer.open(verifiers, as_verdicts=True))
        tokenizer = load_tokenizer(recipe.model)
        plan = run_collectively(comm, lambda: plan_that_fits(tokenizer, recipe))
        for notice in run_on_main(comm, lambda: try_verifier(recipe.reward, plan)) or []:
            logger.warning(notice)
        path = resolve_model_path(source.path)
        sampler = open_sampler(recipe, path, comm)
        stack.callback(sampler.close)
        model, cache = run_collectively(comm, lambda: _identify(recipe, source, path, generations))
        report = evaluate(
            sampler,
            tokenizer,
            plan,
            comm,
            scorer,
            model=model,
            generations_folder=cache,
            on_progress=on_progress if comm.is_main else None,
        )
        if report is None:
            return None
        return add_gradings(report, recipe.eval.other_rewards, recipe.reward)


def _identify(
    recipe: Recipe, source: ModelSource, path: str, generations: Path
) -> tuple[dict[str, Any], Path]:
    """The `model` section of the report, and the folder of the model's generations."""
    revision = used_revision(recipe.model.revision, path)
    sha256 = model_sha256(path, source.checked, revision)
    dtype, device = recipe.sampled_dtype, recipe.engine.device
    model = {
        "name": source.name,
        "path": source.path,
        "revision": revision,
        "step": source.step,
        "sha256": sha256,
        "recipe": recipe.name,
        "dtype": dtype,
    }
    folder = generations_folder(generations, sha256, dtype, device, recipe.model, recipe.sampling)
    return model, folder


def plan_that_fits(tokenizer: Any, recipe: Recipe) -> EvaluationPlan:
    """The plan of `recipe.eval`. As `plan_evaluation`, and raises RecipeError if the model has no
    room for a prompt and its longest completion."""
    from grpo_replay.engine.sampling_limits import check_evaluation_room

    plan = plan_evaluation(
        tokenizer, recipe.eval, recipe.prompts, recipe.sampling, recipe.reward.correct
    )
    check_evaluation_room(
        recipe.sampling, recipe.model, recipe.longest_sequence, plan.longest_prompt, recipe.eval
    )
    return plan


def _open_comm(recipe: Recipe, world_size: int) -> Comm:
    from grpo_replay.distributed.rendezvous import choose_device, initialize_processes

    if not recipe.sampling.over_http:
        choose_device(recipe.engine, rank_environment().local_rank)  # refused now, not by torch
    if world_size == 1:
        return Comm()
    comm, _ = initialize_processes(recipe)
    return comm
