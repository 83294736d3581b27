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


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8), (0.0, 1.0)])
def test_logprobs_are_those_of_the_distribution_sampled_from(opened, temperature, top_p):
    policy, sampler = opened
    model = changed(policy, seed=1)
    push(sampler, model)
    requests = make_requests(temperature=temperature, top_p=top_p)
    found = gaps(model, requests, list(sampler.generate(requests)))
    assert len(found) > 50
    assert found.max() < 1e-4


def test_vllm_has_an_fp32_head_and_takes_new_weights_with_it(tied):
    vllm = {"dtype": "bfloat16", "hf_overrides": {"head_dtype": "float32"}}
    recipe = tiny_recipe(tied.folder, vllm=vllm)
    sampler = VllmLocalSampler.open(SamplerOpening.of(recipe, str(tied.folder), Comm()))
    try:
        assert sampler._open_engine().vllm_config.model_config.head_dtype == torch.float32
        model, requests = changed(tied, seed=1), make_requests()
        push(sampler, model)
        use_fp32_head(model.to(torch.bfloat16))
        found = gaps(model, requests, list(sampler.generate(requests)))
    finally:
        sampler.close()
    assert found.mean() < 0.05, "bfloat16 in the body; other weights differ by 0.2 and more"


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


def test_a_cached_prompt_of_the_old_policy_is_not_reused(opened, monkeypatch):
    policy, sampler = opened
    requests = long_prompt_requests()
    for seed in (16, 17):
        model = changed(policy, seed)
        push(sampler, model)
        for _ in range(2):  # the second time the prompt comes from the cache
            assert gaps(model, requests, list(sampler.generate(requests))).max() < 1e-4
    monkeypatch.setattr(sampler._engine, "reset_prefix_cache", lambda: True)
    model = changed(policy, 18)
    push(sampler, model)
    stale = gaps(model, requests, list(sampler.generate(requests)))
    assert stale.mean() > GAP_LIMIT, "without the reset this test would see it"
    monkeypatch.undo()
    push(sampler, policy.model)


def test_a_completion_depends_only_on_its_request(opened):
    policy, sampler = opened
    push(sampler, policy.model)
    requests = make_requests(count=32)
    together = by_key(list(sampler.generate(requests)))
    halves = [*sampler.generate(requests[::-2]), *sampler.generate(requests[::2])]
    alone = by_key([c for r in halves for c in [r]])
    assert len(together) == len(alone) == 32
    for key, completion in together.items():
        np.testing.assert_array_equal(completion.token_ids, alone[key].token_ids)


def test_more_prompt_tokens_than_one_forward_pass_takes(opened):
    """vLLM would split a prompt at the limit, and rewind the seeded generator of its request, which
    a CPU's cannot do."""
    policy, sampler = opened
    push(sampler, policy.model)
    scheduler = sampler._engine.vllm_config.scheduler_config
    requests = many_long_prompts(2 * scheduler.max_num_batched_tokens)
    completions = list(sampler.generate(requests))
    assert len(completions) == len(requests) > scheduler.max_num_batched_tokens / LONGEST_PROMPT
    assert gaps(policy.model, requests, completions).max() < 1e-4


def test_stop_tokens_are_included_and_reasons_kept(opened):
    policy, sampler = opened
    push(sampler, policy.model)
    completions = list(sampler.generate(make_requests(count=48)))
    ends = {tuple(STOP_TOKENS).index(c.token_ids[-1]) for c in completions if _stopped(c)}
    assert ends == {0, 1}, "both stop tokens of the generation config end completions"
    for completion in completions:
        body = completion.token_ids[:-1] if _stopped(completion) else completion.token_ids
        assert not set(body.tolist()) & set(STOP_TOKENS)
        assert _stopped(completion) or len(completion.token_ids) == 24
        assert len(completion.sampler_logprobs) == len(completion.token_ids)
        assert completion.token_ids.dtype == np.int32
        assert completion.sampler_logprobs.dtype == np.float32


def test_only_the_stop_tokens_asked_for_end_a_completion(opened, monkeypatch):
    """With another tokenizer, those of the model's generation config are ordinary tokens."""
    policy, sampler = opened
    push(sampler, policy.model)
    monkeypatch.setattr(sampler, "stop_token_ids", STOP_TOKENS[1:])
    completions = list(sampler.generate(make_requests(count=48)))
    assert any(STOP_TOKENS[0] in c.token_ids[:-1] for c in completions)
    assert {c.token_ids[-1] for c in completions if _stopped(c)} == {STOP_TOKENS[1]}


