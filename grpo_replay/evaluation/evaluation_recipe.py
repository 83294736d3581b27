"""An evaluation outside training: its options, its recipe, and running it on this rank."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_replay.errors import UsageError
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.model_source import ModelSource
from grpo_replay.evaluation.output_files import generations_parent
from grpo_replay.recipe import (
    Recipe,
    find_recipe,
    parse_overrides,
    read_recipe_layer,
    recipe_source,
    resolve_recipe,
)
from grpo_replay.tiny.tasks import TASKS


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What `grpo-replay eval` takes. None and empty values leave the recipe's value unchanged."""

    ckpt: str | None = None
    recipe: str | None = None
    benchmarks: Sequence[str] = ()
    k: int | None = None
    output: str | None = None
    backend: str | None = None
    data_folder: str | None = None
    greedy: bool | None = None
    grade_with: Sequence[str] = ()
    num_processes: int | None = None
    overrides: Sequence[str] = ()
    regrade: str | None = None
    compare: tuple[str, str] | None = None
    as_json: bool = False
    push_to_hub: str | None = None
    public: bool = False


def resolve_evaluation(options: EvalOptions, source: ModelSource) -> Recipe:
    """The recipe of an evaluation.

    It starts from --recipe, else the run's own recipe, else the recipe of a builtin tiny model,
    else paper A's benchmarks with its settings for 0.6B and 1.7B. --set and then the other options
    override it. Raises RecipeError, and UsageError if no benchmark is named.
    """
    place, layer = _recipe_layer(options, source)
    overrides = parse_overrides(options.overrides)
    if "path" in overrides.get("model", {}):
        raise UsageError("--set model.path: eval takes the model from --ckpt")
    layers = [layer, overrides, _option_layer(options)]
    recipe = resolve_recipe(layers, (place, "--set", "the options of eval"))
    if not recipe.eval.benchmarks:
        raise UsageError(
            f"{place} names no benchmarks to evaluate: add --benchmark, such as --benchmark paper, "
            "--benchmark math500, or --benchmark my.jsonl"
        )
    # The evaluated weights are always loaded, even if training started from random ones.
    own = {"path": source.path, "random_init": False, "config_overrides": {}}
    longest = recipe.eval.max_completion_length or recipe.sampling.max_completion_length
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=own),
            "sampling": recipe.sampling.model_copy(update={"max_completion_length": longest}),
        }
    )


def _recipe_layer(options: EvalOptions, source: ModelSource) -> tuple[str, dict[str, Any]]:
    path = recipe_path(options, source)
    if path is None:
        return "the default recipe", {"eval": {"benchmarks": ["paper"]}}
    layer = read_recipe_layer(path)
    layer.setdefault("name", path.stem)
    if options.recipe is None and isinstance(layer.get("model"), dict):
        layer["model"].pop("tokenizer", None)  # a checkpoint has its own
    return recipe_source(path), layer


def recipe_path(options: EvalOptions, source: ModelSource) -> Path | None:
    """The file of the recipe to evaluate under; None for the default one."""
    if options.recipe is not None:
        return find_recipe(options.recipe)
    name = source.path.removeprefix("builtin:")
    return find_recipe(name) if source.path != name and name in TASKS else source.recipe


def _option_layer(options: EvalOptions) -> dict[str, Any]:
    evaluation = {
        "benchmarks": list(options.benchmarks) or None,
        "samples": options.k,
        "data_folder": options.data_folder,
        "greedy": options.greedy,
        "other_rewards": list(options.grade_with) or None,
    }
    layer: dict[str, Any] = {"eval": {k: v for k, v in evaluation.items() if v is not None}}
    if options.backend is not None:
        layer["sampling"] = {"backend": options.backend}
    return layer


def evaluate_on_rank(
    recipe: Recipe, source: ModelSource, output: Path, world_size: int
) -> EvaluationReport | None:
    """The report of `source` under `recipe.eval` on rank 0, None elsewhere. Opens and closes what
    it needs, and shows its progress on stderr."""
    if recipe.engine.threads_per_process is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(recipe.engine.threads_per_process))
    from grpo_replay.evaluation.evaluation_progress import open_progress
    from grpo_replay.terminal.quiet import quiet_libraries, warnings_on_stderr

    with open_progress(world_size) as on_progress, quiet_libraries(), ExitStack() as stack:
        stack.enter_context(warnings_on_stderr())
        from grpo_replay.evaluation.session import evaluate_model

        generations = generations_parent(output)
        return evaluate_model(recipe, source, generations, world_size, on_progress, stack)
