"""Tokens chosen by inversion: the definition in float64, at every size of vocabulary."""

import numpy as np
import pytest
import torch
from naive_sampler import naive_logp

from grpo_replay.sampling import decoding
from grpo_replay.sampling.decoding import SamplingParameters, UniformRows, choose_tokens
from grpo_replay.types import GenerationRequest, RequestKey


def parameters_of(*settings):
    requests = [
        GenerationRequest(RequestKey(1, 0, i), np.ones(1, np.int32), 0, 1, t, p)
        for i, (t, p) in enumerate(settings)
    ]
    return SamplingParameters.from_requests(requests, torch.device("cpu"))


def chosen(logits_RV, uniforms_R, parameters):
    tokens, logprobs = choose_tokens(
        torch.tensor(logits_RV, dtype=torch.float32), torch.tensor(uniforms_R), parameters
    )
    return tokens.tolist(), logprobs.numpy()


@pytest.mark.parametrize("vocabulary", [2, 24, 128, 129, 2003])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.05])
def test_the_token_is_where_the_cumulative_probability_exceeds_the_uniform_number(
    vocabulary, top_p
):
    rng = np.random.default_rng(vocabulary)
    rows = 64 if vocabulary < 1000 else 16
    logits_RV = (3 * rng.standard_normal((rows, vocabulary))).astype(np.float32)
    temperatures = rng.choice([0.5, 1.0, 2.0], rows)
    uniforms_R = rng.random(rows)
    parameters = parameters_of(*[(t, top_p) for t in temperatures])
    tokens, logprobs = chosen(logits_RV, uniforms_R, parameters)
    for row in range(rows):
        logp = naive_logp(logits_RV[row], temperatures[row], top_p)
        cumulative = np.cumsum(np.exp(logp))
        assert tokens[row] == np.searchsorted(cumulative, uniforms_R[row], side="right")
        assert logprobs[row] == pytest.approx(logp[tokens[row]], abs=2e-5)


@pytest.mark.parametrize("vocabulary", [4, 300])
def test_the_ends_of_the_unit_interval_choose_tokens_that_can_occur(vocabulary):
    logits = np.full((2, vocabulary), -np.inf)
    logits[:, 1:3] = 0.0
    tokens, logprobs = chosen(logits, [0.0, 1 - 2**-53], parameters_of((1.0, 1.0), (1.0, 1.0)))
    assert tokens == [1, 2]
    assert logprobs == pytest.approx(np.log([0.5, 0.5]))


def test_the_nucleus_is_the_fewest_tokens_that_reach_the_mass():
    """Probabilities 1/2, 1/4, 1/8, 1/8: a mass of 0.75 takes two tokens, above it three."""
    logits = np.log([[0.125, 0.5, 0.125, 0.25]] * 3)
    uniforms = [0.999999] * 3
    parameters = parameters_of((1.0, 0.74), (1.0, 0.76), (1.0, 0.49))
    tokens, logprobs = chosen(logits, uniforms, parameters)
    assert tokens == [3, 3, 1]
    assert logprobs == pytest.approx(np.log([1 / 3, 0.25 / 0.875, 1.0]), abs=1e-6)


def test_greedy_ignores_the_uniform_number_and_reports_the_full_distribution_at_temperature_1():
    logits = np.log([[0.2, 0.5, 0.3]] * 2)
    tokens, logprobs = chosen(logits, [0.0, 0.999], parameters_of((0.0, 1.0), (0.0, 0.1)))
    assert tokens == [1, 1]
    assert logprobs == pytest.approx(np.log([0.5, 0.5]), abs=1e-6)


def test_chunks_of_rows_choose_what_all_rows_at_once_choose(monkeypatch):
    rng = np.random.default_rng(1)
    logits, uniforms = rng.standard_normal((50, 300)), rng.random(50)
    parameters = parameters_of(
        *[(t, p) for t in (0.0, 0.7) for p in (1.0, 0.5) for _ in range(13)][:50]
    )
    whole = chosen(logits, uniforms, parameters)
    monkeypatch.setattr(decoding, "CHUNK_LOGITS", 7 * 300)
    parts = chosen(logits, uniforms, parameters)
    assert whole[0] == parts[0]
    assert np.array_equal(whole[1], parts[1])


def test_random_numbers_depend_only_on_seed_and_position():
    seeds = [5, 0, 2**63 - 1]
    whole = UniformRows(seeds).next_block(np.arange(3), 40)
    split = UniformRows(seeds)
    first, second = split.next_block(np.arange(3), 16), split.next_block(np.array([2, 0]), 24)
    assert np.array_equal(first, whole[:, :16])
    assert np.array_equal(second, whole[[2, 0], 16:])
    expected = np.random.Generator(np.random.Philox(key=5)).random(40)
    assert np.array_equal(whole[0], expected)


@pytest.mark.parametrize("vocabulary", [24, 260])
def test_a_row_without_numbers_has_a_token_and_no_log_prob(vocabulary):
    """Its caller refuses it."""
    logits_RV = np.zeros((2, vocabulary), np.float32)
    logits_RV[1, 3] = np.nan
    tokens, logprobs = chosen(logits_RV, [0.5, 0.5], parameters_of((1.0, 1.0), (1.0, 1.0)))
    assert max(tokens) < vocabulary
    assert np.isfinite(logprobs).tolist() == [True, False]