def test_the_recipe_chooses_the_stop_tokens(tied):
    from grpo_replay.sampling.vllm_local import VllmLocalSampler

    recipe = tiny_recipe(tied.folder, stop_tokens=["7"])
    sampler = VllmLocalSampler.open(SamplerOpening.of(recipe, str(tied.folder), Comm()))
    completions = list(sampler.generate(make_requests(count=48)))
    sampler.close()
    (only,) = sampler.stop_token_ids
    assert {c.token_ids[-1] for c in completions if _stopped(c)} == {only}
    assert not any(only in c.token_ids[:-1] for c in completions)
    assert any(set(STOP_TOKENS) & set(c.token_ids.tolist()) for c in completions)


def _stopped(completion) -> bool:
    return completion.finish_reason == "stop"


def test_greedy_completions_are_those_of_the_hf_sampler(opened):
    policy, sampler = opened
    model = changed(policy, 7)
    push(sampler, model)
    requests = make_requests(count=len(PROMPTS) * 4, temperature=0.0)[::4]
    theirs = by_key(list(sampler.generate(requests)))
    reference = copied_sampler(model, STOP_TOKENS, pad_id=0)
    for completion in reference.generate(requests):
        other = theirs[completion.key]
        np.testing.assert_array_equal(other.token_ids, completion.token_ids)
        np.testing.assert_allclose(other.sampler_logprobs, completion.sampler_logprobs, atol=1e-4)
        assert other.finish_reason == completion.finish_reason


def test_an_abandoned_iterator_leaves_nothing_running(opened):
    policy, sampler = opened
    push(sampler, policy.model)
    iterator = sampler.generate(make_requests(count=16))
    next(iterator)
    iterator.close()
    assert not sampler._engine.has_unfinished_requests()
    assert len(list(sampler.generate(make_requests(count=16)))) == 16


def test_impossible_requests_are_refused_before_any_runs(opened):
    _, sampler = opened
    with pytest.raises(
        RecipeError, match=r"exceed the sampler's 224 tokens: raise .*max_model_len"
    ):
        list(sampler.generate(make_requests(count=1, max_tokens=222)))
    foreign = make_requests(count=1)[0]
    foreign.prompt_token_ids[0] = 24
    with pytest.raises(SamplerError, match="vocabulary of 24"):
        list(sampler.generate([foreign]))


def test_versions_only_increase(opened):
    policy, sampler = opened
    push(sampler, policy.model)
    with pytest.raises(SamplerError, match="versions must increase"):
        sampler.load_weights(iter(()), sampler.policy_version)


def test_raw_logprobs_are_detected(tied, monkeypatch, capfd):
    """Plants the bug: the engine reports the log-probs of unprocessed logits."""
    from grpo_replay.sampling import vllm_local

    honest = vllm_local.engine_arguments

    def planted(*arguments):
        return honest(*arguments) | {"logprobs_mode": "raw_logprobs"}

    monkeypatch.setattr(vllm_local, "engine_arguments", planted)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    sampler = vllm_local.VllmLocalSampler.open(
        SamplerOpening.of(tiny_recipe(tied.folder), str(tied.folder), Comm())
    )
    try:
        requests = make_requests(temperature=0.7)
        completions = list(sampler.generate(requests))
        assert gaps(tied.model, requests, completions).mean() > GAP_LIMIT
        warm = make_requests(temperature=1.0)
        assert gaps(tied.model, warm, list(sampler.generate(warm))).max() < 1e-4
        _weights_that_are_not_numbers_stop_the_run(tied, sampler)
    finally:
        sampler.close()
    sampler.close()
    with pytest.raises(SamplerError, match="closed"):
        sampler.generate(requests)
    assert torch.equal(torch.random.get_rng_state(), before[0]), "the trainer's random state moved"
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2, "torch.set_num_threads was left disabled"
    torch.set_num_threads(1)
    assert capfd.readouterr().out == ""


def _weights_that_are_not_numbers_stop_the_run(policy, sampler) -> None:
    """Last, because NaN stays in the unused part of the CPU engine's cache."""
    model = changed(policy, 8)
    with torch.no_grad():
        next(model.parameters())[:] = torch.nan
    push(sampler, model)
    with pytest.raises(SamplerError, match=r"log-prob of token 0 is not finite"):
        list(sampler.generate(make_requests(count=4)))
