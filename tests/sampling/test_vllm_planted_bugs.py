"""Wrong syncs, each planted on purpose in a real engine: refused, or far above the gap limit."""

import pytest
import torch
from tiny_policy import GAP_LIMIT, changed, gaps, make_requests, named_tensors, push

from grpo_replay.errors import SamplerError

pytestmark = pytest.mark.vllm

LAYER = "model.layers.1."


def test_a_partial_sync_is_refused(untied, untied_sampler):
    """Other misfits: test_hf_weights, which has the same check."""
    sampler = untied_sampler
    push(sampler, untied.model)
    good = sampler.policy_version
    pairs = [(n, t) for n, t in named_tensors(changed(untied, 11)) if not n.startswith(LAYER)]
    source = iter(pairs)
    with pytest.raises(SamplerError, match=f"missing tensor {LAYER}"):
        sampler.load_weights(source, good + 1)
    assert next(source, None) is None, "every rank must take part in every gather"
    assert sampler.policy_version == good
    with pytest.raises(SamplerError, match=f"version {good + 1} was left incomplete"):
        sampler.generate(make_requests(count=1))
    model = changed(untied, 12)
    push(sampler, model)
    requests = make_requests()
    assert gaps(model, requests, list(sampler.generate(requests))).max() < 1e-4


def swapped_keys_and_values(name: str, old: dict, new: dict) -> torch.Tensor:
    if "k_proj" in name:
        return new[name.replace("k_proj", "v_proj")]
    return new[name.replace("v_proj", "k_proj")] if "v_proj" in name else new[name]


def stale_layer(name: str, old: dict, new: dict) -> torch.Tensor:
    return old[name] if name.startswith(LAYER) else new[name]


def stale_embeddings(name: str, old: dict, new: dict) -> torch.Tensor:
    return old[name] if name in ("lm_head.weight", "model.embed_tokens.weight") else new[name]


def stale_head(name: str, old: dict, new: dict) -> torch.Tensor:
    return old[name] if name == "lm_head.weight" else new[name]


@pytest.mark.parametrize("bug", [swapped_keys_and_values, stale_layer, stale_embeddings])
def test_wrong_contents_show_as_a_gap(tied, tied_sampler, bug):
    """Names, shapes and precision are right; only the log-probs can tell."""
    assert gap_with(bug, tied, tied_sampler) > GAP_LIMIT


def test_a_stale_output_head_of_its_own_shows_as_a_gap(untied, untied_sampler):
    assert gap_with(stale_head, untied, untied_sampler) > GAP_LIMIT


def gap_with(bug, policy, sampler) -> float:
    """The mean gap after a sync with that bug."""
    model = changed(policy, 14)
    old, new = dict(named_tensors(policy.model)), dict(named_tensors(model))
    sampler.load_weights([(n, bug(n, old, new)) for n in new], sampler.policy_version + 1)
    requests = make_requests()
    return gaps(model, requests, list(sampler.generate(requests))).mean()


def test_a_missed_sync_and_another_temperature_show_as_a_gap(tied, tied_sampler):
    push(tied_sampler, tied.model)
    requests = make_requests()
    completions = list(tied_sampler.generate(requests))
    assert gaps(tied.model, requests, completions).max() < 1e-4
    assert gaps(changed(tied, 15), requests, completions).mean() > GAP_LIMIT
    colder = make_requests(temperature=0.7)
    assert gaps(tied.model, colder, completions).mean() > GAP_LIMIT
