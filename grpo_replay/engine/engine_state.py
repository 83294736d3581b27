"""The state of a DeepSpeed engine on disk: trainable parameters, optimizer state, and their layout.

With LoRA the frozen base is left out: a resumed run loads it from `model.path`.

DeepSpeed restores a state only on the number of ranks and at the stage that wrote it. Its universal
checkpoint reads only ZeRO-3 states, writes the whole state to disk a second time, and makes all
optimizer sub-groups share one Adam step counter. So this module reads the shards of each parameter
and writes them with DeepSpeed's tensor-fragment functions, without a copy on disk. The layouts are
those of DeepSpeed 0.19 (`deepspeed/runtime/engine.py`, `zero/stage3.py`, `zero/stage_1_and_2.py`):
a change there shows as a CheckpointError about sizes or names.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.deepspeed_quirks import only_data
from grpo_replay.engine.weights import is_adapter
from grpo_replay.errors import CheckpointError
from grpo_replay.recipe import Recipe
from grpo_replay.storage.checkpoint import read_json

ENGINE_TAG = "state"
LAYOUT = "layout.json"

FileLayout = dict[str, Any]
"""The result of `layout_of`, a JSON mapping."""


def leave_base_out(module: nn.Module) -> None:
    """Restrict the module's state dict to its LoRA adapters, so that DeepSpeed saves only these."""

    def keep_adapters(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        for name in [name for name in state if not is_adapter(name)]:
            del state[name]

    module.register_state_dict_post_hook(keep_adapters)


def save_state(engine: Any, layout: FileLayout, comm: Comm, folder: Path) -> None:
    """Write parameters, optimizer state and layout. Collective."""
    engine.save_checkpoint(
        str(folder),
        tag=ENGINE_TAG,
        save_latest=False,
        exclude_frozen_parameters=layout["lora"],
    )
    if comm.is_main:
        (folder / LAYOUT).write_text(json.dumps(layout, indent=2) + "\n")


def saved_layout(folder: Path) -> FileLayout:
    """Returns the layout of a saved state. Raises CheckpointError."""
    saved: FileLayout = read_json(folder / LAYOUT, "no layout of an engine state")
    return saved


def load_same_layout(engine: Any, layout: FileLayout, folder: Path) -> None:
    """Restore a state of this run's `layout`."""
    complete = not layout["lora"]
    with only_data(folder):
        path, _ = engine.load_checkpoint(str(folder), tag=ENGINE_TAG, load_module_strict=complete)
    if path is None:
        raise CheckpointError(f"{folder}: DeepSpeed found no engine state {ENGINE_TAG!r} there")


def load_other_layout(engine: Any, stage: int, folder: Path) -> None:
    """Restore a state that another number of ranks, ZeRO stage or dtype wrote."""
    names = [n for n, p in engine.module.named_parameters() if p.requires_grad]
    saved = read_saved_state(folder / ENGINE_TAG, names)
    restore_engine(engine, stage, saved)


def undo_first_step(optimizer: Any) -> None:
    """Reset a new optimizer to the state before its first update: no moments, no update counted.

    In bfloat16 at stage 0, DeepSpeed 0.19 makes an AdamW step on zero gradients when it opens
    (`runtime/fp16/unfused_optimizer.py`, `initialize_optimizer_states`). It would count as an
    update in Adam's bias correction, and decay the fp32 copies of the weights.
    """
    adamw = getattr(optimizer, "optimizer", optimizer)
    if adamw.state:
        optimizer.refresh_fp32_params()
        adamw.state.clear()


def param_groups(engine: Any) -> list[dict[str, Any]]:
    """Returns the parameter groups of AdamW, under DeepSpeed's wrapper if there is one."""
    groups: list[dict[str, Any]] = getattr(
        engine.optimizer, "optimizer", engine.optimizer
    ).param_groups
    return groups


def layout_of(recipe: Recipe, ranks: int, stage: int) -> FileLayout:
    """Return the settings that decide how DeepSpeed splits a state into files, and what is in it.
    If those of a saved state differ, `load_other_layout` reads it, else DeepSpeed."""
    return {
        "ranks": ranks,
        "zero_stage": stage,
        "dtype": recipe.model.dtype,
        "sub_group_size": recipe.engine.zero.sub_group_size if stage == 3 else None,
        "lora": recipe.model.lora.r is not None,
    }


MASTER, MOMENTS = "fp32", ("exp_avg", "exp_avg_sq")
"""The kinds of values stored for each parameter: its fp32 value and AdamW's two moments."""

Pieces = dict[str, dict[str, list[torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state, read from the files of all ranks. `pieces[name][kind]` are the flat pieces of
    a parameter, in order; the last may be padded. `step` is AdamW's number of updates; before the
    first one there are no moments."""

    pieces: Pieces
    step: float
    folder: Path

    def full(self, name: str, kind: str, like: Any) -> torch.Tensor:
        """Join the pieces of a parameter (`kind`: fp32 value or a moment) to a float32 tensor in
        the shape of the parameter `like`. Raises CheckpointError if their sizes do not fit."""
        shape = getattr(like, "ds_shape", like.shape)
        numel = shape.numel()
        pieces = self.pieces.get(name, {}).get(kind, [])
        flat = torch.cat([piece.flatten() for piece in pieces]) if pieces else torch.zeros(0)
        # Padding fills up equal pieces, so there are fewer padded values than pieces.
        if not numel <= flat.numel() < numel + max(1, len(pieces)):
            raise _unreadable(
                self.folder, f"{kind} of {name} has {flat.numel()} values, the model's has {numel}"
            )
        return flat[:numel].float().view(shape)

    def refuse_other_names(self, names: Collection[str]) -> None:
        """Raises CheckpointError unless `names` are those of the saved parameters."""
        for name in self.pieces.keys() - set(names):
            raise _unreadable(self.folder, f"the model has no trainable parameter {name}")
        for name in set(names) - self.pieces.keys():
            raise _unreadable(self.folder, f"parameter {name} is missing")


def _unreadable(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: {problem}: the engine state is of another model, or of a version of DeepSpeed "
        "that this one cannot read; resume with the model.path and the DeepSpeed that wrote it"
    )


def read_saved_state(folder: Path, names: Sequence[str]) -> SavedState:
    """Read the engine state that any number of ranks wrote to a folder, memory-mapped. `names` are
    the trainable parameters in the module's order. Raises CheckpointError."""
    model_files = _files_by_rank(folder, "model_states")
    optimizer_files = _files_by_rank(folder, "optim_states")
    if not model_files:
        raise CheckpointError(f"{folder}: no engine state is there")
    model = _load_mapped(model_files[0])
    if not optimizer_files:
        return _read_unsharded(model, folder, names)
    shards = [_load_mapped(file)["optimizer_state_dict"] for file in optimizer_files]
    _refuse_missing_shards(shards, folder)
    if "fp32_flat_groups" in shards[0]:
        return _read_stage_3(shards, model, folder)
    return _read_stage_1_or_2(shards, folder)


def _files_by_rank(folder: Path, kind: str) -> list[Path]:
    def rank(path: Path) -> int:
        match = re.search(r"zero_pp_rank_(\d+)", path.name)
        return int(match[1]) if match else 0

    return sorted(folder.glob(f"*{kind}.pt"), key=rank)


def _load_mapped(file: Path) -> dict[str, Any]:
    with only_data(file):
        content: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True)
    return content


def _refuse_missing_shards(shards: Sequence[dict[str, Any]], folder: Path) -> None:
    """Raises CheckpointError unless there is one optimizer file for every rank that wrote them."""
    count = shards[0]["partition_count"]
    ranks = count if isinstance(count, int) else count[0]  # at stages 1 and 2 one per group
    if len(shards) != ranks:
        raise CheckpointError(
            f"{folder}: {len(shards)} files *optim_states.pt of the {ranks} ranks that wrote it: "
            "copy the missing ones there, or resume from another checkpoint"
        )


def _read_unsharded(model: dict[str, Any], folder: Path, names: Sequence[str]) -> SavedState:
    """Reads a ZeRO-0 state, where one file has all weights and AdamW's moments by index."""
    optimizer, weights = model["optimizer"], model["module"]
    base = optimizer.get("optimizer_state_dict", optimizer)  # bfloat16 has a wrapper around AdamW
    states, saved_count = base["state"], len(base["param_groups"][0]["params"])
    if saved_count != len(names) or not weights.keys() >= set(names):
        raise _unreadable(
            folder,
            f"its {saved_count} trainable parameters are not the {len(names)} of the model",
        )
    masters = optimizer["fp32_groups"][0] if "fp32_groups" in optimizer else None
    pieces: Pieces = {}
    for index, name in enumerate(names):
        master = weights[name] if masters is None else masters[index]
        moments = {kind: [states[index][kind]] for kind in MOMENTS if index in states}
        pieces[name] = {MASTER: [master], **moments}
    return SavedState(pieces, _step(states), folder)


def _read_stage_1_or_2(shards: Sequence[dict[str, Any]], folder: Path) -> SavedState:
    """Reads ZeRO-1 or 2 shards: every rank has a flat slice of the group's parameters end to end,
    and says where in it which parameter lies."""
    pieces: Pieces = defaultdict(lambda: defaultdict(list))
    for shard in shards:
        states = shard["base_optimizer_state"]["state"]
        for group, slices in enumerate(shard["param_slice_mappings"]):
            flats = {MASTER: shard["single_partition_of_fp32_groups"][group]}
            flats |= {kind: states[group][kind] for kind in MOMENTS if group in states}
            for name, address in slices.items():
                for kind, flat in flats.items():
                    piece = flat.narrow(0, address.start, address.numel)
                    pieces[name][kind].append(piece)
    return SavedState(pieces, _step(shards[0]["base_optimizer_state"]["state"]), folder)


def _read_stage_3(
    shards: Sequence[dict[str, Any]], model: dict[str, Any], folder: Path
) -> SavedState:
    """Reads ZeRO-3 shards: every rank has an equal share of every parameter, the last one padded,
    in the order of the model file's `param_shapes`."""
    pieces: Pieces = defaultdict(lambda: defaultdict(list))
    for shard in shards:
        states = shard["optimizer_state_dict"]["state"]
        for group, shapes in enumerate(model["param_shapes"]):
            flats = {MASTER: shard["fp32_flat_groups"][group]}
            flats |= {kind: states[group][kind] for kind in MOMENTS if group in states}
            start = 0
            for name, shape in shapes.items():
                share = -(-shape.numel() // len(shards))
                for kind, flat in flats.items():
                    pieces[name][kind].append(flat.narrow(0, start, share))
                start += share
    return SavedState(pieces, _step(shards[0]["optimizer_state_dict"]["state"]), folder)


def _step(states: dict[Any, dict[str, Any]]) -> float:
    return max((float(state["step"]) for state in states.values()), default=0.0)


def restore_engine(engine: Any, stage: int, saved: SavedState) -> None:
    """Write the saved state into a new DeepSpeed engine of any ZeRO stage, with AdamW's moments
    unless it is from before the first update. Collective. Raises CheckpointError."""
    parameters = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    saved.refuse_other_names(parameters)
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    _begin_adam_state(base, _flat_parameters(optimizer, base, stage), saved.step)
    if stage in (1, 2):
        optimizer._lazy_init_hp_params_optimizer_state()
    for index, (name, parameter) in enumerate(parameters.items()):
        values = {MASTER: saved.full(name, MASTER, parameter)}
        if saved.step:
            values |= {kind: saved.full(name, kind, parameter) for kind in MOMENTS}
        if stage == 0:
            _set_unsharded(base, index, parameter, values)
        elif stage == 3:
            _set_sharded(parameter, values)
        else:
            _set_partitioned(parameter, values)
    if stage in (1, 2):
        optimizer.update_lp_params()


def _flat_parameters(optimizer: Any, base: Any, stage: int) -> list[torch.Tensor]:
    """Returns the tensors that are the keys of the optimizer's state."""
    if stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    return [parameter for group in base.param_groups for parameter in group["params"]]


def _begin_adam_state(base: Any, parameters: Sequence[torch.Tensor], step: float) -> None:
    """Give AdamW a state after `step` updates, with moments of zero to be filled in. Each parameter
    has its own `step` tensor, because AdamW increments it in place."""
    if not step:
        return
    for parameter in parameters:
        base.state[parameter] = {
            "step": torch.tensor(step, dtype=torch.float32),
            **{kind: torch.zeros_like(parameter) for kind in MOMENTS},
        }


def _set_unsharded(base: Any, index: int, parameter: Any, values: dict[str, torch.Tensor]) -> None:
    master = base.param_groups[0]["params"][index]
    parameter.data.copy_(values[MASTER])
    master.data.copy_(values[MASTER])
    for kind in values.keys() - {MASTER}:
        base.state[master][kind].copy_(values[kind])


def _set_partitioned(parameter: Any, values: dict[str, torch.Tensor]) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    safe_set_full_fp32_param(parameter, values[MASTER])
    for kind in values.keys() - {MASTER}:
        safe_set_full_optimizer_state(parameter, values[kind], kind)


def _set_sharded(parameter: Any, values: dict[str, torch.Tensor]) -> None:
    """Writes full values into a ZeRO-3 parameter: its low-precision weight on all ranks, and this
    rank's zero-padded share of fp32 value and moments. Collective."""
    import deepspeed
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            parameter.data.copy_(values[MASTER])
    share = parameter.ds_tensor.numel()
    start = share * torch.distributed.get_rank()
    for kind, value in values.items():
        shard = torch.zeros(share)
        part = value.flatten()[start : start + share]
        shard[: part.numel()] = part
        if kind == MASTER:
            safe_set_local_fp32_param(parameter, shard)
        else:
            safe_set_local_optimizer_state(parameter, shard, kind)
