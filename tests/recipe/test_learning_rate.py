"""The learning rate of every step, by hand."""

import math

import pytest

from grpo_replay.recipe import Recipe, resolve_recipe


def recipe(steps: int, **optimizer) -> Recipe:
    settings = {"learning_rate": 8.0, **optimizer}
    return resolve_recipe(
        [{"optimizer": settings, "run": {"steps": steps}, "replay": {"preset": "grpo"}}]
    )


def rates(steps: int, **optimizer) -> list[float]:
    return [
        recipe(steps, **optimizer).optimizer.rate_of(step, steps) for step in range(1, steps + 1)
    ]


SCHEDULES = {
    "constant": (4, {}, [8.0] * 4),
    "constant with warm-up": (5, {"warmup_steps": 4}, [2.0, 4.0, 6.0, 8.0, 8.0]),
    "linear": (4, {"schedule": "linear"}, [8.0, 6.0, 4.0, 2.0]),
    "linear with warm-up": (
        6, {"schedule": "linear", "warmup_steps": 2}, [4.0, 8.0, 8.0, 6.0, 4.0, 2.0],
    ),
    "cosine": (
        4, {"schedule": "cosine"},
        [8.0, 4 * (1 + math.sqrt(0.5)), 4.0, 4 * (1 - math.sqrt(0.5))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_by_hand(name):
    steps, optimizer, expected = SCHEDULES[name]
    assert rates(steps, **optimizer) == pytest.approx(expected, rel=1e-15)


def test_the_default_is_the_recipe_s_learning_rate_bit_for_bit():
    assert rates(3, learning_rate=1e-3) == [1e-3] * 3
