"""The user is told where gradients of many micro-batches are summed in bfloat16."""

import pytest
from small_runs.trained import small_recipe

from grpo_replay.engine.deepspeed_engine import deepspeed_config, notices_of_precision


@pytest.mark.parametrize("stage, told", [(0, True), (1, True), (2, False), (3, False)])
def test_the_stages_that_sum_in_bf16_are_told_and_the_others_sum_in_fp32(stage, told):
    recipe = small_recipe(model={"dtype": "bfloat16"}, engine={"zero_stage": stage})
    assert len(notices_of_precision("bfloat16", stage)) == told
    assert notices_of_precision("float32", stage) == []
    config = deepspeed_config(recipe.optimizer, recipe.engine, "bfloat16", stage, on_cuda=False)
    assert (config["data_types"]["grad_accum_dtype"] == "fp32") is not told
