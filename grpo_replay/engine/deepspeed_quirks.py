"""Changes DeepSpeed (0.19) from outside where it has no setting."""

import datetime
import functools
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_replay.errors import CheckpointError


def without_shared_memory_operator() -> None:
    """Keep DeepSpeed from compiling its shared-memory operator for CPU ranks, which needs a C++
    compiler and a minute: gloo does without it. Not for GPUs, where nothing reads this table, and
    filling it prints a warning to stdout for every operator that lacks a CUDA toolkit."""
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


def set_group_timeout(timeout: datetime.timedelta) -> None:
    """Set the time-out of the process groups that DeepSpeed forms, such as the copy of the world
    group that it trains on. DeepSpeed passes none, and torch's default over NCCL is ten minutes."""
    import deepspeed

    backend = deepspeed.comm.comm.cdb
    backend.new_group = functools.partial(torch.distributed.new_group, timeout=timeout)


@contextmanager
def only_data(path: Path) -> Iterator[None]:
    """A context in which torch.load, also called by DeepSpeed, loads only tensors, containers and
    three plain classes of DeepSpeed. It refuses any other object without calling it. Raises
    CheckpointError, which names `path`, for such an object."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    load = torch.load

    def load_data(*arguments: Any, **keywords: Any) -> Any:
        return load(*arguments, **{**keywords, "weights_only": True})

    torch.load = load_data
    try:
        allowed = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        with torch.serialization.safe_globals(allowed):
            yield
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        content = f"{refused[1]}, which" if refused else "something that"
        raise CheckpointError(
            f"{path}: a file there holds {content} is no state of an optimizer: it is damaged, or "
            "made to run code. Nothing of it was run. Resume from another checkpoint"
        ) from error
    finally:
        torch.load = load
