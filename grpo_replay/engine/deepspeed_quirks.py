"""Where DeepSpeed (0.19) is changed from outside, because it has no setting for it."""

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
    """For CPU ranks DeepSpeed would compile one, which needs a C++ compiler and a minute; gloo does
    without. On a GPU nothing asks for this table, and filling it prints a warning to stdout for
    every operator that lacks a CUDA toolkit."""
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


def set_group_timeout(timeout: datetime.timedelta) -> None:
    """Set the time-out of the groups that DeepSpeed forms, such as the copy of the world group on
    which it trains. DeepSpeed passes none, and torch's default is ten minutes over NCCL."""
    import deepspeed

    backend = deepspeed.comm.comm.cdb
    backend.new_group = functools.partial(torch.distributed.new_group, timeout=timeout)


@contextmanager
def only_data(place: Path) -> Iterator[None]:
    """A context in which torch.load, also when DeepSpeed calls it, makes tensors, containers and
    three plain classes of DeepSpeed, and refuses anything else in a file: nothing of it is called.
    Raises CheckpointError for what it refuses."""
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
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"{found[1]}, which" if found else "something that"
        raise CheckpointError(
            f"{place}: a file there holds {what} is no state of an optimizer: it is damaged, or "
            "made to run code. Nothing of it was run. Resume from another checkpoint"
        ) from error
    finally:
        torch.load = load
