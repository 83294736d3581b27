"""The base of hosts whose trainer is a transformers Trainer on accelerate: TRL, ms-swift.

Such a host samples a generation batch, cuts it into micro-batches, and trains on them one by one:
a step of the buffer is a generation batch. The host's class overrides the method that makes the
batch and calls `_replay_step` there; this base keeps steps, files and checkpoints.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from grpo_replay.integrations.grpo_config import AGGREGATIONS
from grpo_replay.integrations.host import HostRun, HostStep, HostWords, Row, RowAssignment
from grpo_replay.recipe import LossSection, ReplaySection
from grpo_replay.replay import ReplayBuffer
from grpo_replay.training.metrics import Metrics
from grpo_replay.training.rollout_source import Stopwatch
from grpo_replay.types import Rollout, RolloutOutcome

_Host: Any = object  # a Trainer, for the type checker
LOGGED = ("fresh/", "replay/", "shadow/", "buffer/", "cost/")
"""Prefixes of the metrics that go to the host's log."""


def from_main(accelerator: Any, make: Callable[[], Any]) -> Any:
    """Call `make` on the main process, and return its result, or raise its error, on every one."""
    result_and_error: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            result_and_error[0] = make()
        except Exception as error:
            result_and_error[1] = error
    broadcast_object_list(result_and_error)
    result, failure = result_and_error
    if failure is not None:
        raise failure
    return result


def update_by_update(micro_batches: int, accumulated: int, done: int) -> list[int]:
    """Return the order of micro-batches in which rows left over are handed out: the first of every
    optimizer update, then the second of each, and so on. An update has `accumulated` micro-batches;
    `done` were trained on before, perhaps in an update that is not complete."""

    def sort_key(index: int) -> tuple[int, int]:
        update = (done + index) // accumulated
        return index - max(0, update * accumulated - done), update

    return sorted(range(micro_batches), key=sort_key)


