"""Checks settings that a recipe passes on to torch, DeepSpeed and peft before a model is loaded, by
passing them: these libraries know which names and values they accept.
"""

import os
import sys
from contextlib import redirect_stdout
from typing import Any

import torch

from grpo_replay.engine.deepspeed_engine import deepspeed_config
from grpo_replay.engine.weights import lora_config, refused_as
from grpo_replay.named_functions import has_module
from grpo_replay.recipe import LoraSection, Recipe, ZeroSection


def check_passed_settings(recipe: Recipe, stage: int, on_cuda: bool) -> None:
    """Pass each library its settings, as the engine does at a ZeRO stage. Raises RecipeError with
    the library's message. peft is skipped if it is not installed."""
    config = deepspeed_config(recipe.optimizer, recipe.engine, recipe.model.dtype, stage)
    arguments = dict(config["optimizer"]["params"])
    del arguments["torch_adam"]  # DeepSpeed's own
    with refused_as("optimizer.adamw"):
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **arguments)
    if recipe.engine.zero != ZeroSection():
        _check_zero(config["zero_optimization"], on_cuda)
    _check_lora(recipe.model.lora)


def _check_zero(arguments: dict[str, Any], on_cuda: bool) -> None:
    if not (on_cuda and torch.cuda.is_available()):  # when imported, DeepSpeed looks for a GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with redirect_stdout(sys.stderr):  # its logger keeps the stdout of the import
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    with refused_as("engine.zero"):
        DeepSpeedZeroConfig(**arguments)


def _check_lora(settings: LoraSection) -> None:
    if settings.r is not None and has_module("peft"):
        lora_config(settings, settings.target_modules)
