"""γ by hand."""

import pytest

from grpo_replay.replay.compose import relative_compute


def test_gamma_by_hand():
    """μ = 5: without a buffer generating and training cost 5 + 1. At y = 2.5 each rollout is used
    2.5 times, so a step generates for 5 / 2.5 = 2 and costs 3; at y = 1 it costs 6."""
    assert relative_compute(2.5, 5.0) == pytest.approx(3 / 6)
    assert relative_compute(1.0, 5.0) == 1.0
