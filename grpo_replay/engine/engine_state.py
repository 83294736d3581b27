"""The state of a DeepSpeed engine on disk: parameters that train, optimizer, and their layout.

With LoRA the frozen base is left out: a resumed run reads it where the first one did.
"""

import json
from pathlib import Path
from typing import Any

from torch import nn

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.lora import is_adapter
from grpo_replay.engine.resharding import read_saved_state, restore_engine
from grpo_replay.errors import CheckpointError
from grpo_replay.recipe import Recipe
from grpo_replay.storage.checkpoint import read_json

ENGINE_TAG = "state"
LAYOUT = "layout.json"


def leave_base_out(module: nn.Module) -> None:
    """Let the module's state be its adapters alone."""

    def keep_adapters(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        for name in [name for name in state if not is_adapter(name)]:
            del state[name]

    module.register_state_dict_post_hook(keep_adapters)


def save_state(engine: Any, recipe: Recipe, comm: Comm, folder: Path) -> None:
    """Write parameters, optimizer state and layout. Collective."""
    engine.save_checkpoint(
        str(folder),
        tag=ENGINE_TAG,
        save_latest=False,
        exclude_frozen_parameters=recipe.model.lora.rank is not None,
    )
    if comm.is_main:
        layout = json.dumps(_layout(recipe, comm.world_size), indent=2)
        (folder / LAYOUT).write_text(layout + "\n")


def has_other_layout(recipe: Recipe, comm: Comm, folder: Path) -> bool:
    """Whether a saved state is split into files otherwise than this run's would be. Raises
    CheckpointError if its adapters are others than the recipe's."""
    saved = read_json(folder / LAYOUT, "no layout of an engine state")
    layout = _layout(recipe, comm.world_size)
    then, now = (each.get("lora", "null") for each in (saved, layout))
    if then != now:
        raise CheckpointError(
            f"{folder}: the engine state was saved with model.lora {then}, the recipe has {now}: "
            "resume with the former, or start a new run whose model.path is "
            f"{folder.parent / 'model'}"
        )
    return bool(saved != layout)


def load_same_layout(engine: Any, recipe: Recipe, folder: Path) -> None:
    """Restore a state of this run's layout, with the recipe's optimizer settings."""
    complete = recipe.model.lora.rank is None
    path, _ = engine.load_checkpoint(str(folder), tag=ENGINE_TAG, load_module_strict=complete)
    if path is None:
        raise CheckpointError(f"{folder}: DeepSpeed found no engine state {ENGINE_TAG!r} there")
    _apply_optimizer_settings(engine, recipe)


def load_other_layout(engine: Any, stage: int, folder: Path) -> None:
    """Restore a state of another number of ranks, ZeRO stage or dtype."""
    names = [n for n, p in engine.module.named_parameters() if p.requires_grad]
    saved = read_saved_state(folder / ENGINE_TAG, names)
    restore_engine(engine, stage, saved)


def undo_first_step(optimizer: Any) -> None:
    """Put a new optimizer back before its first update: no moments, no update counted.

    In bfloat16 at stage 0, DeepSpeed 0.19 makes an AdamW step on zero gradients when it opens
    (`runtime/fp16/unfused_optimizer.py`, `initialize_optimizer_states`). It would count as an
    update in Adam's bias correction, and decay the fp32 copies of the weights.
    """
    adamw = getattr(optimizer, "optimizer", optimizer)
    if adamw.state:
        optimizer.refresh_fp32_params()
        adamw.state.clear()


def param_groups(engine: Any) -> list[dict[str, Any]]:
    """The parameter groups of AdamW, under DeepSpeed's wrapper if there is one."""
    groups: list[dict[str, Any]] = getattr(
        engine.optimizer, "optimizer", engine.optimizer
    ).param_groups
    return groups


def _layout(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """The settings that decide how DeepSpeed splits a state into files, and LoRA's."""
    stage, lora = recipe.zero_stage(ranks), recipe.model.lora
    sub_group = recipe.engine.zero.sub_group_size if stage == 3 else None
    layout = {
        "ranks": ranks,
        "zero_stage": stage,
        "dtype": recipe.model.dtype,
        "sub_group_size": sub_group,
    }
    return layout if lora.rank is None else {**layout, "lora": lora.model_dump()}


def _apply_optimizer_settings(engine: Any, recipe: Recipe) -> None:
    """Train on with the recipe's settings: DeepSpeed restores those of the saved state."""
    settings, optimizer = recipe.optimizer, engine.optimizer
    for group in param_groups(engine):
        group["lr"] = settings.learning_rate
        group["betas"] = (settings.beta1, settings.beta2)
        group["eps"] = settings.epsilon
        group["weight_decay"] = settings.weight_decay
    if hasattr(optimizer, "clip_grad"):
        optimizer.clip_grad = settings.max_grad_norm
