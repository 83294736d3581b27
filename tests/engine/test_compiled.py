"""Compiled layers and head: values, gradients, the number of graphs, and models that break."""

import functools

import numpy as np
import pytest
import torch
from core_engine import first_gradient, make_rows, open_engine, parameters, relative

from grpo_replay.engine import compiled, policy_module
from grpo_replay.errors import ModelError

KINDS = {
    "padded": {},
    "bf16, checkpointing": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "LoRA, checkpointing": {"lora": {"r": 4}, "gradient_checkpointing": True},
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02}


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Graphs are captured and differentiated as ever, and run without being made faster, which
    takes a C++ compiler minutes. Returns torch's counters."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    policy_module.compiled_chunks.cache_clear()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield torch._dynamo.utils.counters
    torch._dynamo.reset()
    policy_module.compiled_chunks.cache_clear()


def one_update(processes, rows, compiles, model, stage=2, **sections):
    """(log-probs, gradient, parameters) after one update."""
    with open_engine(
        processes, model=model | {"compile": compiles}, engine={"zero_stage": stage}, **sections
    ) as engine:
        assert not engine.notices
        logprobs = np.concatenate(engine.logprobs(rows))
        engine.update(rows)
        return logprobs, first_gradient(engine), parameters(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_is_uncompiled_to_rounding(processes, graphs, kind):
    rows, model = make_rows(8), KINDS[kind]
    tolerance = TOLERANCE[model.get("dtype", "float32")]
    plain = one_update(processes, rows, False, model)
    assert not graphs["stats"]
    found = one_update(processes, rows, True, model)
    assert graphs["stats"]["unique_graphs"]
    assert np.abs(found[0] - plain[0]).max() < 10 * tolerance
    assert relative(found[1], plain[1]) < tolerance


def test_one_graph_serves_all_lengths(processes, graphs):
    batch = {"max_tokens_per_microbatch": 100}
    with open_engine(processes, model={"compile": True}, batch=batch) as engine:
        engine.update(make_rows(12))
        before = graphs["stats"]["unique_graphs"]
        for number in (5, 7, 9):
            rows = make_rows(number, seed=number)
            engine.logprobs(rows)
            engine.update(rows)
        assert graphs["stats"]["unique_graphs"] <= before + 4  # of one row: both passes, twice
    assert not graphs["graph_break"]


def test_a_model_that_breaks_is_not_compiled(processes, monkeypatch):
    def is_broken(layer, *arguments, **options):
        raise RuntimeError("no kernel for this layer")

    monkeypatch.setattr(torch.nn.Module, "compile", is_broken)
    with (
        pytest.raises(ModelError, match="not compiled: RuntimeError: no kernel"),
        open_engine(processes, model={"compile": True}),
    ):
        pass


def test_other_logprobs_are_refused(processes, monkeypatch):
    chunks = policy_module.PLAIN_CHUNKS

    def wrong(*arguments):
        logprobs_C, *others = chunks.logprobs(*arguments)
        return logprobs_C * 1.1, *others

    monkeypatch.setattr(compiled, "compiled_chunks", lambda: chunks._replace(logprobs=wrong))
    with (
        pytest.raises(ModelError, match=r"not compiled: log-probs differ by"),
        open_engine(processes, model={"compile": True}),
    ):
        pass
