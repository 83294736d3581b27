"""Asynchronous scheduling, which vLLM uses by default on a GPU and switches off on a CPU: its batch
queue of two, its scheduler that runs a token ahead, and a worker whose results come later.

Streams and events are stand-ins: on a CPU everything is done when it is asked for.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fake_allocator import adopt_engine, cuda_sleep
from tiny_policy import by_key, changed, gaps, make_requests, push, tiny_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.sampling.sampler_protocol import SamplerOpening

pytestmark = pytest.mark.vllm


class Finished:
    """A CUDA stream or event on which nothing is ever pending."""

    def __init__(self, *_args: object, **_options: object) -> None:
        self.device = torch.device("cpu")

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, *_: object) -> None: ...


@contextlib.contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    from vllm.platforms.cpu import CpuPlatform

    honest = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, config: object) -> None:
        honest(cls, config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check))
        patch.setattr(torch, "Event", Finished)
        patch.setattr(torch.cuda, "Stream", Finished)
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", Finished)
        yield


@pytest.fixture(scope="module")
def sampler(tied) -> Iterator:
    from grpo_replay.sampling.vllm_local import VllmLocalSampler

    with asynchronous_scheduling(), cuda_sleep() as allocator:
        sampler = VllmLocalSampler.open(
            SamplerOpening.from_recipe(tiny_recipe(tied.folder), str(tied.folder), Comm())
        )
        adopt_engine(allocator, sampler)
        yield sampler
        sampler.close()


def core(sampler):
    return sampler._engine.engine_core.engine_core


def test_a_batch_queue_of_two_samples_what_a_plain_engine_samples(sampler, tied, tied_sampler):
    assert core(sampler).async_scheduling and core(sampler).batch_queue_size == 2
    for seed in (1, 2):
        model = changed(tied, seed)
        version = push(sampler, model)
        push(tied_sampler, model)
        requests = make_requests(count=32)
        ahead = by_key(list(sampler.generate(requests)))
        plain = by_key(list(tied_sampler.generate(requests)))
        assert gaps(model, requests, list(ahead.values())).max() < 1e-4
        for key, completion in plain.items():
            np.testing.assert_array_equal(ahead[key].token_ids, completion.token_ids)
            assert ahead[key].policy_version == ahead[key].policy_version_end == version


def test_a_batch_that_is_still_in_flight_holds_up_neither_sleep_nor_push(sampler, tied):
    """Completions end while a further token of theirs is already scheduled."""
    requests = make_requests(count=8)
    left = []
    for seed in range(4):
        model = changed(tied, seed)
        push(sampler, model)
        completions = list(sampler.generate(requests[seed : seed + 1]))
        assert gaps(model, requests[seed : seed + 1], completions).max() < 1e-4
        left.append(len(core(sampler).batch_queue))
        sampler.sleep(keep_weights=False)
    assert max(left) > 0, "this test saw a batch in flight"
