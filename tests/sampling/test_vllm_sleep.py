"""Sleep mode, driven on a CPU engine through vLLM's own executor, worker and sleep backend."""

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from fake_allocator import FakeAllocator, adopt_engine, cuda_sleep
from tiny_policy import by_key, changed, gaps, make_requests, push, tiny_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import SamplerError
from grpo_replay.sampling.sampler_protocol import SamplerOpening

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def opened_allocator(tied) -> Iterator[tuple]:
    from grpo_replay.sampling.vllm_local import VllmLocalSampler

    with cuda_sleep() as allocator:
        sampler = VllmLocalSampler.open(
            SamplerOpening.from_recipe(tiny_recipe(tied.folder), str(tied.folder), Comm())
        )
        adopt_engine(allocator, sampler)
        yield sampler, allocator
        sampler.close()


@pytest.fixture
def sampler(opened_allocator, tied):
    sampler, _ = opened_allocator
    push(sampler, tied.model)
    return sampler


@pytest.fixture
def allocator(opened_allocator) -> FakeAllocator:
    return opened_allocator[1]


def weight_bytes(allocator: FakeAllocator) -> int:
    return sum(ref().nbytes for tag, ref in allocator.tensors if tag == "weights")


def test_after_sampling_nothing_stays_and_the_next_push_is_sampled_from(sampler, allocator, tied):
    """Every weight was NaN by then: one that the push did not replace would be seen."""
    for seed in range(2):
        requests = make_requests()
        assert len(list(sampler.generate(requests))) == len(requests)
        sampler.sleep(keep_weights=False)
        assert (allocator.resident_bytes, allocator.host_bytes) == (0, 0)
        model = changed(tied, seed)
        version = push(sampler, model)
        assert allocator.resident_bytes == weight_bytes(allocator), "the cache sleeps on"
        completions = list(sampler.generate(requests))
        assert gaps(model, requests, completions).max() < 1e-4
        assert {c.policy_version for c in completions} == {version}


def test_after_an_evaluation_the_weights_wait_in_host_memory(sampler, allocator, tied):
    requests = make_requests(temperature=0.0)
    before = by_key(list(sampler.generate(requests)))
    sampler.sleep()
    assert allocator.resident_bytes == 0
    assert allocator.host_bytes == weight_bytes(allocator)
    again = by_key(list(sampler.generate(requests)))
    assert allocator.host_bytes == 0
    for key, completion in before.items():
        np.testing.assert_array_equal(completion.token_ids, again[key].token_ids)


def test_a_wake_that_runs_out_of_memory_is_explained_and_can_be_tried_again(
    sampler, allocator, tied
):
    sampler.sleep()
    allocator.fail_to_wake = 1
    with pytest.raises(SamplerError, match="could not wake its weights"):
        sampler.generate(make_requests())
    assert len(list(sampler.generate(make_requests()))) == 24

    sampler.sleep(keep_weights=False)
    allocator.fail_to_wake = 1
    pushed = iter([(name, p.detach()) for name, p in tied.model.named_parameters()])
    with pytest.raises(SamplerError, match="could not wake its weights"):
        sampler.load_weights(pushed, sampler.policy_version + 1)
    assert next(pushed, None) is None, "other ranks gather with this one: the tensors must be drawn"
    push(sampler, tied.model)
    assert len(list(sampler.generate(make_requests()))) == 24


def test_closing_asleep_frees_nothing_twice(tied):
    from grpo_replay.sampling.vllm_local import VllmLocalSampler

    with cuda_sleep() as allocator:
        sampler = VllmLocalSampler.open(
            SamplerOpening.from_recipe(tiny_recipe(tied.folder), str(tied.folder), Comm())
        )
        adopt_engine(allocator, sampler)
        sampler.sleep()
        sampler.close()
        del sampler
        gc.collect()
    kept = [ref() for _, ref in allocator.tensors if ref() is not None]
    assert len(allocator.tensors) > 30 and len(kept) <= 1, "vLLM keeps the table of rotations"
    assert allocator.freed_twice == []
