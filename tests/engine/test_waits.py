"""Where the host would wait for a GPU, found on a CPU: what reads values, or sizes a result by
them. What DeepSpeed does on a GPU alone is not seen."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from core_engine import ALL_AT_ONCE, ONE_BY_ONE, make_rows, open_engine, share_prompts
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default,
    aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
# Whether position ids are packed, in each forward pass:
TRANSFORMERS_LOOKS = "masking_utils.py:find_packed_sequence_indices"


class Waits(TorchDispatchMode):
    def __init__(self, monkeypatch):
        super().__init__()
        self.places = Counter()
        for name in ("cpu", "tolist"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method):
        def counted(tensor):
            self._note()
            return method(tensor)

        return counted

    def _note(self):
        frame = sys._getframe(2)
        while "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        self.places[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        masks = function in BY_INDEX and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        if masks or function in READS:
            self._note()
        return function(*args, **(kwargs or {}))


def waits_of(processes, rows, limit, shared, **sections):
    """(forward passes of an update, where a log-prob pass and an update wait)."""
    batch = {"max_tokens_per_microbatch": limit}
    with open_engine(processes, batch=batch, engine={"zero_stage": 2}, **sections) as engine:
        if shared:
            share_prompts(engine)
        engine.update(rows)
        with pytest.MonkeyPatch.context() as monkeypatch, Waits(monkeypatch) as waits:
            engine.logprobs(rows)
            passes = engine.update(rows).micro_batches
    return passes, waits.places


@pytest.mark.parametrize("shared", [False, True])
def test_the_host_waits_as_often_with_one_micro_batch_as_with_many(processes, shared):
    rows = make_rows(8, per_prompt=2 if shared else 1)
    one, few = waits_of(processes, rows, ALL_AT_ONCE, shared)
    many, found = waits_of(processes, rows, 2 * ONE_BY_ONE, shared)
    assert one < many
    assert few["deepspeed_engine.py:on_host"] == 2  # log-probs, and statistics before the step
    assert few["deepspeed_engine.py:_step_optimizer"] == 1  # the norm after it
    del few[TRANSFORMERS_LOOKS], found[TRANSFORMERS_LOOKS]
    assert found == few
