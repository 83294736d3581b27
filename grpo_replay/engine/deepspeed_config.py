"""DeepSpeed's configuration of a recipe, and the learning rate of a training step."""

from typing import Any

from grpo_replay.recipe import OptimizerSection, Recipe, ZeroSection


def deepspeed_config(recipe: Recipe, stage: int, on_cuda: bool) -> dict[str, Any]:
    """DeepSpeed's configuration at a ZeRO stage. Accumulation is ours: micro-batches vary from
    update to update, and the loss already has its global denominator."""
    optimizer, engine = recipe.optimizer, recipe.engine
    zero = {"stage": stage, **_thresholds(engine.zero)}
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if engine.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    bf16 = recipe.model.dtype == "bfloat16"
    accumulation = "fp32" if bf16 and not sums_in_bf16(recipe.model.dtype, stage) else None
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.max_grad_norm,
        "optimizer": {"type": "AdamW", "params": _adamw_parameters(optimizer, on_cuda)},
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": accumulation},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def _thresholds(zero: ZeroSection) -> dict[str, Any]:
    return {
        "reduce_bucket_size": zero.reduce_bucket_size,
        "allgather_bucket_size": zero.allgather_bucket_size,
        "stage3_param_persistence_threshold": zero.param_persistence_threshold,
        "stage3_prefetch_bucket_size": zero.prefetch_bucket_size,
        "stage3_max_live_parameters": zero.max_live_parameters,
        "stage3_max_reuse_distance": zero.max_reuse_distance,
        "sub_group_size": zero.sub_group_size,
        **zero.others,
    }


def sums_in_bf16(dtype: str, stage: int) -> bool:
    """Whether the gradients of an update's micro-batches are summed in bfloat16.

    DeepSpeed 0.19 refuses an fp32 sum at stage 0 ("unsupported mix", engine.py
    `_do_optimizer_sanity_check`), and at stage 1 makes it with another optimizer, BF16_Optimizer,
    whose checkpoints are not those of the other stages.
    """
    return dtype == "bfloat16" and stage < 2


def notices_of_precision(dtype: str, stage: int) -> list[str]:
    """A sentence for the user of a recipe that sums gradients in bfloat16."""
    if not sums_in_bf16(dtype, stage):
        return []
    return [
        f"model.dtype bfloat16 at engine.zero_stage {stage} sums the gradients "
        "of an update's micro-batches in bfloat16: measured, the sum of 64 is off by 1%, of 1,024 "
        "by 9%. Set engine.zero_stage 2 or 3, which sum in fp32, also on one rank"
    ]


def _adamw_parameters(optimizer: OptimizerSection, on_cuda: bool) -> dict[str, Any]:
    """On a CPU torch's own choice is a loop of ten passes over every tensor; fused makes one."""
    return {
        "fused": not on_cuda and "foreach" not in optimizer.adamw.others,
        "lr": optimizer.learning_rate,  # of no update: `begin_step` sets that of each step
        "betas": [optimizer.beta1, optimizer.beta2],
        "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        **optimizer.adamw.others,
        "torch_adam": True,
    }
