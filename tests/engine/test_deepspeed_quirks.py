"""Each change from outside still reaches DeepSpeed (0.19), and is still needed. What is done to
torch.load has its test in test_no_code_from_checkpoints.py."""

import datetime
import inspect
import sys
from types import SimpleNamespace

import deepspeed
import torch

from grpo_replay.engine.deepspeed_quirks import set_group_timeout, without_shared_memory_operator


def test_a_group_that_deepspeed_forms_has_our_time_out(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda *a, **k: asked.append((a, k)))
    backend = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", backend)
    set_group_timeout(datetime.timedelta(seconds=7))
    deepspeed.comm.new_group([0])
    assert asked == [(([0],), {"timeout": datetime.timedelta(seconds=7)})]
    of_deepspeed = sys.modules["deepspeed.comm.torch"].TorchBackend.new_group
    assert list(inspect.signature(of_deepspeed).parameters) == ["self", "ranks"]


def test_no_shared_memory_operator_is_compiled(monkeypatch):
    build = sys.modules["deepspeed.comm.torch"].build_shm_op
    loaded = []
    builder = SimpleNamespace(
        NAME="deepspeed_shm_comm", load=lambda: loaded.append(1), absolute_name=lambda: "shm"
    )
    accelerator = SimpleNamespace(create_op_builder=lambda name: builder)
    monkeypatch.setitem(build.__globals__, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", {builder.NAME: True})
    build()
    assert loaded == [1]
    without_shared_memory_operator()
    assert build() is None and loaded == [1]
