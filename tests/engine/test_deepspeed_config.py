"""The recipe's thresholds are DeepSpeed's, by name, default and effect."""

from typing import Any

import pytest
from core_engine import SCALED, engine_recipe

from grpo_replay.engine.deepspeed_config import deepspeed_config
from grpo_replay.recipe import ZeroSection

LEAVES = list(ZeroSection.DEFAULTS)


def read_by_deepspeed(engine: dict[str, Any]) -> Any:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = deepspeed_config(engine_recipe(engine=engine), engine["zero_stage"])
    return DeepSpeedZeroConfig(**config["zero_optimization"])


def test_every_threshold_is_tested():
    assert len(LEAVES) == 7 and set(LEAVES) == set(SCALED["zero"])


@pytest.mark.parametrize("leaf", LEAVES)
def test_the_default_is_deepspeed_s(leaf):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    own = DeepSpeedZeroConfig(stage=3)
    assert getattr(read_by_deepspeed({"zero_stage": 3}), leaf) == getattr(own, leaf)


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_threshold_reaches_deepspeed(leaf):
    assert getattr(read_by_deepspeed(SCALED), leaf) == SCALED["zero"][leaf]
