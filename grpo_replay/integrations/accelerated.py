"""The base of hosts whose trainer is a transformers Trainer on accelerate: TRL, ms-swift.

Such a host samples a generation batch, cuts it into micro-batches, and trains on them one by one:
a step of the buffer is a generation batch. Its class overrides what makes the batch, and calls
`_through_replay` there; steps, files and checkpoints are here.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from grpo_replay.integrations.grpo_config import AGGREGATIONS
from grpo_replay.integrations.host import Deal, HostRun, HostStep, HostWords, Row
from grpo_replay.recipe import LossSection, ReplaySection
from grpo_replay.replay import ReplayBuffer
from grpo_replay.training.metrics import Metrics
from grpo_replay.training.rollout_source import Stopwatch
from grpo_replay.types import Rollout, RolloutOutcome

_Host: Any = object  # a Trainer, for the type checker
LOGGED = ("fresh/", "replay/", "shadow/", "buffer/", "cost/")
"""Beginnings of the metrics that the host's log gets."""


def from_main(accelerator: Any, make: Callable[[], Any]) -> Any:
    """What `make` returns on the main process, on every process; or raises, on every one."""
    found: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            found[0] = make()
        except Exception as error:
            found[1] = error
    broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]


def update_by_update(micro_batches: int, accumulated: int, done: int) -> list[int]:
    """The micro-batches of a generation batch: first one of each optimizer update, then the second
    of each, and so on. An update accumulates the gradients of so many, and `done` were trained on
    before: an update that has begun goes on."""

    def turn(index: int) -> tuple[int, int]:
        update = (done + index) // accumulated
        return index - max(0, update * accumulated - done), update

    return sorted(range(micro_batches), key=turn)


class AcceleratedReplay(_Host):
    """Replay in a Trainer with `accelerator`, `_metrics`, `num_generations`, and
    `args.steps_per_generation`. A host's class calls

        _begin_replay(settings, words)   at the end of __init__
        _open_replay()                   before the first generation batch of a run
        _through_replay(rows)            with the rows of a generation batch
        _weight_of(size, is_padding)     for the loss of each micro-batch
        self._outcomes |= outcomes_of(…) with the outcomes of each

    and says in `_sections(max_steps)` what is known of the run, and in `_needed_extras()` what
    stored rollouts must have. `self._clock` has the seconds of a step by stage: its class adds
    those of generation, rewards and log-probs. Where `self.replay.replays` is False, it lets every
    method be the host's own, and calls nothing of this.
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
        """What is known of a run of so many optimizer steps, for `HostRun.describe`."""
        raise NotImplementedError

    def _needed_extras(self) -> Mapping[str, str]:
        """The extras that every stored rollout must have, each with what to set without it."""
        return {}

    @property
    def replay_buffer(self) -> ReplayBuffer:
        """The buffer of the run; on other processes than the main one, an empty one."""
        return self._run.buffer

    @property
    def _batch(self) -> Any:
        """The composed batch that is being trained on, on the main process."""
        return self._step_of_buffer.batch

    def _from_main(self, make: Callable[[], Any]) -> Any:
        return from_main(self.accelerator, make)

    # The generation batch

    def _open_replay(self) -> bool:
        """Begin the files of the run, if that was not done. Returns whether it was done now."""
        if self._is_open:
            return False
        self._run.describe(self._sections(self.state.max_steps))
        self._from_main(self._run.open)
        self._is_open = True
        return True

    def _begin_batch(self) -> None:
        """A generation batch begins: its seconds count from here."""
        self._clock = Stopwatch()

    def _through_replay(self, rows: Sequence[Row]) -> tuple[tuple[Rollout, ...], Rollout]:
        """On every process, with its rows, which are ordered by group over all processes: the step
        of the buffer. Returns the rollouts to train on, of all processes and in the order of the
        composed batch, and one to pad with (`HostStep.filler`). `self._deal` says how many rows a
        process and its micro-batches get."""
        gathered = gather_object(list(rows))
        trained, filler = self._from_main(lambda: self._compose(gathered))
        micro_batches = self._micro_batches_left = self.args.steps_per_generation
        self._deal = Deal(len(trained), self.accelerator.num_processes, micro_batches)
        self._composed = time.perf_counter()
        return trained, filler

    def _beside_replay(
        self, rows: Sequence[Row], score: Callable[[Sequence[Rollout]], list[RolloutOutcome]]
    ) -> None:
        """With `replay.shadow`, in place of `_through_replay`: the step of the buffer, of which
        nothing is trained on. `score` gives the outcomes that rollouts would have in an update now;
        it is called on every process with the same rollouts, if a probe is due."""
        gathered, began = gather_object(list(rows)), time.perf_counter()
        probed = self._from_main(lambda: (self._compose(gathered), self._step_of_buffer.probed)[1])
        self._probe = {}
        if probed:
            self._probe = dict(zip(probed, score(list(probed.values())), strict=True))
        self._micro_batches_left = self.args.steps_per_generation
        self._composed = time.perf_counter()
        self._clock.seconds["shadow"] = self._composed - began

    @property
    def _clipped_loss(self) -> LossSection | None:
        """The host's loss, if it clips a ratio for each token; else None."""
        clips = self.args.loss_type in AGGREGATIONS
        clips &= self.args.importance_sampling_level == "token"
        return self._run.recipe.loss if clips else None

    def _compose(self, rows: Sequence[Row]) -> tuple[tuple[Rollout, ...], Rollout]:
        size = self.num_generations
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        step: HostStep = self._run.step(groups)
        self._step_of_buffer = step
        return step.rollouts, step.filler

    def _weight_of(self, size: int, is_padding: bool) -> float:
        """What the loss of a micro-batch is multiplied by (`Deal.weight`)."""
        return 0.0 if is_padding else self._deal.weight(size)

    # Results

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.replay.replays and self._micro_batches_left:
            self._micro_batches_left -= 1
            if not self._micro_batches_left:
                self._finish_step()
        return loss

    def _finish_step(self) -> None:
        """After the last micro-batch of a generation batch: write its files, log its metrics."""
        self._clock.seconds["training"] = time.perf_counter() - self._composed
        gathered = dict(gather_object(list(self._outcomes.items())))
        self._outcomes = {}
        seconds = self._clock.read()
        known, probe = (None, self._probe) if self.replay.shadow else (gathered, {})

        def record() -> Metrics:
            return self._run.record(self._step_of_buffer, known, seconds, probe)

        # On every process, as the host's own: a callback may stop the training by them.
        for name, value in self._from_main(record).items():
            if value is not None and name.startswith(LOGGED):
                self._metrics["train"][name].append(value)

    def train(self, *args: Any, **kwargs: Any) -> Any:
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
        if self._run.is_inside_a_step:
            warnings.warn(
                f"{folder} is saved inside a generation batch: a run that resumes from it samples "
                "the batch again, so it is not the run that was never killed; let save_steps be of "
                "whole generation batches (steps_per_generation micro-batches)",
                stacklevel=2,
            )
        self._run.save(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.replay.replays:
            needed = self._needed_extras()
            self._from_main(lambda: self._run.load(Path(checkpoint), needed))
            # As in a new trainer, even if this one was stopped inside a generation batch.
            self._is_open, self._micro_batches_left = False, 0
            self._step, self._buffered_inputs = 0, None
            self._outcomes.clear()
