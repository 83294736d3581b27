"""How the policy is optimised: AdamW, DeepSpeed ZeRO, processes and time limits."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from grpo_replay.recipe.base import GIVEN, Passthrough, Positive, Section


class AdamwOptions(Passthrough):
    """Arguments of `torch.optim.AdamW`."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01,
    }

    if TYPE_CHECKING:
        betas: list[float] = GIVEN
        eps: float = GIVEN
        weight_decay: float = GIVEN


class ZeroSection(Passthrough):
    """DeepSpeed's `zero_optimization` settings, in elements (not bytes) where they are sizes. They
    change memory use and speed, never results."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "reduce_bucket_size": 500_000_000,
        "allgather_bucket_size": 500_000_000,
        "param_persistence_threshold": 100_000,
        "prefetch_bucket_size": 50_000_000,
        "max_live_parameters": 1_000_000_000,
        "max_reuse_distance": 1_000_000_000,
        "sub_group_size": 1_000_000_000,
    }
    TAKEN: ClassVar[frozenset[str]] = frozenset({"stage", "offload_optimizer", "offload_param"})

    if TYPE_CHECKING:
        reduce_bucket_size: int = GIVEN
        allgather_bucket_size: int = GIVEN
        param_persistence_threshold: int = GIVEN
        prefetch_bucket_size: int = GIVEN
        max_live_parameters: int = GIVEN
        max_reuse_distance: int = GIVEN
        sub_group_size: int = GIVEN


class OptimizerSection(Section):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """AdamW learning rate: the highest of the schedule (TRL: learning_rate)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, from step to step, down to 0 one step after
    `run.steps` (TRL: lr_scheduler_type)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Training steps in which the learning rate rises linearly: in step s it is s / `warmup_steps`
    of `learning_rate` (TRL: warmup_steps)."""
    adamw: AdamwOptions = Field(default_factory=AdamwOptions)
    """Arguments of torch's AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum global L2 norm of the gradient; larger gradients are scaled down (TRL:
    max_grad_norm)."""

    @property
    def beta1(self) -> float:
        return self.adamw.betas[0]

    @property
    def beta2(self) -> float:
        return self.adamw.betas[1]

    @property
    def epsilon(self) -> float:
        return self.adamw.eps

    @property
    def weight_decay(self) -> float:
        return self.adamw.weight_decay


class EngineSection(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device the policy trains on. `auto` is CUDA if available, otherwise CPU."""
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """DeepSpeed ZeRO stage. `auto` is 3 on several ranks. On one rank, where there is nothing to
    shard, it is 0, or 2 for bfloat16 (fp32 gradient sums) and `offload: optimizer`."""
    zero: ZeroSection = Field(default_factory=ZeroSection)
    """DeepSpeed's ZeRO settings."""
    num_processes: Positive = 1
    """Number of ranks on this node. `--num-processes` overrides it."""
    offload: Literal["nothing", "optimizer", "everything"] = "nothing"
    """What is kept in host memory (CUDA): the state of the `optimizer` (ZeRO 1-3), or `everything`,
    the parameters too (ZeRO 3)."""
    logprob_chunk_tokens: Positive | None = None
    """Completion tokens whose logits are computed at once. Limits the memory of the output head.
    If null, as many as have 160 MiB of fp32 logits, rounded down to a multiple of 64, from 64 to
    1,024: 256 for Qwen's vocabulary of 151,936, and 1,024 up to 40,960 words."""
    threads_per_process: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of torch per rank. CPU cores divided by ranks if null."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Maximum wait in a collective before the run fails. After a sixth of it without progress every
    rank logs where it waits."""

    @property
    def offload_optimizer(self) -> bool:
        return self.offload != "nothing"

    @property
    def offload_parameters(self) -> bool:
        return self.offload == "everything"
