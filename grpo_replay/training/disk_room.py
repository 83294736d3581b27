"""Estimates the size of a checkpoint, and checks that the disk has room for those of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.recipe import CheckpointSection
from grpo_replay.storage.atomic import free_bytes
from grpo_replay.storage.checkpoint import checkpoint_bytes_on_disk, leftovers, list_checkpoints

GIB = 2**30
FP32 = 4
MOMENTS = 8
"""Bytes per parameter of an fp32 value, and of Adam's two moments."""


class CheckpointSize(NamedTuple):
    """Bytes of a checkpoint without the buffer, over all ranks. `usual` counts for every
    checkpoint; `merged` is added where LoRA's merged model is written (`Recipe.saves_model`)."""

    usual: int
    merged: int = 0


def checkpoint_size(
    parameters: int, dtype_bytes: int, zero_stage: int, adapters: int = 0
) -> CheckpointSize:
    """Estimate the bytes of a checkpoint from numbers of parameters. `adapters` are those of LoRA,
    the only ones that train then; 0 without LoRA.

    Trained parameters are in model/ or adapter/, and below ZeRO-3 also in engine/ (ZeRO-3 derives
    them from its fp32 master weights). Adam's moments follow, and master weights unless parameters
    are fp32 at ZeRO-0. The merged model is fp32.
    """
    copies = 1 if zero_stage == 3 else 2
    has_masters = dtype_bytes < FP32 or zero_stage > 0
    per_trained = copies * dtype_bytes + MOMENTS + (FP32 if has_masters else 0)
    merged = FP32 * parameters if adapters else 0
    return CheckpointSize((adapters or parameters) * per_trained, merged)


def to_gib(size: float) -> float:
    """Convert bytes to GiB, rounded to three decimals."""
    return round(size / GIB, 3)


def notices_of_room(
    checkpoints: Path, section: CheckpointSection, size: CheckpointSize
) -> list[str]:
    """Return a notice if the disk cannot hold `keep` checkpoints and one that is being written.
    Raises OutputDirectoryError if it cannot hold one. Unfinished checkpoints of a killed run count
    as free, because a resume removes them."""
    free = free_bytes(checkpoints) + sum(map(checkpoint_bytes_on_disk, leftovers(checkpoints)))
    existing = list_checkpoints(checkpoints)
    newest = checkpoint_bytes_on_disk(existing[-1]) if existing else 0
    largest = max(size.usual + size.merged, newest)
    if free < largest:
        raise OutputDirectoryError(
            f"a checkpoint of this run needs {to_gib(largest)} GiB, and {checkpoints} has "
            f"{to_gib(free)} GiB free: nothing was written; free space there. "
            f"{how_to_continue(existing)}"
        )
    more = max(section.keep + 1 - len(existing), 1)
    merged_models = more if section.merged == "all" else 1
    needed = more * max(size.usual, newest) + merged_models * size.merged
    if free >= needed:
        return []
    return [
        f"{checkpoints} has {to_gib(free)} GiB free, and {more} more checkpoints (checkpoint.keep "
        f"{section.keep} and one being written) take {to_gib(needed)} GiB: the run stops at the "
        "one that does not fit; make room"
    ]


def how_to_continue(kept: Sequence[Path]) -> str:
    """Advice on how to continue a run that a full disk stopped after the checkpoints `kept`."""
    if not kept:
        return "There is no earlier checkpoint: start again then"
    return f"{kept[-1].name} is complete: go on from there with --resume then"
