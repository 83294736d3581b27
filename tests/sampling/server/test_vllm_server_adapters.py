"""LoRA over HTTP, against a real vLLM server: partial rollouts keep the adapter they began with."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from server_helpers import launch, wait_for
from tiny_policy import (
    LORA,
    Policy,
    adapted,
    gaps,
    logprobs_of,
    lora_recipe,
    make_requests,
    save_policy,
)

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.weights import pushed_weights
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.server.routes import background_loop, block_on
from grpo_replay.sampling.server.sampler import VllmServerSampler
from grpo_replay.types import Completion

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LONGEST = 1500  # tokens; far more than are sampled while a request or a pause takes effect


@pytest.fixture(scope="module")
def sampler(tied: Policy, tmp_path_factory) -> Iterator[VllmServerSampler]:
    """Of an asynchronous run, on a server that was started from other weights than the base."""
    foreign = save_policy(
        tmp_path_factory.mktemp("foreign"), tie=True, seed=99, max_position_embeddings=2048
    )
    logs = tmp_path_factory.mktemp("logs")
    (server,) = launch(foreign.folder, logs, 1, LORA, max_completion_length=LONGEST)
    recipe = lora_recipe(tied, backend="vllm_server", servers={"urls": [server.url]})
    opening = SamplerOpening.from_recipe(recipe, str(tied.folder), Comm())
    sampler = VllmServerSampler.open(replace(opening, pushed_while_sampling=True))
    yield sampler
    sampler.close()
    server.stop()


def test_every_version_is_sampled_from_its_own_adapter(sampler, tied):
    requests = make_requests()
    assert gaps(tied.model, requests, list(sampler.generate(requests))).max() < 1e-4
    for version in (1, 2):
        model = adapted(tied, version)
        sampler.load_weights(pushed_weights(model).items(), version)
        completions = list(sampler.generate(requests))
        assert gaps(model, requests, completions).max() < 1e-4
        assert gaps(tied.model, requests, completions).mean() > 0.1
        assert {c.policy_version for c in completions} == {version}


def test_requests_in_flight_keep_their_adapters_while_five_newer_ones_come(sampler, tied):
    """The first has begun when the newer ones come; then all run beside each other, which is one
    version more than vLLM runs at once."""
    client, first = sampler.servers.all[0], sampler.policy_version + 1
    request = make_requests(count=1)[0]
    lengths = [LONGEST, *[200] * 5]
    models, answers = [], []
    begun = block_on(client.generated_tokens(30))
    for version, length in enumerate(lengths, first):
        models.append(adapted(tied, 40 + version))
        sampler.load_weights(pushed_weights(models[-1]).items(), version)
        asked = client.generate(replace(request, max_tokens=length), (), version)
        answers.append(asyncio.run_coroutine_threadsafe(asked, background_loop()))
        if version == first:
            assert wait_for(lambda: block_on(client.generated_tokens(30)) > begun, 30)
            client.pause(30)
    assert not any(answer.done() for answer in answers)
    client.resume()
    for index, (model, answer, length) in enumerate(zip(models, answers, lengths, strict=True)):
        choice = answer.result(120)
        (span,) = choice.weight_versions
        assert client.version_of(span.version) == first + index and span.end == length
        tokens = np.array(choice.token_ids, np.int32)
        found = np.array([each.logprob for each in choice.logprobs.content], np.float32)
        completion = Completion(request.key, tokens, found, "length", 0, 0)
        assert np.abs(found - logprobs_of(model, request, completion)).max() < 1e-4
