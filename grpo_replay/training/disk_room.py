"""The size of a checkpoint, and whether the disk has room for those of a run."""

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
    """Bytes of a checkpoint without the buffer, over all ranks: of every one, and what LoRA's
    merged model adds where it is written (`Recipe.saves_model`)."""

    usual: int
    merged: int = 0


def checkpoint_size(
    parameters: int, dtype_bytes: int, zero_stage: int, adapters: int = 0
) -> CheckpointSize:
    """The parameters that train, the model's or the `adapters` alone: in model/ or adapter/, and
    again in engine/ below ZeRO-3 (which derives them from its fp32 master weights); Adam's moments;
    and the master weights, except with fp32 parameters and ZeRO-0. The merged model is fp32."""
    copies = 1 if zero_stage == 3 else 2
    has_masters = dtype_bytes < FP32 or zero_stage > 0
    per_trained = copies * dtype_bytes + MOMENTS + (FP32 if has_masters else 0)
    merged = FP32 * parameters if adapters else 0
    return CheckpointSize((adapters or parameters) * per_trained, merged)


def to_gib(size: float) -> float:
    """GiB to three places."""
    return round(size / GIB, 3)


def notices_of_room(
    checkpoints: Path, section: CheckpointSection, size: CheckpointSize
) -> list[str]:
    """At the start: a sentence if the disk will be full before `keep` checkpoints are there and
    another is written. Raises OutputDirectoryError if there is no room for one. What a killed run
    left of a checkpoint counts as free: the resume removes it."""
    free = free_bytes(checkpoints) + sum(map(checkpoint_bytes_on_disk, leftovers(checkpoints)))
    kept = list_checkpoints(checkpoints)
    newest = checkpoint_bytes_on_disk(kept[-1]) if kept else 0
    one = max(size.usual + size.merged, newest)
    if free < one:
        raise OutputDirectoryError(
            f"a checkpoint of this run needs {to_gib(one)} GiB, and {checkpoints} has "
            f"{to_gib(free)} GiB free: nothing was written; free space there. "
            f"{what_is_left(kept)}"
        )
    more = max(section.keep + 1 - len(kept), 1)
    each = max(size.usual, newest)
    needed = more * each + size.merged * (more if section.merged == "all" else 1)
    if free >= needed:
        return []
    return [
        f"{checkpoints} has {to_gib(free)} GiB free, and {more} more checkpoints (checkpoint.keep "
        f"{section.keep} and one being written) take {to_gib(needed)} GiB: the run stops at the "
        "one that does not fit; make room"
    ]


def what_is_left(kept: Sequence[Path]) -> str:
    """A sentence: how a run goes on that the disk stopped after the checkpoints `kept`."""
    if not kept:
        return "There is no earlier checkpoint: start again then"
    return f"{kept[-1].name} is complete: go on from there with --resume then"
