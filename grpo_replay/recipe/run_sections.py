"""Sections of the run around the algorithm: DeepSpeed, steps, checkpoints, evaluation, tracking."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from grpo_replay.recipe.base import (
    MIN_TEMPERATURE,
    Passthrough,
    Positive,
    Seconds,
    Section,
    distinct,
)
from grpo_replay.recipe.open_lists import VERIFIERS


class ZeroSection(Passthrough):
    """DeepSpeed's `zero_optimization` settings, in elements. They change memory and speed only."""

    RESERVED: ClassVar[frozenset[str]] = frozenset({"stage", "offload_optimizer", "offload_param"})

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000


class EngineSection(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is CUDA if available, otherwise CPU."""
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """DeepSpeed ZeRO stage. `auto`: on several ranks 3, or 2 on GPUs of which the state takes half
    at most; on one rank 0, or 2 for bfloat16 and `offload: optimizer`."""
    zero: ZeroSection = Field(default_factory=ZeroSection)
    """DeepSpeed's ZeRO settings."""
    num_processes: Positive = 1
    """Number of ranks on this node. `--num-processes` overrides it."""
    offload: Literal["nothing", "optimizer", "everything"] = "nothing"
    """Kept in host memory (CUDA): the state of the `optimizer` (ZeRO 1-3), or `everything`,
    parameters too (ZeRO 3)."""
    logprob_chunk_tokens: Positive | None = None
    """Completion tokens whose logits are computed at once, which limits the head's memory. If null,
    as many as have 160 MiB of fp32 logits (on a GPU 640), 64 to 1,024: 256 (1,024) for Qwen."""
    threads_per_process: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads per rank. If null, cores divided by ranks, at most `OMP_NUM_THREADS`."""
    timeout_seconds: Seconds = 1800.0
    """Maximum wait in a collective. After a sixth of it without progress every rank logs where it
    waits."""

    @property
    def offload_optimizer(self) -> bool:
        return self.offload != "nothing"

    @property
    def offload_parameters(self) -> bool:
        return self.offload == "everything"


class RunSection(Section):
    steps: Positive = 200
    """Number of training steps."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of everything random, except evaluation (`eval.seed`)."""
    mode: Literal["sync", "async"] = "sync"
    """`async`: vLLM servers sample without pause while the trainer works (docs/sampling.md)."""
    sync_every_steps: Positive = 1
    """Steps between weight pushes to the sampler; above 1 needs `loss.behavior_logprobs:
    sampler`."""

    @property
    def is_async(self) -> bool:
        """True if sampling continues while the trainer works."""
        return self.mode == "async"


class CheckpointSection(Section):
    every_steps: Positive = 50
    """Steps between checkpoints. The last step always writes one."""
    keep: Annotated[int, Field(ge=2)] = 3
    """Newest checkpoints to keep."""
    merged: Literal["last", "all"] = "last"
    """With `model.lora`, the checkpoints that also have `model/`, the base with the adapters merged
    in, in float32: that of the last step, or all. Each has `adapter/`."""
    restore_buffer: bool = True
    """Restore the buffer on resume; if false, it starts empty."""


class EvalSection(Section):
    benchmarks: list[str] = Field(default_factory=list)
    """Names or groups of docs/evaluation.md, or files and folders as for `prompts.source`. Empty:
    no evaluation."""
    every_steps: Positive | Annotated[list[Positive], Field(min_length=1)] | None = None
    """Steps between evaluations, or a list of the steps after which to evaluate. The last step is
    always evaluated. Null: only at the start and at the end."""
    at_start: bool = True
    """Evaluate the base model before the first step."""
    samples: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """k, completions per problem. Null: each benchmark's own."""
    temperature: Annotated[float, Field(ge=0)] = 0.6
    """0 decodes greedily."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Top-p (nucleus sampling)."""
    max_completion_length: Positive | None = None
    """Maximum tokens of a completion. Null: `sampling.max_completion_length`."""
    greedy: bool = False
    """Also decode one greedy completion per problem."""
    data_folder: str | None = None
    """Folder with `<benchmark>.jsonl` or `.parquet`, read instead of the hub."""
    max_problems: Positive | None = None
    """Only this many from the start of each benchmark."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of the first eight samples of a problem. Each further eight use the next seed."""
    reward: str = "boxed"
    """Verifier, as in `reward.function`. Your own counts a completion as correct from
    `reward.correct`."""

    @field_validator("benchmarks", mode="before")
    @classmethod
    def _is_a_list(cls, benchmarks: Any) -> Any:
        if isinstance(benchmarks, str):
            raise ValueError("expected a list: write [NAME]")
        return benchmarks

    @field_validator("every_steps")
    @classmethod
    def _are_distinct(cls, steps: int | list[int] | None) -> int | list[int] | None:
        return distinct(steps) if isinstance(steps, list) else steps

    @field_validator("temperature")
    @classmethod
    def _is_not_too_cold(cls, temperature: float) -> float:
        if 0 < temperature < MIN_TEMPERATURE:
            raise ValueError(f"0 for greedy decoding, or {MIN_TEMPERATURE} and more")
        return temperature

    @field_validator("reward")
    @classmethod
    def _is_verifier(cls, reward: str) -> str:
        VERIFIERS.check(reward)
        return reward

    def is_due(self, step: int) -> bool:
        """Returns whether `every_steps` asks for an evaluation after training step `step`."""
        if isinstance(self.every_steps, list):
            return step in self.every_steps
        return self.every_steps is not None and step % self.every_steps == 0


class TrackingSection(Section):
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default=["tensorboard"])
    """Trackers beside metrics.jsonl. W&B's and trackio's project is grpo-replay and the run its
    directory's name, unless their variables (WANDB_PROJECT, WANDB_NAME, …) say otherwise."""
