"""Sizes of what a run stores, in bytes: the buffer, the rollout files, a checkpoint."""

GIB = 2**30
FP32 = 4
MOMENTS = 8
"""Bytes per parameter of an fp32 value, and of Adam's two moments."""


def stored_bytes(rollouts: float, prompt_tokens: float, completion_tokens: float) -> float:
    """Host memory of rollouts in the buffer, from their mean lengths: ids in int32, behaviour and
    sampler log-probs in float32, and 1,000 bytes of Python objects per rollout (measured). The
    buffer does not store their text."""
    return rollouts * (4 * prompt_tokens + (4 + 4 + 4) * completion_tokens + 1000)


def logged_bytes(rollouts: float, prompt_tokens: float, completion_tokens: float) -> float:
    """Size of rollouts in the file of a step, before compression, which gains little on log-probs:
    the same arrays, about four bytes of text per token, and 256 bytes of scalars per rollout."""
    return rollouts * (4 * prompt_tokens + (4 + 4 + 4 + 4) * completion_tokens + 256)


def checkpoint_bytes(parameters: int, dtype_bytes: int, zero_stage: int, adapters: int = 0) -> int:
    """Size of a checkpoint without the buffer, over all ranks: the parameters in model/, and again
    in engine/ below ZeRO-3 (which derives them from its fp32 master weights); Adam's moments; and
    the master weights, except with fp32 parameters and ZeRO-0. With LoRA adapters, the merged
    parameters in model/, and all the rest of the adapters alone, which are also in adapter/."""
    copies = 1 if zero_stage == 3 else 2
    has_masters = dtype_bytes < FP32 or zero_stage > 0
    per_trained = copies * dtype_bytes + MOMENTS + (FP32 if has_masters else 0)
    if adapters:
        return parameters * dtype_bytes + adapters * per_trained
    return parameters * per_trained


def to_gib(size: float) -> float:
    """GiB to three places."""
    return round(size / GIB, 3)
