"""Rows packed into one sequence: the results are those of padded rows."""

import importlib.util
from dataclasses import asdict

import numpy as np
import pytest
import torch
from architectures import WITH_STATE, random_model
from core_engine import (
    first_gradient,
    make_rows,
    open_engine,
    parameters,
    relative,
)
from mini_batches import plan_microbatches
from slow_tests import slow_except
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
)

from grpo_replay.engine.microbatches import MicroBatch
from grpo_replay.engine.model_trials import keeps_rows_apart
from grpo_replay.engine.models import load_policy
from grpo_replay.engine.policy_module import PolicyModule
from grpo_replay.engine.shared_prompts import Layout
from grpo_replay.errors import RecipeError
from grpo_replay.recipe import ModelSection


def two_updates(processes, packing, **sections):
    rows = make_rows(9)
    batch = {"max_tokens_per_microbatch": 90, "packing": packing}
    loss, sampling = {"beta": 0.1}, {"temperature": 0.7, "max_completion_length": 20}
    with open_engine(processes, batch=batch, loss=loss, sampling=sampling, **sections) as engine:
        logprobs, reference = engine.logprobs(rows), engine.reference_logprobs(rows)
        first, gradient = engine.update(rows), first_gradient(engine)
        moved, second = parameters(engine), engine.update(rows[:1])
    values = np.concatenate([*logprobs, *reference])
    return rows, first, second, values, gradient, moved


@pytest.mark.parametrize(
    ("attention", "stage", "checkpointing"),
    [("sdpa", 0, False), pytest.param("eager", 3, True, marks=pytest.mark.slow)],
)
def test_packed_rows_give_the_update_of_padded_rows(processes, attention, stage, checkpointing):
    sections = {
        "engine": {"zero_stage": stage},
        "model": {"attn_implementation": attention, "gradient_checkpointing": checkpointing},
    }
    rows, padded, _, values, gradient, moved = two_updates(processes, False, **sections)
    _, packed, alone, found, its_gradient, its_moved = two_updates(processes, True, **sections)
    assert np.abs(found - values).max() < 1e-5
    assert relative(its_gradient, gradient) < 1e-6
    assert relative(its_moved, moved) < 1e-6
    assert packed.loss == pytest.approx(padded.loss, rel=1e-6)
    assert packed.grad_norm == pytest.approx(padded.grad_norm, rel=1e-6)
    assert packed.reference_kl == pytest.approx(padded.reference_kl, rel=1e-5)
    for a, b in zip(packed.outcomes, padded.outcomes, strict=True):
        assert asdict(a) == pytest.approx(asdict(b), rel=5e-5, abs=1e-5)
    assert padded.padding_share > 0 == packed.padding_share == alone.padding_share
    tokens = sum(row.length_tokens for row in rows)
    assert packed.micro_batches == -(-tokens // 90) > 1


def test_a_model_that_mixes_the_rows_of_a_pack_is_refused(processes, monkeypatch):
    with (
        pytest.raises(RecipeError, match=r"batch\.packing true: a model of type lfm2 does not"),
        open_engine(processes, random_model("lfm2"), batch={"packing": True}),
    ):
        pass
    monkeypatch.setattr("grpo_replay.recipe.Recipe.packs", lambda *_: True)  # as on a GPU
    for kind, packs in (("lfm2", False), ("qwen3", True)):
        with open_engine(processes, random_model(kind)) as engine:
            assert (engine.update(make_rows(6)).padding_share == 0) is packs


APART = ["qwen2", "qwen3", "llama", "gemma3_text", "mistral", "qwen3_moe"]


@pytest.mark.parametrize("kind", slow_except(["lfm2", *APART], ["lfm2", *WITH_STATE, *APART]))
def test_which_models_keep_rows_apart_is_found_by_trying(kind):
    model = random_model(kind)
    module = PolicyModule(model, 1.0, 1024)

    @torch.no_grad()
    def forward(pack: MicroBatch) -> np.ndarray:
        return module(*inputs(pack, "cpu"))[0].numpy()

    assert keeps_rows_apart(forward, model.config) is (kind in APART)


def inputs(batch: MicroBatch, device: str) -> list[torch.Tensor | int | None]:
    arrays = (
        batch.input_ids_SL, batch.positions_C, batch.target_ids_C, batch.position_ids_SL,
        batch.bounds,
    )  # fmt: skip
    tensors = [None if each is None else torch.as_tensor(each, device=device) for each in arrays]
    return [*tensors, int(batch.widths_S.max())]


def test_flash_attention_gets_the_bounds_of_packed_rows(processes, monkeypatch):
    """transformers would find them in the position ids, with a look at the GPU in every layer."""
    given = []

    def attend(module, query, key, value, mask, **arguments):
        given.append(arguments)
        return torch.zeros_like(query.transpose(1, 2)), None

    AttentionInterface.register("a_flash_of_tests", attend)
    AttentionMaskInterface.register("a_flash_of_tests", lambda *_, **__: None)
    model = random_model("qwen3")
    model.config._attn_implementation = "a_flash_of_tests"
    rows = make_rows(3)
    with open_engine(processes, model, batch={"packing": True}) as engine:
        given.clear()  # of the trials
        engine.logprobs(rows)
    assert len(given) == 2  # layers
    lengths = sorted(row.length_tokens for row in rows)
    for arguments in given:
        assert sorted(arguments["cu_seq_lens_q"].diff().tolist()) == lengths
        assert arguments["cu_seq_lens_k"] is arguments["cu_seq_lens_q"]
        assert arguments["max_length_q"] == arguments["max_length_k"] == lengths[-1]
        assert arguments["cu_seq_lens_q"].dtype == torch.int32


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_packed_rows_on_a_gpu_give_the_gradient_of_padded_rows_under_sdpa(attention):
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    if importlib.util.find_spec(package[attention]) is None:
        pytest.skip(f"{package[attention]} is not installed")
    rows = make_rows(9)

    def backward(kind: str, packing: bool) -> tuple[torch.Tensor, torch.Tensor]:
        policy = load_policy(ModelSection(dtype="bfloat16", attn_implementation=kind), 0).cuda()
        module = PolicyModule(policy.train(), 1.0, 1024)
        ((batch,),) = plan_microbatches(rows, Layout(10**6, packing), 1)
        logprobs, _ = module(*inputs(batch, "cuda"))
        logprobs.mean().backward()
        gradients = [p.grad.flatten().float() for p in module.parameters()]
        return logprobs.detach(), torch.cat(gradients)

    expected, found = backward("sdpa", False), backward(attention, True)
    assert relative(found[0], expected[0]) < 0.02
    assert relative(found[1], expected[1]) < 0.05
