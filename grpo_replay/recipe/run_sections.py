"""The run around the training loop: steps, checkpoints, evaluation and tracking."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from grpo_replay.recipe.base import Positive, Section
from grpo_replay.recipe.open_lists import VERIFIERS


class RunSection(Section):
    steps: Positive = 200
    """Number of training steps."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of everything random, except evaluation (`eval.seed`)."""
    mode: Literal["sync", "async"] = "sync"
    """`sync` generates, updates and pushes weights in turn. `async`: vLLM servers sample without
    pause while the trainer works (docs/async.md)."""
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
    """Number of newest checkpoints to keep (TRL: save_total_limit)."""
    restore_buffer: bool = True
    """Restore the replay buffer on resume. If false, it starts empty."""


class EvalSection(Section):
    benchmarks: list[str] = Field(default_factory=list)
    """Names of benchmarks or groups: `tiny`, `tiny_long`, `paper`, `paper_b`, `math500`, … No
    evaluation if empty."""
    every_steps: Positive | None = None
    """Training steps between evaluations. If null, only at the start and at the end."""
    at_start: bool = True
    """Evaluate the base model before the first step."""
    samples: Positive | None = None
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
    reward: str | Annotated[list[str], Field(min_length=1)] = "math_verify_boxed"
    """Verifier. `math_verify_boxed` grades the last boxed answer in the final 500 characters
    (paper A); `math_verify` grades whatever math-verify finds in the whole completion; your own
    function, as in `reward.function`, counts a completion as correct if its score is at least
    `reward.correct`. After the first of a list, built-in verifiers that grade the same completions,
    reported next to it (`--grade-with`)."""

    @field_validator("reward")
    @classmethod
    def _are_verifiers(cls, reward: str | list[str]) -> str | list[str]:
        first, *others = [reward] if isinstance(reward, str) else reward
        VERIFIERS.check(first)
        unknown = [name for name in others if name not in VERIFIERS.names]
        if unknown:
            raise ValueError(f"{unknown[0]!r}: after the first use {', '.join(VERIFIERS.names)}")
        return reward

    @property
    def verifier(self) -> str:
        """The verifier of the reported accuracy."""
        return self.reward if isinstance(self.reward, str) else self.reward[0]

    @property
    def other_rewards(self) -> list[str]:
        """Further verifiers of the same completions."""
        return [] if isinstance(self.reward, str) else self.reward[1:]


class TrackingSection(Section):
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default=["tensorboard"])
    """Trackers to report to, in addition to metrics.jsonl, which is always written (TRL:
    report_to). At W&B and trackio the project is grpo-replay and the run has the name of its output
    directory, unless the environment has WANDB_PROJECT and WANDB_NAME, or TRACKIO_PROJECT and
    TRACKIO_NAME."""
