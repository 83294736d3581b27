"""Truncated importance weights between sampler and trainer."""

import math
from dataclasses import replace

import numpy as np
import pytest
from buffer_makers import make_rollout

from grpo_replay.recipe import LossSection, SamplerRatio
from grpo_replay.replay.batch import sampler_weights, train_rows


def rollout_with(behavior: list[float], sampler: list[float]):
    return replace(
        make_rollout(0),
        completion_token_ids=np.arange(len(behavior), dtype=np.int32),
        behavior_logprobs=np.array(behavior, np.float32),
        sampler_logprobs=np.array(sampler, np.float32),
    )


def test_weights_by_hand():
    """The trainer finds a token e^0.1 times as likely as the sampler did, one 3 times, one 1/3."""
    rollout = rollout_with([-1.0, -1.0, -2.0], [-1.1, -1.0 - math.log(3), -2.0 + math.log(3)])
    found = sampler_weights(rollout, LossSection(sampler_ratio=SamplerRatio(high=2.0)))
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([math.exp(0.1), 2.0, 1 / 3], rel=1e-6)


def test_a_log_ratio_that_would_overflow_is_the_cap():
    rollout = rollout_with([0.0], [-1e4])
    assert sampler_weights(rollout, LossSection(sampler_ratio=SamplerRatio(high=2.0))).tolist() == [
        2.0
    ]


def test_weights_outside_the_bounds_are_0_or_the_bound():
    rollout = rollout_with([-1.0, -1.0, -1.0], [-1.0, -1 - math.log(3), -1 + math.log(3)])
    for action, expected in (("truncate", [1, 2, 0.5]), ("mask", [1, 0, 0])):
        bounds = SamplerRatio(low=0.5, high=2, action=action)
        found = sampler_weights(rollout, LossSection(sampler_ratio=bounds))
        assert found.tolist() == pytest.approx(expected)


def test_the_weight_of_a_rollout_is_the_product_over_the_tokens_that_train():
    rollout = rollout_with([-1.0, -1.0, -1.0], [-1.1, -1.2, -9.0])
    rollout = replace(rollout, completion_mask=np.array([True, True, False]))
    whole = LossSection(sampler_ratio=SamplerRatio(level="sequence"))
    assert sampler_weights(rollout, whole).tolist() == pytest.approx([math.exp(0.3)] * 3, rel=1e-6)


def test_rows_have_weights_only_if_the_recipe_has_a_cap():
    rollout = rollout_with([-1.0], [-1.5])
    (plain,) = train_rows([rollout], None, LossSection(), 9)
    (corrected,) = train_rows([rollout], None, LossSection(sampler_ratio=SamplerRatio(high=9.0)), 9)
    assert len(plain.sampler_weights) == 0
    assert corrected.sampler_weights.tolist() == pytest.approx([math.exp(0.5)], rel=1e-6)
