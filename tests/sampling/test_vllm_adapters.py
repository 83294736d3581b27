"""vLLM in this process with LoRA: one base, and an adapter of its own name for every version."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_allocator import adopt_engine, cuda_sleep
from tiny_policy import Policy, adapted, gaps, lora_recipe, make_requests, named_tensors

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.weights import pushed_weights
from grpo_replay.errors import RecipeError, SamplerError
from grpo_replay.recipe import LoraSection, resolve_recipe
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.vllm_requests import engine_arguments


@pytest.fixture(scope="module")
def opened(tied: Policy) -> Iterator[tuple]:
    from grpo_replay.sampling.vllm_local import VllmLocalSampler

    with cuda_sleep() as allocator:
        sampler = VllmLocalSampler.open(
            SamplerOpening.from_recipe(lora_recipe(tied), str(tied.folder), Comm())
        )
        adopt_engine(allocator, sampler)
        yield sampler, allocator
        folder = Path(sampler._files.path).parent
        assert [each.name for each in folder.glob("version-*")] == [sampler._files.path.name]
        sampler.close()
        assert not folder.exists()


@pytest.mark.vllm
def test_every_version_is_sampled_from_its_own_adapter(opened, tied):
    """The prompts are the same: their keys must not be those of the version before."""
    sampler, _ = opened
    requests = make_requests()
    if sampler.policy_version == 0:
        assert gaps(tied.model, requests, list(sampler.generate(requests))).max() < 1e-4
    for seed in range(3):
        model, version = adapted(tied, seed), sampler.policy_version + 1
        sampler.load_weights(pushed_weights(model).items(), version)
        completions = list(sampler.generate(requests))
        assert gaps(model, requests, completions).max() < 1e-4
        assert gaps(tied.model, requests, completions).mean() > 0.1
        assert {c.policy_version for c in completions} == {version}


@pytest.mark.vllm
def test_asleep_it_keeps_the_base_in_host_memory_and_takes_the_next_adapter(opened, tied):
    sampler, allocator = opened
    requests = make_requests()
    list(sampler.generate(requests))
    sampler.sleep(keep_weights=False)
    assert allocator.resident_bytes == 0 < allocator.host_bytes
    with pytest.raises(SamplerError, match="discarded"):
        sampler.generate(requests)
    model = adapted(tied, 9)
    sampler.load_weights(pushed_weights(model).items(), sampler.policy_version + 1)
    assert gaps(model, requests, list(sampler.generate(requests))).max() < 1e-4


@pytest.mark.vllm
def test_other_tensors_than_its_adapters_are_refused(opened, tied):
    sampler, _ = opened
    named = dict(pushed_weights(adapted(tied, 1)))
    missing = named.popitem()[0]
    for offered, problem in (
        (named.items(), f"missing tensor {missing}"),
        (named_tensors(tied.model), "unknown tensor model.embed_tokens.weight"),
    ):
        with pytest.raises(SamplerError, match=problem):
            sampler.load_weights(offered, sampler.policy_version + 1)
        with pytest.raises(SamplerError, match="left incomplete"):
            sampler.generate(make_requests())
    model = adapted(tied, 2)
    sampler.load_weights(pushed_weights(model).items(), sampler.policy_version + 2)
    requests = make_requests()
    assert gaps(model, requests, list(sampler.generate(requests))).max() < 1e-4


@pytest.mark.vllm
def test_adapters_that_vllm_does_not_take_are_refused_when_it_opens(tied, monkeypatch):
    from vllm.lora.peft_helper import PEFTHelper

    from grpo_replay.sampling.vllm_local import VllmLocalSampler

    monkeypatch.setattr(PEFTHelper, "_validate_features", lambda _: ["no such target"])
    with pytest.raises(SamplerError, match=r"no such target.*set sampling.lora merged"):
        VllmLocalSampler.open(
            SamplerOpening.from_recipe(lora_recipe(tied), str(tied.folder), Comm())
        )


def test_a_rank_takes_the_room_of_the_next_that_vllm_has(tied):
    def room(**lora) -> dict:
        recipe = lora_recipe(tied, LoraSection(**lora))
        found = engine_arguments(recipe.sampling, recipe.model, 100, on_gpu=False)
        return {name: value for name, value in found.items() if "lora" in name}

    assert room(r=1) == {
        "enable_lora": True, "max_lora_rank": 1, "max_loras": 1, "max_cpu_loras": 1,
    }  # fmt: skip
    assert room(r=4)["max_lora_rank"] == 8
    assert room(r=8, rank_pattern={"q_proj": 200})["max_lora_rank"] == 256
    assert room() == {}
    with pytest.raises(RecipeError, match=r"model.lora.r 513: .*sampling.lora merged"):
        room(r=513)


def test_a_gpu_takes_no_adapters_in_float32(tied):
    recipe = lora_recipe(tied, LoraSection(r=4))
    with pytest.raises(RecipeError, match=r"model.dtype float32 with model.lora.*merged"):
        engine_arguments(recipe.sampling, recipe.model, 100, on_gpu=True)
    for words in ({"model": {"dtype": "bfloat16"}}, {"sampling": {"lora": "merged"}}):
        other = resolve_recipe([recipe.model_dump(mode="json"), words])
        assert engine_arguments(other.sampling, other.model, 100, on_gpu=True)
