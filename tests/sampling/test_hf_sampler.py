"""The hf sampler against an obvious twin: one row at a time, no cache, no padding."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from naive_sampler import (
    EOS,
    PAD,
    SECOND_EOS,
    VOCABULARY,
    copied_sampler,
    make_requests,
    naive_completion,
    qwen3,
)
from tiny_policy import by_key
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.policy_module import use_fp32_head
from grpo_replay.errors import ModelError, RecipeError, SamplerError
from grpo_replay.recipe import resolve_recipe
from grpo_replay.sampling import decode_modes, decoding
from grpo_replay.sampling.hf import HfSampler
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.types import GenerationRequest, RequestKey

BOTH_EOS = (EOS, SECOND_EOS)


def sampler_of(model, eos_ids=BOTH_EOS, **settings):
    return copied_sampler(model, eos_ids, PAD, **settings)


def assert_same(first, second, atol=0.0):
    assert first.keys() == second.keys()
    for key in first:
        assert first[key].token_ids.tolist() == second[key].token_ids.tolist()
        assert first[key].finish_reason == second[key].finish_reason
        np.testing.assert_allclose(
            first[key].sampler_logprobs, second[key].sampler_logprobs, rtol=0, atol=atol
        )


def assert_like_naive(model, requests, eos_ids=BOTH_EOS):
    completions = by_key(sampler_of(model, eos_ids).generate(requests))
    assert len(completions) == len(requests)
    for request in requests:
        tokens, logprobs, reason = naive_completion(model, request, eos_ids)
        completion = completions[request.key]
        assert completion.token_ids.tolist() == tokens
        assert completion.finish_reason == reason
        np.testing.assert_allclose(completion.sampler_logprobs, logprobs, rtol=0, atol=2e-5)
    return completions


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.8), (0.0, 0.5)])
def test_tokens_and_logprobs_equal_those_of_a_naive_sampler(model, temperature, top_p):
    requests = make_requests(group=3, temperature=temperature, top_p=top_p)
    completions = assert_like_naive(model, requests)
    reasons = {c.finish_reason for c in completions.values()}
    assert temperature != 1.0 or reasons == {"stop", "length"}
    for completion in completions.values():
        assert completion.token_ids.dtype == np.int32
        assert completion.sampler_logprobs.dtype == np.float32


def test_a_model_without_grouped_queries_and_with_an_untied_head():
    model = qwen3(num_key_value_heads=4, tied=False)
    assert_like_naive(model, make_requests(prompts=3, group=2))


def test_requests_with_different_settings_share_a_batch(model):
    settings = [(1.0, 1.0), (0.0, 1.0), (0.7, 0.6), (1.0, 0.3)]
    requests = [
        dataclasses.replace(
            r, temperature=settings[i % 4][0], top_p=settings[i % 4][1], max_tokens=1 + i
        )
        for i, r in enumerate(make_requests(prompts=4, group=4))
    ]
    completions = assert_like_naive(model, requests)
    assert max(len(c.token_ids) for c in completions.values()) > 8


def test_a_completion_does_not_depend_on_its_batch(model):
    requests = make_requests(prompts=5, group=4)
    sampler = sampler_of(model)
    whole = by_key(sampler.generate(requests))
    halves = by_key([*sampler.generate(requests[::2]), *sampler.generate(requests[1::2])])
    shuffled = by_key(
        sampler.generate([requests[i] for i in np.random.default_rng(5).permutation(20)])
    )
    small = by_key(sampler_of(model, max_batch_rollouts=5).generate(requests))
    for other in (halves, shuffled, small):
        assert_same(whole, other, atol=1e-5)


def test_rows_leave_between_parts_of_prefill_blocks_of_numbers_and_growths_of_the_cache(
    monkeypatch,
):
    model = qwen3(max_position_embeddings=512)
    lengths = [20, 75, 40, 60]
    requests = [
        dataclasses.replace(request, max_tokens=length)
        for request, length in zip(make_requests(prompts=2, group=2), lengths, strict=True)
    ]
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 8)
    monkeypatch.setattr(decoding, "UNIFORM_BLOCK", 16)
    monkeypatch.setattr(decoding, "INITIAL_CAPACITY", 10)
    monkeypatch.setattr(decode_modes, "GROWTH_TOKENS", 5)
    completions = assert_like_naive(model, requests, eos_ids=(VOCABULARY + 5,))
    assert sorted(len(c.token_ids) for c in completions.values()) == sorted(lengths)


def beginning_alike(prefix: int) -> list[GenerationRequest]:
    """Prompts of several lengths behind the same tokens, and one that ends with them."""
    requests = make_requests(prompts=5, group=2)
    first = np.random.default_rng(9).integers(5, VOCABULARY, prefix).astype(np.int32)
    longer = [np.concatenate([first, r.prompt_token_ids]) for r in requests[:-1]] + [first]
    return [
        dataclasses.replace(request, prompt_token_ids=prompt)
        for request, prompt in zip(requests, longer, strict=True)
    ]


def test_what_all_prompts_begin_with_is_prefilled_once(model, monkeypatch):
    requests = beginning_alike(decoding.MIN_SHARED_PREFIX + 4)
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 60)  # several parts behind the one prefix
    seen = []
    forward = type(model).forward
    counted = lambda self, *a, **k: seen.append(k["input_ids"].numel()) or forward(self, *a, **k)  # noqa: E731
    monkeypatch.setattr(type(model), "forward", functools.wraps(forward)(counted))
    sampler = sampler_of(model)
    seen.clear()
    completions = by_key(sampler.generate(requests))
    assert seen[0] == decoding.MIN_SHARED_PREFIX + 3  # the shortest prompt has one token more
    monkeypatch.undo()
    for request in requests:
        tokens, logprobs, _ = naive_completion(model, request, BOTH_EOS)
        assert completions[request.key].token_ids.tolist() == tokens
        np.testing.assert_allclose(
            completions[request.key].sampler_logprobs, logprobs, rtol=0, atol=2e-5
        )


def test_every_eos_id_stops_and_is_kept(model):
    requests = make_requests(prompts=8, group=16)
    completions = list(sampler_of(model).generate(requests))
    last_tokens = {int(c.token_ids[-1]) for c in completions if c.finish_reason == "stop"}
    assert last_tokens == set(BOTH_EOS)
    for completion in completions:
        ends = np.isin(completion.token_ids, BOTH_EOS)
        assert not ends[:-1].any()
        assert ends[-1] == (completion.finish_reason == "stop")


def test_eos_as_the_last_allowed_token_is_a_stop(model):
    requests = [dataclasses.replace(r, max_tokens=1) for r in make_requests(prompts=8, group=16)]
    completions = list(sampler_of(model).generate(requests))
    assert {len(c.token_ids) for c in completions} == {1}
    stopped = [c for c in completions if int(c.token_ids[0]) in BOTH_EOS]
    assert stopped
    assert all((c.finish_reason == "stop") == (c in stopped) for c in completions)


def test_generating_does_not_leave_inference_mode_or_the_random_state_changed(model):
    before = torch.get_rng_state()
    completions = iter(sampler_of(model).generate(make_requests()))
    next(completions)
    assert not torch.is_inference_mode_enabled()
    list(completions)
    assert torch.equal(before, torch.get_rng_state())


def test_impossible_requests_are_refused_before_any_work(model):
    """Others: test_sampler_contract."""
    (request,) = make_requests(prompts=1, group=1)
    sampler = sampler_of(model)
    with pytest.raises(RecipeError, match="64 positions"):
        sampler.generate([dataclasses.replace(request, max_tokens=64)])
    assert len(next(sampler.generate([dataclasses.replace(request, max_tokens=63)])).token_ids) > 0


def test_weights_that_are_not_finite_are_reported_not_sampled(model):
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(SamplerError, match="policy version 0 is not finite"):
        list(sampler_of(model).generate(make_requests()))


def test_an_out_of_memory_error_names_the_settings_to_lower(model, monkeypatch):
    def too_large(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    sampler = sampler_of(model)
    monkeypatch.setattr(decoding, "expanded_cache", too_large)
    with pytest.raises(SamplerError, match="max_batch_rollouts"):
        list(sampler.generate(make_requests()))


def test_sliding_windows_slide_in_padded_batches():
    """Rows of up to 23 tokens leave windows of 5."""
    sliding = qwen3(use_sliding_window=True, sliding_window=5, max_window_layers=1)
    assert sliding.config.layer_types == ["full_attention", "sliding_attention"]
    completions = assert_like_naive(sliding, make_requests(prompts=4, group=2))
    assert max(len(each.token_ids) for each in completions.values()) > 5


def test_states_of_convolutions_never_run_over_padding():
    """LFM2's prompts of one length are decoded together."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48,
             "initializer_range": 0.25}  # fmt: skip
    config = AutoConfig.for_model("lfm2", **sizes, layer_types=["conv", "full_attention"])
    torch.manual_seed(0)
    assert_like_naive(
        AutoModelForCausalLM.from_config(config).eval(), make_requests(prompts=4, group=2)
    )


