"""The recipe's thresholds are DeepSpeed's, by name, default and effect."""

import sys
from typing import Any

import pytest
import torch
from core_engine import SCALED, engine_recipe, make_rows, open_engine, tiny_model

from grpo_replay.engine.deepspeed_engine import deepspeed_config
from grpo_replay.engine.engine_state import param_groups
from grpo_replay.recipe import Recipe, ZeroSection


def read_by_deepspeed(engine: dict[str, Any]) -> Any:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = config_of(engine_recipe(engine=engine), engine["zero_stage"])
    return DeepSpeedZeroConfig(**config["zero_optimization"])


def config_of(recipe: Recipe, stage: int) -> dict[str, Any]:
    return deepspeed_config(recipe.optimizer, recipe.engine, recipe.model.dtype, stage)


def test_every_threshold_reaches_deepspeed_and_has_its_default():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    leaves = list(ZeroSection.model_fields)
    assert len(leaves) == 7 and set(leaves) == set(SCALED["zero"])
    own, default = DeepSpeedZeroConfig(stage=3), read_by_deepspeed({"zero_stage": 3})
    scaled = read_by_deepspeed(SCALED)
    for leaf in leaves:
        field = leaf.removeprefix("stage3_")  # without its alias
        assert getattr(default, field) == getattr(own, field), leaf
        assert getattr(scaled, field) == SCALED["zero"][leaf], leaf


@pytest.mark.parametrize(("stage", "in_fp32"), [(0, False), (1, False), (2, True), (3, True)])
def test_gradients_of_bfloat16_are_summed_in_fp32_from_stage_2_on(stage, in_fp32):
    config = config_of(engine_recipe(model={"dtype": "bfloat16"}), stage)
    assert (config["data_types"]["grad_accum_dtype"] == "fp32") is in_fp32


def test_adamw_is_fused_unless_the_recipe_asks_for_another_form(processes):
    stage = 3
    with open_engine(processes, engine={"zero_stage": stage}) as engine:
        assert all(group["fused"] for group in param_groups(engine._engine))
    asked = {"optimizer": {"adamw": {"foreach": True}}, "engine": {"zero_stage": stage}}
    with open_engine(processes, **asked) as engine:
        engine.update(make_rows(2, 0))
        assert [group["fused"] for group in param_groups(engine._engine)] == [False]


def test_one_rank_copies_no_gradients_to_reduce_them(processes):
    def refuse(*_: Any) -> None:
        raise AssertionError("gradients were reduced")

    with open_engine(processes) as engine:
        engine._engine.allreduce_bucket = refuse
        engine.update(make_rows(2, 0))


def test_a_parameter_without_a_part_in_the_update_decays(processes):
    policy = tiny_model()
    policy.unused = torch.nn.Parameter(torch.ones(3))
    settings = {"learning_rate": 0.1, "adamw": {"weight_decay": 0.5}}
    with open_engine(processes, policy, optimizer=settings) as engine:
        engine.update(make_rows(2, 0))
        assert policy.unused.tolist() == pytest.approx(3 * [1 - 0.1 * 0.5])


def test_deepspeed_compiles_no_operator_of_shared_memory(processes):
    assert sys.modules["deepspeed.comm.torch"].build_shm_op() is None
