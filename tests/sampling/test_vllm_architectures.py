"""vLLM on models of other architectures: its log-probs are those of transformers, before and after
new weights, in process and over HTTP."""

from pathlib import Path

import pytest
from architectures import random_model
from server_helpers import http_sampler, launch
from tiny_policy import Policy, changed, gaps, make_requests, push, tiny_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.models import byte_tokenizer
from grpo_replay.errors import SamplerError
from grpo_replay.sampling.sampler_protocol import Sampler, SamplerOpening

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

SHAPES = {
    "llama": {}, "qwen2": {"vocab_size": 260}, "gemma3_text": {"sliding_window": 16}, "granite": {},
    "cohere": {"head_dim": 32},
}  # fmt: skip
"""Heads of 32, which vLLM's attention on a CPU has. transformers gives Qwen2 its own tokenizer, of
one token more than the file has."""
OVER_HTTP = ("qwen2", "gemma3_text")  # the others speak the same HTTP
LARGEST_GAP = 1e-4


def policy_of(kind: str, folder: Path) -> Policy:
    model = random_model(kind, **SHAPES[kind])
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return Policy(folder, model)


def check(sampler: Sampler, policy: Policy) -> None:
    requests = make_requests(count=12)
    found = gaps(policy.model, requests, list(sampler.generate(requests)))
    assert len(found) > 50 and found.max() < LARGEST_GAP
    moved = changed(policy, 1)
    push(sampler, moved)
    found = gaps(moved, requests, list(sampler.generate(requests)))
    assert len(found) > 20 and found.max() < LARGEST_GAP


@pytest.mark.parametrize("kind", SHAPES)
def test_in_process(kind, tmp_path):
    from grpo_replay.sampling.vllm_local import VllmLocalSampler

    policy = policy_of(kind, tmp_path)
    sampler = VllmLocalSampler.open(SamplerOpening.of(tiny_recipe(tmp_path), str(tmp_path), Comm()))
    try:
        check(sampler, policy)
    finally:
        sampler.close()


def test_a_model_that_vllm_runs_with_transformers_classes_is_refused_in_process(tmp_path):
    from grpo_replay.sampling.vllm_local import VllmLocalSampler

    random_model("phi").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SamplerError, match=r"of type phi, .* use sampling.backend vllm_server"):
        VllmLocalSampler.open(SamplerOpening.of(tiny_recipe(tmp_path), str(tmp_path), Comm()))


def test_experts_whose_new_weights_vllm_takes_wrongly_are_refused_on_a_cpu(tmp_path):
    from grpo_replay.sampling.vllm_local import VllmLocalSampler

    random_model("qwen3_moe").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SamplerError, match=r"experts .* use sampling\.backend hf"):
        VllmLocalSampler.open(SamplerOpening.of(tiny_recipe(tmp_path), str(tmp_path), Comm()))


@pytest.mark.parametrize("kind", OVER_HTTP)
def test_over_http(kind, tmp_path):
    policy = policy_of(kind, tmp_path / "model")
    (server,) = launch(policy.folder, tmp_path, count=1)
    try:
        with http_sampler(policy, [server]) as sampler:
            check(sampler, policy)
    finally:
        server.stop()
