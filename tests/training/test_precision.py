"""What bfloat16 does to a sum of many micro-batches, and that the user is told."""

import pytest
import torch
from core_engine import make_rows, open_engine, plain_logprobs, relative, tiny_model, weighted
from small_runs.trained import small_recipe

from grpo_replay.engine.deepspeed_engine import deepspeed_config, notices_of_precision
from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.recipe import LossSection


def recipe_at(stage: int, dtype: str = "bfloat16"):
    return small_recipe(model={"dtype": dtype}, engine={"zero_stage": stage})


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
    recipe = recipe_at(stage)
    said = dry_run(recipe, gpu_memory_gib=8)["assumptions"]
    notices = notices_of_precision(recipe.model.dtype, stage)
    assert len(notices) == told
    assert [each for each in said if "in bfloat16" in each] == notices
    config = deepspeed_config(recipe.optimizer, recipe.engine, "bfloat16", stage, on_cuda=False)
    assert (config["data_types"]["grad_accum_dtype"] == "fp32") is not told
    assert notices_of_precision("float32", stage) == []


def test_deepspeed_refuses_an_fp32_sum_at_stage_0(processes, monkeypatch):
    """If this fails, DeepSpeed has learnt it: use it."""
    monkeypatch.setattr("grpo_replay.engine.deepspeed_engine.sums_in_bf16", lambda *_: False)
    with (
        pytest.raises(NotImplementedError, match="unsupported mix"),
        open_engine(processes, model={"dtype": "bfloat16"}, engine={"zero_stage": 0}),
    ):
        raise AssertionError("opened")


@pytest.mark.slow
def test_at_stage_2_an_update_does_not_depend_on_its_number_of_micro_batches(processes):
    """The same rows, once and eight times over, have the same mean gradient."""
    norms = []
    for times in (1, 8):
        rows = weighted(make_rows(4) * times, LossSection())
        with open_engine(
            processes, batch={"max_tokens_per_microbatch": 23}, model={"dtype": "bfloat16"},
            engine={"zero_stage": 2},
        ) as engine:  # fmt: skip
            norms.append(engine.update(rows).grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
