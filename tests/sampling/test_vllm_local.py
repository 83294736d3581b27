"""The in-process vLLM sampler against plain transformers forwards and the `hf` sampler."""

import numpy as np
import pytest
import torch
from naive_sampler import copied_sampler
from tiny_policy import (
    GAP_LIMIT,
    LONGEST_PROMPT,
    PROMPTS,
    STOP_TOKENS,
    by_key,
    changed,
    gaps,
    long_prompt_requests,
    make_requests,
    many_long_prompts,
    push,
    tiny_recipe,
)

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.policy_module import use_fp32_head
from grpo_replay.errors import RecipeError, SamplerError
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.vllm_local import VllmLocalSampler

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (1.3, 0.8)])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    tied, tied_sampler, temperature, top_p
):
    model = changed(tied, seed=1)
    push(tied_sampler, model)
    requests = make_requests(temperature=temperature, top_p=top_p)
    found = gaps(model, requests, list(tied_sampler.generate(requests)))
    assert len(found) > 50
    assert found.max() < 1e-4


def test_vllm_has_an_fp32_head_and_takes_new_weights_with_it(tied):
    vllm = {"dtype": "bfloat16", "hf_overrides": {"head_dtype": "float32"}}
    recipe = tiny_recipe(tied.folder, vllm=vllm)
    sampler = VllmLocalSampler.open(SamplerOpening.from_recipe(recipe, str(tied.folder), Comm()))
    try:
        assert sampler._open_engine().vllm_config.model_config.head_dtype == torch.float32
        model, requests = changed(tied, seed=1), make_requests()
        push(sampler, model)
        use_fp32_head(model.to(torch.bfloat16))
        found = gaps(model, requests, list(sampler.generate(requests)))
    finally:
        sampler.close()
    assert found.mean() < 0.05, "bfloat16 in the body; other weights differ by 0.2 and more"


@pytest.mark.parametrize("vllm, message", [
    (
        {"gpu_memory_utilisation": 0.5},
        r"engine did not start: .* unexpected keyword argument 'gpu_memory_utilisation'; see "
        r"sampling\.vllm in the recipe",
    ),
    ({"max_num_seqs": "many"}, "engine did not start: '<' not supported .* see samp"),
])  # fmt: skip
def test_an_engine_argument_that_vllm_does_not_take_is_refused(tied, vllm, message):
    recipe = tiny_recipe(tied.folder, vllm=vllm)
    with pytest.raises(SamplerError, match=message):
        VllmLocalSampler.open(SamplerOpening.from_recipe(recipe, str(tied.folder), Comm()))


def test_every_sync_replaces_all_weights(opened):
    policy, sampler = opened
    requests = make_requests()
    for seed in range(2, 6):
        model = changed(policy, seed)
        version = push(sampler, model)
        completions = list(sampler.generate(requests))
        assert gaps(model, requests, completions).max() < 1e-4
        assert {c.policy_version for c in completions} == {version}
        assert {c.policy_version_end for c in completions} == {version}


def test_a_cached_prompt_of_the_old_policy_is_not_reused(tied, tied_sampler, monkeypatch):
    requests = long_prompt_requests()
    for seed in (16, 17):
        model = changed(tied, seed)
        push(tied_sampler, model)
        for _ in range(2):  # the second time the prompt comes from the cache
            assert gaps(model, requests, list(tied_sampler.generate(requests))).max() < 1e-4
    monkeypatch.setattr(tied_sampler._engine, "reset_prefix_cache", lambda: True)
    model = changed(tied, 18)
    push(tied_sampler, model)
    stale = gaps(model, requests, list(tied_sampler.generate(requests)))
    assert stale.mean() > GAP_LIMIT, "without the reset this test would see it"
    monkeypatch.undo()
    push(tied_sampler, tied.model)


def test_a_completion_depends_only_on_its_request(tied, tied_sampler):
    push(tied_sampler, tied.model)
    requests = make_requests(count=32)
    together = by_key(list(tied_sampler.generate(requests)))
    halves = [*tied_sampler.generate(requests[::-2]), *tied_sampler.generate(requests[::2])]
    alone = by_key(halves)
    assert len(together) == len(alone) == 32
    for key, completion in together.items():
        np.testing.assert_array_equal(completion.token_ids, alone[key].token_ids)


