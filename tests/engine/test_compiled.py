"""Compiled layers and head: values, gradients, the number of graphs, and models that break."""

import functools

import numpy as np
import pytest
import torch
from core_engine import (
    engine_recipe,
    first_gradient,
    make_rows,
    open_engine,
    parameters,
    relative,
)

from grpo_replay.engine import compiled, policy_module
from grpo_replay.errors import ModelError
from grpo_replay.recipe import Recipe

KINDS = {
    "bf16, checkpointing": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "LoRA, checkpointing": {"lora": {"r": 4}, "gradient_checkpointing": True},
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02}
CHUNKED = {"zero_stage": 2, "logprob_chunk_tokens": 7}
PLAIN = policy_module.PLAIN_CHUNKS


@pytest.fixture
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


def one_update(processes, rows, compiles, model):
    """(log-probs, gradient, parameters) after one update."""
    given = model | {"compile": compiles}
    with open_engine(processes, model=given, engine=CHUNKED) as engine:
        logprobs = np.concatenate(engine.logprobs(rows))
        engine.update(rows)
        return logprobs, first_gradient(engine), parameters(engine)


@pytest.mark.slow
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


@pytest.mark.slow
def test_layers_and_lengths_share_graphs_that_are_plain_to_rounding(processes, graphs):
    """The tiny model has three layers, each of them with and without gradients."""
    rows = make_rows(8)
    plain = one_update(processes, rows, False, {})
    assert not graphs["stats"]
    with open_engine(processes, model={"compile": True}, engine={"zero_stage": 2}) as engine:
        found = np.concatenate(engine.logprobs(rows))
        engine.update(rows)
        assert np.abs(found - plain[0]).max() < 1e-4
        assert relative(first_gradient(engine), plain[1]) < 1e-5
        before = graphs["stats"]["unique_graphs"]
        for number in (5, 7):
            engine.logprobs(rows[:number])
            engine.update(rows[:number])
        assert graphs["stats"]["unique_graphs"] == before <= 5
    assert not graphs["graph_break"]


def test_the_compiled_head_is_the_plain_one_to_rounding(graphs):
    given = np.random.default_rng(0)
    hidden = torch.tensor(given.normal(size=(17, 8)), dtype=torch.float32)
    targets = torch.tensor(given.integers(0, 30, 17))
    weight = torch.nn.Linear(8, 30)
    settings = policy_module.LogitSettings(scale=0.5, cap=20.0)
    found = []
    for chunks in (PLAIN, policy_module.compiled_chunks()):
        head = policy_module.LogprobHead(weight, 0.7, 5, settings)
        head.chunks = chunks
        inputs = (hidden.clone().requires_grad_(), head.weight, head.bias)
        logprobs, entropies = head(inputs[0], targets)
        gradients = torch.autograd.grad((logprobs * torch.arange(17)).sum(), inputs)
        found.append([logprobs.detach(), entropies.detach(), *gradients])
    assert graphs["stats"]["unique_graphs"]
    for plain, other in zip(*found, strict=True):
        assert relative(other, plain) < 1e-5


def test_a_model_that_breaks_is_refused(processes, monkeypatch):
    def is_broken(layer, *arguments, **options):
        raise RuntimeError("no kernel for this layer")

    monkeypatch.setattr(torch.nn.Module, "compile", is_broken)
    with (
        pytest.raises(ModelError, match=r"model.compile true: .* RuntimeError: no kernel .* false"),
        open_engine(processes, model={"compile": True}),
    ):
        pass


def test_a_gpu_compiles_by_default_and_what_breaks_runs_on_uncompiled(processes, monkeypatch):
    recipe = engine_recipe()
    chosen = [recipe.compiles(stage, on_cuda) for stage in (2, 3) for on_cuda in (True, False)]
    assert chosen == [True, False, False, False]
    rows = make_rows(3)

    def breaks(layer, **_):
        layer._compiled_call_impl = pytest.fail  # what a call runs from then on
        raise RuntimeError("no kernel for this layer")

    with open_engine(processes) as engine:
        plain = engine.logprobs(rows)
    monkeypatch.setattr(torch.nn.Module, "compile", breaks)
    monkeypatch.setattr(Recipe, "compiles", lambda *_: True)
    with open_engine(processes) as engine:
        (notice,) = engine.notices
        assert notice.startswith("model.compile auto: ") and "no kernel for this layer" in notice
        for own, other in zip(engine.logprobs(rows), plain, strict=True):
            assert np.array_equal(own, other)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (PLAIN._replace(logprobs=lambda *a: [1.1 * each for each in PLAIN.logprobs(*a)]), "log-"),
        (PLAIN._replace(gradient=lambda *a: (-PLAIN.gradient(*a)[0], None)), r"gradients by 2 "),
    ],
    ids=["log-probs", "gradients"],
)
def test_another_result_is_refused(processes, monkeypatch, wrong, told):
    monkeypatch.setattr(
        compiled, "compile_policy", lambda module: setattr(module.head, "chunks", wrong)
    )
    with (
        pytest.raises(ModelError, match=rf"cannot be compiled: .*{told}"),
        open_engine(processes, model={"compile": True}, engine=CHUNKED),
    ):
        pass