def test_keys_and_values_of_different_widths_are_decoded():
    """DeepSeek's latent attention: keys have 32 numbers a head, values 24."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48,
             "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
             "v_head_dim": 24, "first_k_dense_replace": 1, "initializer_range": 0.25}  # fmt: skip
    config = AutoConfig.for_model("deepseek_v3", **sizes)
    torch.manual_seed(0)
    assert_like_naive(
        AutoModelForCausalLM.from_config(config).eval(), make_requests(prompts=4, group=2)
    )


def test_a_model_that_no_way_decodes_rightly_is_refused_when_the_sampler_opens(model, monkeypatch):
    forward = type(model).forward

    def forgetful(self, input_ids, past_key_values=None, **others):
        return forward(self, input_ids, **others | {"position_ids": None})  # ignores the cache

    monkeypatch.setattr(type(model), "forward", forgetful)
    with pytest.raises(ModelError, match="type qwen3"):
        sampler_of(model)


@pytest.mark.parametrize("of_model", [True, False])
def test_what_a_model_raises_refuses_it_and_an_error_of_ours_is_one(model, monkeypatch, of_model):
    def fail(self, input_ids, past_key_values=None):
        raise TypeError("planted")

    broken, name = (type(model), "forward") if of_model else (decoding, "choose_tokens")
    monkeypatch.setattr(broken, name, fail)
    error, words = (ModelError, "type qwen3") if of_model else (TypeError, "planted")
    with pytest.raises(error, match=words):
        sampler_of(model)


def test_the_sampler_opens_from_a_recipe_and_answers_arithmetic():
    recipe = resolve_recipe([{"model": {"path": "builtin:tiny"}}])
    sampler = HfSampler.open(SamplerOpening.from_recipe(recipe, "builtin:tiny", Comm()))
    from grpo_replay.engine.models import load_tokenizer

    tokenizer = load_tokenizer(recipe.model)
    prompt = np.array(tokenizer("12+13=")["input_ids"], dtype=np.int32)
    requests = [GenerationRequest(RequestKey(1, 0, i), prompt, i, 24) for i in range(16)]
    texts = [tokenizer.decode(c.token_ids) for c in sampler.generate(requests)]
    assert sum("\\boxed{" in text for text in texts) > 8


def test_a_random_initialisation_opens_from_its_own_path_and_is_the_trainers():
    from grpo_replay.engine.models import load_policy

    small = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    model = {"path": "builtin:qwen3-0.6b", "tokenizer": "builtin:bytes", "random_init": small}
    recipe = resolve_recipe([{"model": model}])
    sampler = HfSampler.open(SamplerOpening.from_recipe(recipe, recipe.model.path, Comm()))
    ours, theirs = sampler._model.state_dict(), load_policy(recipe.model, 42).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(ours) == len(theirs) > 10


def test_an_fp32_head_samples_from_logits_that_are_not_rounded(tmp_path):
    """The first token's hidden states are those of a plain forward pass over the prompt."""
    model = qwen3().to(torch.bfloat16)
    prompt = np.arange(3, 9, dtype=np.int32)
    requests = [GenerationRequest(RequestKey(1, 0, i), prompt, i, 1) for i in range(8)]
    hidden = model.model(input_ids=torch.from_numpy(prompt).long()[None]).last_hidden_state[0, -1]
    exact = torch.log_softmax(hidden.float() @ model.lm_head.weight.float().T, -1)

    def differences(sampler: HfSampler) -> np.ndarray:
        completions = sampler.generate(requests)
        return np.array(
            [abs(c.sampler_logprobs[0] - exact[c.token_ids[0]].item()) for c in completions]
        )

    assert differences(sampler_of(model, dtype="bfloat16")).max() > 1e-3
    use_fp32_head(model)
    assert differences(sampler_of(model, dtype="bfloat16")).max() < 1e-5
