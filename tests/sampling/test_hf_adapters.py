"""The hf sampler with LoRA: a base of its own, to which updates bring the adapters unmerged."""

import numpy as np
import pytest
import torch
from core_engine import engine_recipe, make_rows, open_engine, tiny_model

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import SamplerError
from grpo_replay.replay.batch import logprob_row
from grpo_replay.sampling.hf import HfSampler
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.training.weight_sync import sync_weights
from grpo_replay.types import GenerationRequest, RequestKey

SECTIONS = {
    "model": {"dtype": "bfloat16", "lora": {"r": 8, "use_rslora": True}},
    "optimizer": {"learning_rate": 1e-4},
}


def opened() -> HfSampler:
    recipe = engine_recipe(**SECTIONS)
    return HfSampler.open(SamplerOpening.from_recipe(recipe, recipe.model.path, Comm()))


def requests() -> list[GenerationRequest]:
    prompt = np.arange(5, 10, dtype=np.int32)
    return [GenerationRequest(RequestKey(1, 0, i), prompt, i, 20) for i in range(16)]


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_parameters()}


def share_of_change(engine, sampler: HfSampler) -> float:
    """The projection of the change of all adapted weights at the sampler on that at the trainer."""
    base = tiny_model().state_dict()
    along = whole = 0.0
    for name, layer in engine._model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        theirs = sampler._model.get_submodule(name)
        wanted, found = (
            each.scaling["default"]
            * each.lora_B["default"].weight.double()
            @ each.lora_A["default"].weight.double()
            for each in (layer, theirs)
        )
        assert torch.equal(theirs.base_layer.weight, base[f"{name}.weight"].bfloat16())
        along, whole = along + float((found * wanted).sum()), whole + float((wanted**2).sum())
    assert whole > 0
    return along / whole


def test_a_bfloat16_sampler_computes_with_the_adapters_of_the_trainer(processes):
    sampler = opened()
    with open_engine(processes, **SECTIONS) as engine:
        for seed in range(2):
            engine.update(make_rows(6, seed))
        sync_weights(engine, sampler, 1)
        assert share_of_change(engine, sampler) == 1.0
        adapters = {n: t for n, t in tensors_of(sampler._model).items() if "lora_" in n}
        trained = tensors_of(engine._model)
        assert all(torch.equal(adapters[name], trained[name]) for name in adapters)
        found = sorted(sampler.generate(requests()), key=lambda each: each.key)
        rows = [logprob_row(r.prompt_token_ids, c.token_ids)
                for r, c in zip(requests(), found, strict=True)]  # fmt: skip
        gaps = [np.abs(c.sampler_logprobs - lp)
                for c, lp in zip(found, engine.logprobs(rows), strict=True)]  # fmt: skip
    assert np.concatenate(gaps).mean() < 0.02  # bfloat16's own noise
    assert {each.policy_version for each in found} == {1}


def test_it_begins_as_the_base_and_takes_no_other_weights_than_adapters():
    sampler = opened()
    base = tensors_of(sampler._model)
    with pytest.raises(SamplerError, match=r"unknown tensor model.embed_tokens.weight"):
        sampler.load_weights(tiny_model().named_parameters(), 1)
    with pytest.raises(SamplerError, match="version 1 was left incomplete"):
        sampler.generate(requests())
    assert all(
        torch.equal(tensor, base[name]) for name, tensor in sampler._model.named_parameters()
    )


def test_asleep_without_weights_it_keeps_its_base():
    sampler = opened()
    before = tensors_of(sampler._model)
    adapters = {name: tensor for name, tensor in before.items() if "lora_" in name}
    sampler.sleep(keep_weights=False)
    asleep = tensors_of(sampler._model)
    assert all((asleep[name].numel() == 0) == (name in adapters) for name in before)
    with pytest.raises(SamplerError, match="discarded"):
        sampler.generate(requests())
    sampler.load_weights(adapters.items(), 1)
    after = tensors_of(sampler._model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert len(list(sampler.generate(requests()))) == 16
