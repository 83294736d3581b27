"""Where the rollouts of a training step come from: the protocol of a source, and what a run shares
with it. The sources that there are (`open_source.open_source`):

    SynchronousSource   the sampler generates them while the trainer waits; a lagging sampler
                        (`run.sync_every_steps`) is a setting of it
    MainSource          those that have arrived while the trainer worked (`run.mode: async`), or
                        that a journal has recorded; on the other ranks a FollowerSource

The trainer is the same for all: it calls `take` once at the beginning of a step, `advance` after
its updates, and never asks which source it has.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine import UpdateResult
from grpo_replay.prompts.prompt_set import PromptSet
from grpo_replay.recipe import Recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.sampler_protocol import Sampler
from grpo_replay.stop import StopToken
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training.weight_sync import LogprobGap
from grpo_replay.types import ComposedBatch, Rollout, RolloutOutcome

if TYPE_CHECKING:
    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine

Metrics = dict[str, float | int | None]

STAGES = ("generation", "reward", "logprob", "training", "sync")


class Stopwatch:
    """Seconds spent in each named stage of a step; the rest is `other`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A step begins."""
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = dict.fromkeys((*STAGES, "shadow"), 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Seconds by stage, `other` and `step` included."""
        total = time.perf_counter() - self._start
        return {
            **self.seconds,
            "other": max(0.0, total - sum(self.seconds.values())),
            "step": total,
        }


@dataclass(slots=True)
class Parts:
    """The components of a run, which its trainer and its source of rollouts share."""

    recipe: Recipe
    comm: Comm
    engine: "DeepSpeedEngine"
    sampler: Sampler
    scorer: RewardScorer
    prompts: PromptSet
    tokenizer: Any
    buffer: ReplayBuffer
    run_dir: RunDirectory
    stop: StopToken = field(default_factory=StopToken)
    clock: Stopwatch = field(default_factory=Stopwatch)


@dataclass(frozen=True, slots=True, eq=False)
class StepRollouts:
    """What a step takes from its source. On ranks other than 0 the sequences are empty."""

    generated: Sequence[Rollout]
    """By rollout id, whole groups; `kept` is False for those that are neither trained on nor
    stored. Behaviour log-probs are not known yet."""
    measured: Sequence[Rollout]
    """Those whose log-probs the trainer computes, to compare them with the sampler's. All that are
    kept are among them if `loss.behavior_logprobs` is trainer, which freezes these log-probs. May
    be empty."""
    nominal_rollouts: int
    """R, from which `buffer_only` takes the size of its draw (`replay.compose`)."""
    prompts: int
    """Prompts used up, those included of which no group arrived."""
    groups: int
    """Groups that got ids."""
    generation_seconds: float | None
    """What generating took, per trainer rank; None if it is unknown."""
    repeated: bool = False
    """Whether they are those of an earlier attempt, from the journal."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """One training step. `fresh` are the survivors among what was `taken`; `outcomes[i]` belongs to
    rollout i of the batch. `gap` is None if there was no rollout to measure it on."""

    step: int
    taken: StepRollouts
    fresh: Sequence[Rollout]
    gap: LogprobGap | None
    batch: ComposedBatch
    results: Sequence[UpdateResult]
    outcomes: Sequence[RolloutOutcome]
    probe: Mapping[int, RolloutOutcome] = field(default_factory=dict)
    """With `replay.shadow`: outcomes of drawn rollouts under the policy before the updates, by
    index in the draw."""

    @property
    def generated(self) -> Sequence[Rollout]:
        return self.taken.generated


class RolloutSource(Protocol):
    """Gives each training step its rollouts, and brings the sampler each new policy.

    To add a source, write these four methods and name it in `open_source.open_source`. `take` and
    `advance` are called on every rank, in this order, once a step: they may use collectives
    (`parts.comm`) and the engine's. Rank 0 alone has the rollouts, the buffer and the files. A
    source must give a resumed run what the run would have had without the stop: what it needs for
    that beyond the counters of `RunState` it writes in `save`.
    """

    def take(self, step: int) -> StepRollouts | None:
        """The graded rollouts of `step` (from 1), with advantages, as `assemble_rollouts` makes
        them. May wait; None on every rank if `parts.stop` was requested on rank 0 meanwhile, or if
        it has an error on any.

        `rollout.birth_step` must be at most `step`, and `rollout.policy_version` and
        `policy_version_end` those that sampled its first and its last token: ages, the gap between
        sampler and trainer, and `--verify` rely on them. Time is measured with `parts.clock`."""
        ...

    def advance(self, version: int) -> None:
        """The updates of a step are made, and the policy is now `version`, which counts steps:
        push it to the sampler if one is due."""
        ...

    def metrics(self, record: StepRecord) -> Metrics:
        """Metrics of the finished step, on rank 0: `sampler/policy_version`, and what only this
        source has."""
        ...

    def save(self, folder: Path) -> None:
        """Write what a resume needs into the folder of a checkpoint, on rank 0. What it relies on
        elsewhere must be on disk when this returns."""
        ...
