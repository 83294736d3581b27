"""What all samplers refuse alike: versions that do not increase, impossible requests, completions
that were not asked for. Incomplete updates: test_hf_weights and the vLLM tests."""

from dataclasses import replace

import numpy as np
import pytest
from naive_sampler import make_requests

from grpo_replay.errors import RecipeError, SamplerError
from grpo_replay.recipe import load_recipe
from grpo_replay.sampling.sampler_protocol import (
    WeightState,
    checked_completions,
    refuse_impossible,
    sampler_class,
)
from grpo_replay.types import Completion


@pytest.mark.parametrize("offered", [3, 2])
def test_a_version_that_does_not_increase_leaves_the_sampler_as_it_was(offered):
    weights = WeightState()
    with pytest.raises(SamplerError, match=f"version {offered} offered to a sampler at version 3"):
        weights.begin(offered, held=3)
    weights.refuse_incomplete()


def test_a_request_may_be_exactly_as_long_as_the_limit():
    (request,) = make_requests(prompts=1, group=1)
    tokens = len(request.prompt_token_ids) + request.max_tokens
    refuse_impossible(request, 29, tokens, "")
    refuse_impossible(request, 29, None, "")
    with pytest.raises(RecipeError, match="the limit; lower"):
        refuse_impossible(request, 29, tokens - 1, "the limit;")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": np.zeros(0, np.int32)}, "0 prompt tokens and max_tokens"),
        ({"max_tokens": 0}, "max_tokens 0; both must be at least 1"),
        ({"prompt_token_ids": np.array([3, 29], np.int32)}, r"3\.\.29 lie outside .* of 29"),
        ({"prompt_token_ids": np.array([-1], np.int32)}, r"-1\.\.-1 lie outside"),
    ],
)
def test_impossible_requests_are_named(changes, message):
    (request,) = make_requests(prompts=1, group=1)
    with pytest.raises(SamplerError, match=rf"request \(\d+, 0, 0\): .*{message}"):
        refuse_impossible(replace(request, **changes), 29, None, "")


class Returns:
    """A sampler that answers with what it was made with."""

    def __init__(self, completions) -> None:
        self._completions = completions

    def generate(self, requests):
        yield from self._completions


def completion(request, **changes) -> Completion:
    tokens, logprobs = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    return replace(Completion(request.key, tokens, logprobs, "stop", 0, 0), **changes)


def test_one_completion_for_each_request_passes_in_any_order():
    requests = make_requests(prompts=1, group=3)
    mask = np.array([True, False, True])
    given = [completion(each, completion_mask=mask) for each in reversed(requests)]
    assert list(checked_completions(Returns(given), requests)) == given


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a, b: [completion(a), completion(a)], "has a key of no open request; give one"),
        (lambda a, b: [completion(b)], r"no completion for 1 of 2 requests, among them RequestKey"),
        (lambda a, b: [completion(a, token_ids=[1, 2, 3])], "token_ids that are no array of int"),
        (
            lambda a, b: [completion(a, sampler_logprobs=np.zeros(2, np.float32))],
            r"sampler_logprobs of shape \[2\] for 3 tokens",
        ),
        (
            lambda a, b: [completion(a, completion_mask=np.ones(4, bool))],
            r"completion_mask of shape \[4\] for 3 tokens",
        ),
    ],
)
def test_what_a_sampler_of_ones_own_may_not_return_is_named(make, message):
    requests = make_requests(prompts=1, group=2)
    with pytest.raises(SamplerError, match=rf"Returns.generate: .*{message}"):
        list(checked_completions(Returns(make(*requests)), requests))


def a_function(opening):
    return opening


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_function", "is a function without reads_files, open, generate"),
        ("Returns", "is a type without reads_files, open, load_weights, sleep, clo"),
    ],
)
def test_what_is_no_sampler_is_refused(name, message):
    sampling = load_recipe("tiny", [f"sampling.backend={__file__}:{name}"]).sampling
    with pytest.raises(RecipeError, match=message):
        sampler_class(sampling)
