"""vLLM on a model of another architecture: its log-probs are those of transformers, before and
after new weights, in process and over HTTP (benchmarks/vllm_architectures.py tries all)."""

from pathlib import Path

import pytest
from architectures import random_model
from server_helpers import http_sampler, launch
from tiny_policy import Policy, changed, gaps, make_requests, push, tiny_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.models import byte_tokenizer
from grpo_replay.errors import SamplerError
from grpo_replay.sampling.sampler_protocol import Sampler, SamplerOpening
from grpo_replay.sampling.vllm_local import VllmLocalSampler

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

LARGEST_GAP = 1e-4


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Policy:
    """Sliding windows, scaled embeddings and norms of its own."""
    folder = tmp_path_factory.mktemp("gemma3_text")
    model = random_model("gemma3_text", sliding_window=16)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return Policy(folder, model)


def open_in_process(folder: Path) -> VllmLocalSampler:
    return VllmLocalSampler.open(
        SamplerOpening.from_recipe(tiny_recipe(folder), str(folder), Comm())
    )


def check(sampler: Sampler, policy: Policy) -> None:
    requests = make_requests(count=12)
    found = gaps(policy.model, requests, list(sampler.generate(requests)))
    assert len(found) > 50 and found.max() < LARGEST_GAP
    moved = changed(policy, 1)
    push(sampler, moved)
    found = gaps(moved, requests, list(sampler.generate(requests)))
    assert len(found) > 20 and found.max() < LARGEST_GAP


def test_in_process(gemma):
    sampler = open_in_process(gemma.folder)
    try:
        check(sampler, gemma)
    finally:
        sampler.close()


def test_over_http(gemma, tmp_path):
    (server,) = launch(gemma.folder, tmp_path, count=1)
    try:
        with http_sampler(gemma, [server]) as sampler:
            check(sampler, gemma)
    finally:
        server.stop()


def test_a_model_that_vllm_runs_with_transformers_classes_is_refused_in_process(tmp_path):
    random_model("phi").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SamplerError, match=r"of type phi, .* use sampling.backend vllm_server"):
        open_in_process(tmp_path)