class AcceleratedReplay(_Host):
    """Replay in a Trainer with `accelerator`, `_metrics`, `num_generations`, and
    `args.steps_per_generation`. A host's class calls

        _begin_replay(settings, words)   at the end of __init__
        _open_replay()                   before the first generation batch of a run
        _replay_step(rows)            with the rows of a generation batch
        _weight_of(size, is_padding)     for the loss of each micro-batch
        self._outcomes |= outcomes_of(…) with the outcomes of each

    and overrides `_sections(max_steps)` and `_needed_extras()`. `self._clock` has the seconds of a
    step by stage: the class adds those of generation, rewards and log-probs. If
    `self.replay.replays` is False, every method must be the host's own, and nothing here is called.
    """

    replay: ReplaySection

    def _begin_replay(self, settings: ReplaySection, words: HostWords) -> None:
        """Make the buffer. Raises OutputDirectoryError if another run is in the folder, and
        RecipeError for settings that contradict the length of the run."""
        self.replay, folder = settings, Path(self.args.output_dir)
        self._run = HostRun(settings, self.num_generations, self.args.seed, folder, words)
        self._from_main(self._run.refuse_another_run)
        self._is_open = False
        if self.args.max_steps > 0:  # by epochs, the length is known when training begins
            self._run.describe(self._sections(self.args.max_steps))
        self._micro_batches_left = 0  # of the generation batch that is being trained on
        self._outcomes: dict[int, RolloutOutcome] = {}  # of this process's rows
        self._probe: dict[int, RolloutOutcome] = {}  # of drawn rollouts, by index in the draw

    def _sections(self, max_steps: int) -> Mapping[str, Any]:
        """Returns the recipe of a run of `max_steps` optimizer steps, for `HostRun.describe`."""
        raise NotImplementedError

    def _needed_extras(self) -> Mapping[str, str]:
        """The extras that every stored rollout must have, with the setting that does without."""
        return {}

    @property
    def replay_buffer(self) -> ReplayBuffer:
        """The buffer of the run; empty on every process but the main one."""
        return self._run.buffer

    @property
    def _batch(self) -> Any:
        """The composed batch that is being trained on, on the main process."""
        return self._buffer_step.batch

    def _from_main(self, make: Callable[[], Any]) -> Any:
        return from_main(self.accelerator, make)

    # The generation batch

    def _open_replay(self) -> bool:
        """Begin the files of the run, unless they are open. Returns whether this call did."""
        if self._is_open:
            return False
        self._run.describe(self._sections(self.state.max_steps))
        self._from_main(self._run.open)
        self._is_open = True
        return True

    def _begin_batch(self) -> None:
        """Start the clock of a generation batch."""
        self._clock = Stopwatch()

    def _replay_step(self, rows: Sequence[Row]) -> tuple[tuple[Rollout, ...], Rollout]:
        """Take the step of the buffer. Called on every process with the rows of that process, which
        are ordered by group over all processes. Returns the rollouts to train on, of all processes
        and in the order of the composed batch, and one to pad with (`HostStep.filler`). Sets
        `self._assignment`, the rows of each process and micro-batch."""
        gathered = gather_object(list(rows))
        trained, filler = self._from_main(lambda: self._compose(gathered))
        micro_batches = self._micro_batches_left = self.args.steps_per_generation
        self._assignment = RowAssignment(
            len(trained), self.accelerator.num_processes, micro_batches
        )
        self._composed = time.perf_counter()
        return trained, filler

    def _shadow_step(
        self, rows: Sequence[Row], score: Callable[[Sequence[Rollout]], list[RolloutOutcome]]
    ) -> None:
        """Take the step of the buffer with `replay.shadow`, in place of `_replay_step`: nothing of
        it is trained on. `score` computes the outcomes that rollouts would have in an update now.
        It is called on every process with the same rollouts, if a probe is due."""
        gathered, began = gather_object(list(rows)), time.perf_counter()
        probed = self._from_main(lambda: (self._compose(gathered), self._buffer_step.probed)[1])
        self._probe = {}
        if probed:
            self._probe = dict(zip(probed, score(list(probed.values())), strict=True))
        self._micro_batches_left = self.args.steps_per_generation
        self._composed = time.perf_counter()
        self._clock.seconds["shadow"] = self._composed - began

    @property
    def _clipped_loss(self) -> LossSection | None:
        """The host's loss if it clips a ratio per token, else None."""
        clips = self.args.loss_type in AGGREGATIONS
        clips &= self.args.importance_sampling_level == "token"
        return self._run.recipe.loss if clips else None

    def _compose(self, rows: Sequence[Row]) -> tuple[tuple[Rollout, ...], Rollout]:
        size = self.num_generations
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        step: HostStep = self._run.step(groups)
        self._buffer_step = step
        return step.rollouts, step.filler

    def _weight_of(self, size: int, is_padding: bool) -> float:
        """Return the factor of a micro-batch's loss (`RowAssignment.weight`); 0 for padding."""
        return 0.0 if is_padding else self._assignment.weight(size)

    # Results

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.replay.replays and self._micro_batches_left:
            self._micro_batches_left -= 1
            if not self._micro_batches_left:
                self._finish_step()
        return loss

    def _finish_step(self) -> None:
        """Write files and log metrics of a generation batch, after its last micro-batch."""
        self._clock.seconds["training"] = time.perf_counter() - self._composed
        gathered = dict(gather_object(list(self._outcomes.items())))
        self._outcomes = {}
        seconds = self._clock.read()
        outcomes, probe = (None, self._probe) if self.replay.shadow else (gathered, {})

        def record() -> Metrics:
            return self._run.record(self._buffer_step, outcomes, seconds, probe)

        # Logged on every process, as the host's own: a callback may stop the training by them.
        for name, value in self._from_main(record).items():
            if value is not None and name.startswith(LOGGED):
                self._metrics["train"][name].append(value)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own; then prints what replay cost, and warns of an unfinished batch."""
        output = super().train(*args, **kwargs)
        if self.replay.replays and self._micro_batches_left and self.accelerator.is_main_process:
            warnings.warn(
                f"training ended inside generation batch {self.replay_buffer.last_step}, which is "
                f"not in {self.args.output_dir}: let it end after whole generation batches",
                stacklevel=2,
            )
        if self.replay.replays and self._is_open and self.accelerator.is_main_process:
            self._run.print_summary()
        return output

    # Checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.replay.replays:
            folder = (
                Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            )
            self._from_main(lambda: self._save_replay(folder))
        super()._save_checkpoint(model, trial)

    def _save_replay(self, folder: Path) -> None:
        """Save the buffer into a checkpoint, with a warning inside a generation batch."""
        if self._run.is_inside_a_step:
            warnings.warn(
                f"{folder} is saved inside a generation batch: a run that resumes from it samples "
                "the batch again, so it is not the run that was never killed; let save_steps be of "
                "whole generation batches (steps_per_generation micro-batches)",
                stacklevel=2,
            )
        self._run.save(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The trainer's own; on a resume it also loads the buffer, which only this method sees."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.replay.replays:
            needed = self._needed_extras()
            self._from_main(lambda: self._run.load(Path(checkpoint), needed))
            # As in a new trainer, even if this one was stopped inside a generation batch.
            self._is_open, self._micro_batches_left = False, 0
            self._step, self._buffered_inputs = 0, None
            self._outcomes.clear()
