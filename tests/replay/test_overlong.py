"""DAPO's soft overlong punishment, worked by hand."""

import pytest

from grpo_replay.replay.rollouts import overlong_score


@pytest.mark.parametrize(
    ("length", "score"),
    [(0, 0.0), (16_384, 0.0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1.0), (30_000, -1.0)],
)
def test_the_lengths_of_the_paper(length, score):
    """DAPO, section 4.1: at most 20,480 tokens with a cache of 4,096."""
    assert overlong_score(length, longest_tokens=20_480, buffer_tokens=4096) == score