def test_more_prompt_tokens_than_one_forward_pass_takes(tied, tied_sampler):
    """vLLM would split a prompt at the limit, and rewind the seeded generator of its request, which
    a CPU's cannot do."""
    push(tied_sampler, tied.model)
    scheduler = tied_sampler._engine.vllm_config.scheduler_config
    requests = many_long_prompts(2 * scheduler.max_num_batched_tokens)
    completions = list(tied_sampler.generate(requests))
    assert len(completions) == len(requests) > scheduler.max_num_batched_tokens / LONGEST_PROMPT
    assert gaps(tied.model, requests, completions).max() < 1e-4


def test_stop_tokens_are_included_and_reasons_kept(tied, tied_sampler):
    push(tied_sampler, tied.model)
    completions = list(tied_sampler.generate(make_requests(count=48)))
    ends = {tuple(STOP_TOKENS).index(c.token_ids[-1]) for c in completions if _stopped(c)}
    assert ends == {0, 1}, "both stop tokens of the generation config end completions"
    for completion in completions:
        body = completion.token_ids[:-1] if _stopped(completion) else completion.token_ids
        assert not set(body.tolist()) & set(STOP_TOKENS)
        assert _stopped(completion) or len(completion.token_ids) == 24
        assert len(completion.sampler_logprobs) == len(completion.token_ids)
        assert completion.token_ids.dtype == np.int32
        assert completion.sampler_logprobs.dtype == np.float32


def test_only_the_stop_tokens_asked_for_end_a_completion(tied, tied_sampler, monkeypatch):
    """With another tokenizer, those of the model's generation config are ordinary tokens."""
    push(tied_sampler, tied.model)
    monkeypatch.setattr(tied_sampler, "stop_token_ids", STOP_TOKENS[1:])
    completions = list(tied_sampler.generate(make_requests(count=48)))
    assert any(STOP_TOKENS[0] in c.token_ids[:-1] for c in completions)
    assert {c.token_ids[-1] for c in completions if _stopped(c)} == {STOP_TOKENS[1]}


def _stopped(completion) -> bool:
    return completion.finish_reason == "stop"


def test_greedy_completions_are_those_of_the_hf_sampler(tied, tied_sampler):
    model = changed(tied, 7)
    push(tied_sampler, model)
    requests = make_requests(count=len(PROMPTS) * 4, temperature=0.0)[::4]
    theirs = by_key(list(tied_sampler.generate(requests)))
    reference = copied_sampler(model, STOP_TOKENS, pad_id=0)
    for completion in reference.generate(requests):
        other = theirs[completion.key]
        np.testing.assert_array_equal(other.token_ids, completion.token_ids)
        np.testing.assert_allclose(other.sampler_logprobs, completion.sampler_logprobs, atol=1e-4)
        assert other.finish_reason == completion.finish_reason


def test_an_abandoned_iterator_leaves_nothing_running(tied, tied_sampler):
    push(tied_sampler, tied.model)
    iterator = tied_sampler.generate(make_requests(count=16))
    next(iterator)
    iterator.close()
    assert not tied_sampler._engine.has_unfinished_requests()
    assert len(list(tied_sampler.generate(make_requests(count=16)))) == 16


def test_impossible_requests_are_refused_before_any_runs(tied, tied_sampler):
    with pytest.raises(RecipeError, match="224 tokens"):
        list(tied_sampler.generate(make_requests(count=1, max_tokens=222)))
    foreign = make_requests(count=1)[0]
    foreign.prompt_token_ids[0] = 24
    with pytest.raises(SamplerError, match="vocabulary of 24"):
        list(tied_sampler.generate([foreign]))


def test_raw_logprobs_are_detected(tied, monkeypatch, capfd):
    """Plants the bug: the engine reports the log-probs of unprocessed logits."""
    from grpo_replay.sampling import vllm_local

    honest = vllm_local.engine_arguments

    def planted(*arguments):
        return honest(*arguments) | {"logprobs_mode": "raw_logprobs"}

    monkeypatch.setattr(vllm_local, "engine_arguments", planted)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    sampler = vllm_local.VllmLocalSampler.open(
        SamplerOpening.from_recipe(tiny_recipe(tied.folder), str(tied.folder), Comm())
    )
    try:
        requests = make_requests(temperature=0.7)
        completions = list(sampler.generate(requests))
        assert gaps(tied.model, requests, completions).mean() > GAP_LIMIT
        warm = make_requests(temperature=1.0)
        assert gaps(tied.model, warm, list(sampler.generate(warm))).max() < 1e-4
    finally:
        sampler.close()
    sampler.close()
    assert torch.equal(torch.random.get_rng_state(), before[0]), "the trainer's random state moved"
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2, "torch.set_num_threads was left disabled"
    torch.set_num_threads(1)
    assert capfd.readouterr().out == ""
