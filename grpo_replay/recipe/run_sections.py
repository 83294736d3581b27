"""The run around the algorithm: DeepSpeed, steps, checkpoints, evaluation, tracking."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from grpo_replay.recipe.base import LEAST_TEMPERATURE, Passthrough, Positive, Seconds, Section
from grpo_replay.recipe.open_lists import VERIFIERS


class ZeroSection(Passthrough):
    """DeepSpeed's `zero_optimization` settings, in elements (not bytes) where they are sizes. They
    change memory use and speed, never results."""

    TAKEN: ClassVar[frozenset[str]] = frozenset({"stage", "offload_optimizer", "offload_param"})

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    param_persistence_threshold: int = 100_000
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000


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
    """CPU threads of torch per rank. If null, CPU cores divided by ranks, at most
    `OMP_NUM_THREADS`."""
    timeout_seconds: Seconds = 1800.0
    """Maximum wait in a collective before the run fails. After a sixth of it without progress every
    rank logs where it waits."""

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
    """`sync` generates, updates and pushes weights in turn. `async`: vLLM servers sample without
    pause while the trainer works (docs/sampling.md)."""
    sync_every_steps: Positive = 1
    """Training steps between weight pushes to the sampler. With k > 1 the sampler's policy is up to
    k - 1 steps old, on purpose (paper B); this needs `loss.behavior_logprobs: sampler`."""

    @property
    def is_async(self) -> bool:
        """True if sampling goes on while the trainer works: what a step takes may be late."""
        return self.mode == "async"


class CheckpointSection(Section):
    every_steps: Positive = 50
    """Training steps between checkpoints. The last step always writes one."""
    keep: Annotated[int, Field(ge=2)] = 3
    """Number of newest checkpoints to keep."""
    restore_buffer: bool = True
    """Restore the replay buffer on resume. If false, it starts empty."""


class EvalSection(Section):
    benchmarks: list[str] = Field(default_factory=list)
    """Names of benchmarks or groups: `tiny`, `tiny_long`, `paper`, `paper_b`, `math500`; or
    files and folders as for `prompts.source`, with the fields of `prompts`. No evaluation
    if empty."""
    every_steps: Positive | None = None
    """Training steps between evaluations. If null, only at the start and at the end."""
    at_start: bool = True
    """Evaluate the base model before the first step."""
    samples: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """k, completions per problem. Each benchmark's own k if null."""
    temperature: Annotated[float, Field(ge=0)] = 0.6
    """Sampling temperature. 0 decodes greedily."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Top-p (nucleus sampling)."""
    max_completion_length: Positive | None = None
    """Maximum completion length in tokens. `sampling.max_completion_length` if null."""
    greedy: bool = False
    """Also decode one greedy completion per problem, reported next to the sampled results."""
    data_folder: str | None = None
    """Local folder with a file `<benchmark>.jsonl` or `<benchmark>.parquet` per benchmark, read
    instead of the hub."""
    max_problems: Positive | None = None
    """Use only this many problems from the start of each benchmark, for a quick look."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of the first eight samples of a problem. Each further eight use the next seed."""
    reward: str = "boxed"
    """Verifier, one of those of `reward.function`. `math_verify_boxed` is paper A's: the last boxed
    answer in the final 500 characters. Your own function counts a completion as correct if its
    score is at least `reward.correct`."""

    @field_validator("temperature")
    @classmethod
    def _is_not_too_cold(cls, temperature: float) -> float:
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"0 for greedy decoding, or {LEAST_TEMPERATURE} and more")
        return temperature

    @field_validator("reward")
    @classmethod
    def _is_verifier(cls, reward: str) -> str:
        VERIFIERS.check(reward)
        return reward


class TrackingSection(Section):
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default=["tensorboard"])
    """Trackers to report to, in addition to metrics.jsonl, which is always written. At W&B and
    trackio the project is grpo-replay and the run has the name of its output directory, unless the
    environment has WANDB_PROJECT and WANDB_NAME, or TRACKIO_PROJECT and TRACKIO_NAME."""
