"""The protocol of a source of rollouts, and the components that it shares with the trainer. The
sources (`open_source.open_source`):

    SynchronousSource   the sampler generates while the trainer waits; with
                        `run.sync_every_steps` above 1 the sampler lags
    MainSource          rollouts that arrived while the trainer worked (`run.mode: async`), or that
                        a journal has recorded; on ranks other than 0 a FollowerSource

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
        """Reset all times; called at the beginning of a step."""
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
        """Returns the step's seconds so far: by stage, in none (`other`), in all (`step`)."""
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
    """The rollouts that a source gives a step. On ranks other than 0 the sequences are empty."""

    generated: Sequence[Rollout]
    """Whole groups, ordered by rollout id. Rollouts with `kept` False are neither trained on nor
    stored. Behaviour log-probs are not set yet."""
    measured: Sequence[Rollout]
    """Rollouts whose log-probs the trainer computes and compares with the sampler's; may be empty.
    With `loss.behavior_logprobs: trainer` they include all kept rollouts."""
    nominal_rollouts: int
    """R, which sets the size of the draw of `buffer_only` (`replay.compose`)."""
    prompts: int
    """Prompts used, including those whose groups did not arrive."""
    groups: int
    """Groups that got ids."""
    generation_seconds: float | None
    """Seconds of generation, per trainer rank; None if unknown."""
    repeated: bool = False
    """Whether they come from the journal of an earlier attempt."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """One training step. `fresh` are the survivors of `taken`; `outcomes[i]` belongs to rollout i
    of the batch; `gap` is None if no rollout was measured."""

    step: int
    taken: StepRollouts
    fresh: Sequence[Rollout]
    gap: LogprobGap | None
    batch: ComposedBatch
    results: Sequence[UpdateResult]
    outcomes: Sequence[RolloutOutcome]
    probe: Mapping[int, RolloutOutcome] = field(default_factory=dict)
    """Outcomes of drawn rollouts under the policy before the updates, by index in the draw; empty
    without `replay.shadow`."""

    @property
    def generated(self) -> Sequence[Rollout]:
        return self.taken.generated


class RolloutSource(Protocol):
    """Delivers the rollouts of each training step, and pushes new policies to the sampler.

    To add a source, write these four methods and name it in `open_source.open_source`. `take` and
    `advance` are called on every rank, in this order, once a step; both may use collectives of
    `parts.comm` and of the engine. Only rank 0 has the rollouts, the buffer and the files. A
    resumed run must get the same rollouts as one that was never stopped: what a source needs for
    that beyond the counters of `RunState`, it writes in `save`.
    """

    def take(self, step: int) -> StepRollouts | None:
        """Return the graded rollouts of `step` (from 1), with advantages, as `assemble_rollouts`
        makes them. May wait. None on every rank if meanwhile `parts.stop` was requested on rank 0,
        or has an error on any rank.

        `rollout.birth_step` must be at most `step`; `rollout.policy_version` and
        `policy_version_end` must be the versions that sampled its first and last token. Ages, the
        log-prob gap and `--verify` rely on them. Measure times with `parts.clock`."""
        ...

    def advance(self, version: int) -> None:
        """Called after the updates of a step, which made the policy `version` (it counts steps).
        Pushes it to the sampler if a push is due."""
        ...

    def metrics(self, record: StepRecord) -> Metrics:
        """Return a finished step's metrics on rank 0: the sampler's version, the source's own."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files that a resume needs into the folder of a checkpoint, on rank 0. Other
        files that they refer to must be flushed when this returns."""
        ...
