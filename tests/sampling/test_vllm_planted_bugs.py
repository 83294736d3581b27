"""Partial and wrong syncs, each planted on purpose: refused, or far above the gap limit."""

import pytest
import torch
from tiny_policy import GAP_LIMIT, changed, gaps, make_requests, named_tensors, push

from grpo_replay.errors import SamplerError

pytestmark = pytest.mark.vllm

LAYER = "model.layers.1."
NORM = "model.layers.0.input_layernorm.weight"


def without_head(pairs):
    return [(n, t) for n, t in pairs if n != "lm_head.weight"]


def renamed(pairs):
    return [(n.replace("input_layernorm", "norm1"), t) for n, t in pairs]


def without_layer(pairs):
    return [(n, t) for n, t in pairs if not n.startswith(LAYER)]


def in_bfloat16(pairs):
    return [(n, t.bfloat16()) for n, t in pairs]


def transposed(pairs):
    return [(n, t.T if "down_proj" in n else t) for n, t in pairs]


def twice(pairs):
    pairs = list(pairs)
    return [*pairs, pairs[3]]


REFUSED = [
    (without_head, "missing tensor lm_head.weight"),
    (renamed, "unknown tensor model.layers.0.norm1.weight"),
    (without_layer, f"missing tensor {LAYER}self_attn.q_proj.weight; .* and .* more"),
    (in_bfloat16, "model.embed_tokens.weight is bfloat16, the policy is float32"),
    (transposed, r"down_proj.weight has shape \[192, 64\], expected \[64, 192\]"),
    (twice, "came twice"),
]


@pytest.mark.parametrize("bug, message", REFUSED, ids=[bug.__name__ for bug, _ in REFUSED])
def test_a_partial_sync_is_refused(opened, bug, message):
    policy, sampler = opened
    push(sampler, policy.model)
    good = sampler.policy_version
    source = iter(bug(named_tensors(changed(policy, 11))))
    with pytest.raises(SamplerError, match=message):
        sampler.load_weights(source, good + 1)
    assert next(source, None) is None, "every rank must take part in every gather"
    assert sampler.policy_version == good
    with pytest.raises(SamplerError, match=f"version {good + 1} was left incomplete"):
        sampler.generate(make_requests(count=1))
    model = changed(policy, 12)
    push(sampler, model)
    requests = make_requests()
    assert gaps(model, requests, list(sampler.generate(requests))).max() < 1e-4


def test_a_stale_output_head_is_detected(opened):
    policy, sampler = opened
    model = changed(policy, 13)
    stale = policy.model.lm_head.weight.detach()
    pairs = [(n, stale if n == "lm_head.weight" else t) for n, t in named_tensors(model)]
    if policy.model.config.tie_word_embeddings:
        with pytest.raises(SamplerError, match=r"lm_head\.weight differs from model\.embed_tokens"):
            sampler.load_weights(pairs, sampler.policy_version + 1)
        push(sampler, policy.model)
        return
    sampler.load_weights(pairs, sampler.policy_version + 1)
    requests = make_requests()
    assert gaps(model, requests, list(sampler.generate(requests))).mean() > GAP_LIMIT


def swapped_keys_and_values(name: str, old: dict, new: dict) -> torch.Tensor:
    if "k_proj" in name:
        return new[name.replace("k_proj", "v_proj")]
    return new[name.replace("v_proj", "k_proj")] if "v_proj" in name else new[name]


def stale_layer(name: str, old: dict, new: dict) -> torch.Tensor:
    return old[name] if name.startswith(LAYER) else new[name]


def stale_embeddings(name: str, old: dict, new: dict) -> torch.Tensor:
    return old[name] if name in ("lm_head.weight", "model.embed_tokens.weight") else new[name]


@pytest.mark.parametrize("bug", [swapped_keys_and_values, stale_layer, stale_embeddings])
def test_wrong_contents_show_as_a_gap(opened, bug):
    """Names, shapes and precision are right; only the log-probs can tell."""
    policy, sampler = opened
    model = changed(policy, 14)
    old, new = dict(named_tensors(policy.model)), dict(named_tensors(model))
    sampler.load_weights([(n, bug(n, old, new)) for n in new], sampler.policy_version + 1)
    requests = make_requests()
    assert gaps(model, requests, list(sampler.generate(requests))).mean() > GAP_LIMIT


def test_a_missed_sync_shows_as_a_gap(opened):
    policy, sampler = opened
    push(sampler, policy.model)
    requests = make_requests()
    completions = list(sampler.generate(requests))
    assert gaps(changed(policy, 15), requests, completions).mean() > GAP_LIMIT


def test_another_temperature_shows_as_a_gap(opened):
    policy, sampler = opened
    push(sampler, policy.model)
    sampled = make_requests(temperature=1.0)
    completions = list(sampler.generate(sampled))
    trained = make_requests(temperature=0.7)
    assert gaps(policy.model, sampled, completions).max() < 1e-4
    assert gaps(policy.model, trained, completions).mean() > GAP_LIMIT
