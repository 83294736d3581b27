"""The commands as functions of their options, and what an evaluation takes from a recipe."""

from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_replay.cli.app import COMMANDS
from grpo_replay.cli.eval_command import resolved
from grpo_replay.evaluation.cache import generations_folder
from grpo_replay.evaluation.session import find_model
from grpo_replay.recipe import Recipe


def _run(name: str, *words: Any, **options: Any) -> int:
    module = import_module(f"grpo_replay.cli.{name.partition('-')[0]}_command")
    return module.run(COMMANDS[name](*words, **options))


def run_train(*words: Any, **options: Any) -> int:
    return _run("train", *words, **options)


def run_eval(*words: Any, **options: Any) -> int:
    return _run("eval", *words, **options)


def run_inspect(*words: Any, **options: Any) -> int:
    return _run("inspect-buffer", *words, **options)


def run_aes(*words: Any, **options: Any) -> int:
    return _run("aes", *words, **options)


def run_report(*words: Any, **options: Any) -> int:
    return _run("report", *words, **options)


def run_plan(*words: Any, **options: Any) -> int:
    return _run("plan", *words, **options)


def recipe_of_evaluation(ckpt: str, **options: Any) -> Recipe:
    return resolved(COMMANDS["eval"](ckpt, **options), find_model(ckpt))


def folder_of_generations(parent: Path, recipe: Recipe) -> Path:
    dtype, device = recipe.sampled_dtype, recipe.engine.device
    return generations_folder(parent, "0" * 64, dtype, device, recipe.model, recipe.sampling)
