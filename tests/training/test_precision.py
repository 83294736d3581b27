"""What bfloat16 does to a sum of many micro-batches, and that the user is told."""

import pytest
import torch
from core_engine import make_rows, plain_logprobs, relative, tiny_model
from small_runs.trained import small_recipe

from grpo_replay.engine.deepspeed_engine import deepspeed_config, notices_of_precision


def test_many_gradients_summed_in_bf16_are_off_by_what_the_notice_says():
    model = tiny_model().to(torch.bfloat16)
    gradients = []
    for row in make_rows(24):
        model.zero_grad()
        (plain_logprobs(model, row)[0].sum() * row.coefficient).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    order = torch.randint(24, (1024,), generator=torch.Generator().manual_seed(0))
    low, exact = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0]).double()
    errors = {}
    for count, index in enumerate(order.tolist(), start=1):
        low += gradients[index]
        exact += gradients[index].double()
        errors[count] = relative(low.double(), exact)
    assert errors[64] == pytest.approx(0.01, rel=0.4)
    assert errors[1024] == pytest.approx(0.09, rel=0.4)


@pytest.mark.parametrize("stage, told", [(0, True), (1, True), (2, False), (3, False)])
def test_the_stages_that_sum_in_bf16_are_told_and_the_others_sum_in_fp32(stage, told):
    recipe = small_recipe(model={"dtype": "bfloat16"}, engine={"zero_stage": stage})
    assert len(notices_of_precision("bfloat16", stage)) == told
    assert notices_of_precision("float32", stage) == []
    config = deepspeed_config(recipe.optimizer, recipe.engine, "bfloat16", stage, on_cuda=False)
    assert (config["data_types"]["grad_accum_dtype"] == "fp32") is not told
