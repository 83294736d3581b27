"""How the policy is optimised: AdamW, DeepSpeed ZeRO, processes and time limits."""

from typing import Annotated, Literal

from pydantic import Field

from grpo_replay.recipe.base import Positive, Section


class OptimizerSection(Section):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """AdamW learning rate: the highest of the schedule (TRL: learning_rate)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, from step to step, down to
    `final_fraction` of it one step after `run.steps` (TRL: lr_scheduler_type)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Training steps in which the learning rate rises linearly: in step s it is s / `warmup_steps`
    of `learning_rate` (TRL: warmup_steps)."""
    final_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of `learning_rate` towards which `linear` and `cosine` fall."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the first moment (TRL: adam_beta1)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay rate of the second moment (TRL: adam_beta2)."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's ε (TRL: adam_epsilon)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay (TRL: weight_decay)."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum global L2 norm of the gradient; larger gradients are scaled down (TRL:
    max_grad_norm)."""


class ZeroSection(Section):
    """DeepSpeed's ZeRO thresholds, in elements (not bytes), under its own names. They change memory
    use and speed, never results."""

    reduce_bucket_size: Positive = 500_000_000
    """Gradient elements reduced at once (ZeRO 1-3)."""
    allgather_bucket_size: Positive = 500_000_000
    """Elements of updated parameters gathered at once (ZeRO 1-2)."""
    param_persistence_threshold: Annotated[int, Field(ge=0)] = 100_000
    """Parameters of at most this size are not sharded (ZeRO 3)."""
    prefetch_bucket_size: Annotated[int, Field(ge=0)] = 50_000_000
    """Parameter elements fetched before they are used (ZeRO 3)."""
    max_live_parameters: Annotated[int, Field(ge=0)] = 1_000_000_000
    """Maximum parameter elements gathered at the same time (ZeRO 3)."""
    max_reuse_distance: Annotated[int, Field(ge=0)] = 1_000_000_000
    """Keep a parameter gathered if it is used again within this many elements (ZeRO 3)."""
    sub_group_size: Positive = 1_000_000_000
    """Parameter elements per optimizer sub-group (ZeRO 3)."""


class EngineSection(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device the policy trains on. `auto` is CUDA if available, otherwise CPU."""
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """DeepSpeed ZeRO stage. `auto` is 3 on several ranks. On one rank, where there is nothing to
    shard, it is 0, or 2 for bfloat16 (fp32 gradient sums) and `offload_optimizer`."""
    zero: ZeroSection = Field(default_factory=ZeroSection)
    """DeepSpeed's ZeRO thresholds."""
    num_processes: Positive = 1
    """Number of ranks on this node. `--num-processes` overrides it."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory (ZeRO 1-3, CUDA)."""
    offload_parameters: bool = False
    """Keep the parameters in host memory (ZeRO 3, CUDA)."""
    logprob_chunk_tokens: Positive | None = None
    """Completion tokens whose logits are computed at once. Limits the memory of the output head.
    If null, as many as have 160 MiB of fp32 logits, rounded down to a multiple of 64, from 64 to
    1,024: 256 for Qwen's vocabulary of 151,936, and 1,024 up to 40,960 words."""
    threads_per_process: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of torch per rank. CPU cores divided by ranks if null."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Maximum wait in a collective before the run fails."""
    hang_report_seconds: Annotated[float, Field(gt=0)] | None = None
    """Time without progress after which every rank logs where it waits. `timeout_seconds` / 6 if
    null."""
