"""Weight updates of the hf sampler: everything arrives, or nothing is sampled from it."""

import copy

import numpy as np
import pytest
import torch
from naive_sampler import EOS, PAD, copied_sampler, make_requests, qwen3

from grpo_replay.errors import SamplerError
from grpo_replay.sampling.hf import HfSampler


def sampler_of(model):
    return copied_sampler(model, (EOS,), PAD)


def all_names(model):
    """Every tensor under every name, as the protocol has it."""
    return list(model.state_dict().items())


def completions(sampler):
    found = sorted(sampler.generate(make_requests()), key=lambda c: c.key)
    return [(c.token_ids.tolist(), np.round(c.sampler_logprobs, 4).tolist()) for c in found]


@pytest.mark.parametrize("tied", [True, False])
def test_after_an_update_the_sampler_is_the_new_model(tied):
    old, new = qwen3(seed=0, tied=tied), qwen3(seed=1, tied=tied)
    sampler = sampler_of(old)
    before = completions(sampler)
    sampler.load_weights(all_names(new), 1)
    assert completions(sampler) == completions(sampler_of(new)) != before
    assert sampler.policy_version == 1


def test_the_sampler_copies_the_weights(model):
    sampler = sampler_of(model)
    before = completions(sampler)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    assert completions(sampler) == before


def test_completions_carry_the_version_they_were_sampled_with(model):
    sampler = sampler_of(model)
    assert {c.policy_version for c in sampler.generate(make_requests())} == {0}
    sampler.load_weights(all_names(model), 7)
    versions = {(c.policy_version, c.policy_version_end) for c in sampler.generate(make_requests())}
    assert versions == {(7, 7)}


def without(named, name):
    return [(n, t) for n, t in named if n != name]


NORM = "model.layers.1.self_attn.k_norm.weight"
BROKEN = {
    "missing": (lambda named: without(named, NORM), f"missing tensor {NORM}"),
    "unknown": (lambda named: [*named, ("module.x", torch.ones(1))], "unknown tensor module.x"),
    "twice": (lambda named: [*named, named[3]], "arrived twice"),
    "shape": (
        lambda named: [*without(named, NORM), (NORM, torch.ones(0))],
        rf"{NORM} has shape \[0\], expected \[16\]",
    ),
    "precision": (
        lambda named: [(n, t.bfloat16()) for n, t in named],
        "model.embed_tokens.weight is bfloat16, the policy is float32",
    ),
    "a tied head is missing": (
        lambda named: without(named, "lm_head.weight"),
        "missing tensor lm_head.weight",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_update_that_does_not_fit_is_refused_and_nothing_is_sampled_from_it(model, kind):
    change, message = BROKEN[kind]
    sampler = sampler_of(model)
    offered = iter(change(all_names(model)))
    with pytest.raises(SamplerError, match=message):
        sampler.load_weights(offered, 1)
    assert next(offered, None) is None, "a collective iterator must be exhausted"
    assert sampler.policy_version == 0
    with pytest.raises(SamplerError, match="version 1 was left incomplete"):
        sampler.generate(make_requests())
    sampler.load_weights(all_names(model), 2)
    assert len(completions(sampler)) == 20


def test_an_update_that_breaks_off_is_not_sampled_from(model):
    def breaks_off():
        yield all_names(model)[0]
        raise RuntimeError("a rank was lost")

    sampler = sampler_of(model)
    with pytest.raises(RuntimeError, match="a rank was lost"):
        sampler.load_weights(breaks_off(), 1)
    with pytest.raises(SamplerError, match="incomplete"):
        sampler.generate(make_requests())


def test_bfloat16_copies_round_once(model):
    sampler = copied_sampler(model, (EOS,), PAD, dtype="bfloat16")
    new = qwen3(seed=1)
    sampler.load_weights(all_names(new), 1)
    own = sampler._model.state_dict()
    assert all(torch.equal(own[name], t.bfloat16()) for name, t in all_names(new))


def test_a_sleeping_sampler_wakes(model):
    sampler = sampler_of(model)
    before = completions(sampler)
    sampler.sleep()
    assert completions(sampler) == before
    sampler.sleep(keep_weights=False)
    assert sum(parameter.numel() for parameter in sampler._model.parameters()) == 0, "freed"
    with pytest.raises(SamplerError, match="discarded"):
        sampler.generate(make_requests())
    sampler.load_weights(all_names(model), 2)
    assert completions(sampler) == before


def test_weights_that_lie_in_a_file_are_moved_to_where_pushed_ones_are(model):
    """Else a resumed run, whose sampler was given weights at once, rounds otherwise than one that
    was never killed."""
    moved = copy.deepcopy(model)
    for parameter in moved.parameters():
        room = torch.empty(parameter.numel() + 10)[10:].view_as(parameter)
        parameter.data = room.copy_(parameter.data)
    assert any(parameter.data_ptr() % 64 for parameter in moved.parameters())
    sampler = HfSampler(moved, (EOS,), PAD, 8)
    for own, given in zip(sampler._open_model().parameters(), model.parameters(), strict=True):
        assert own.data_ptr() % 64 == 0 and torch.equal(own, given)
