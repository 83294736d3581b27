"""The reward of `tiny-slow`, which waits."""

import asyncio
import math
import time

import numpy as np
import pytest

from grpo_replay.named_functions import load_function
from grpo_replay.recipe import load_recipe

PLACE = load_recipe("tiny-slow").reward.main_function
passed = load_function(PLACE)
seconds_of = load_function(PLACE.replace(":passed", ":seconds_of"))


def test_waits_are_log_normal_twice_as_long_for_failures_and_in_proportion_to_the_length():
    works = [f"{number:0200d}" for number in range(4000)]
    logs = np.log([seconds_of(work, True) for work in works])
    assert np.median(logs) == pytest.approx(math.log(1.5), abs=0.03)
    assert logs.std() == pytest.approx(0.5, abs=0.02)
    for work in works[:50]:
        assert seconds_of(work, False) == pytest.approx(2 * seconds_of(work, True))
    halves = np.log([seconds_of(work[100:], True) for work in works])
    assert np.median(halves) == pytest.approx(math.log(0.75), abs=0.03)
    assert seconds_of("9" * 20_000, False) == 20


def test_the_reward_comes_after_its_wait_and_calls_wait_together():
    async def both() -> list[float]:
        return await asyncio.gather(
            *(passed("a1=7;\\boxed{7}", answer, "0=") for answer in ("7", "8"))
        )

    longest = seconds_of("0=a1=7;\\boxed{7}", False)
    assert 0.05 < longest < 1
    began = time.monotonic()
    assert asyncio.run(both()) == [1.0, 0.0]
    assert longest <= time.monotonic() - began
