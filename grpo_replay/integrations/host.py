"""The base of every host: what replay in another trainer needs, whatever the trainer.

A host is a trainer that is not ours. Its integration overrides the one method that makes the batch
of an update; the rest is here. It needs neither torch nor TRL nor accelerate; `accelerated`
has what trainers on accelerate share, `outcomes` the statistics of an update, `interception` calls
to a trainer's private methods. A whole host, where `trainer` stands for yours (a test runs this):

    WORDS = HostWords(settings="mine.yaml", folder="output", resume="resume_from",
                      group_size="samples_per_prompt", checkpoints="step-*")

    class Replay:
        def __init__(self, trainer):
            self.trainer = trainer
            settings = replay_settings(trainer.replay, "mine.yaml: replay")
            self.run = HostRun(settings, trainer.group_size, trainer.seed, trainer.output, WORDS)
            self.run.refuse_another_run()
            self.run.describe({
                "name": "mine",
                "model": {"path": trainer.model_name},
                "sampling": {"prompts_per_step": trainer.prompts, "group_size": trainer.group_size},
                "advantage": {"std": "sample", "epsilon": 1e-4},  # as the trainer computes them
                "batch": {"updates_per_step": 1},
                "run": {"steps": trainer.steps, "seed": trainer.seed},
            })
            if trainer.resume_from is not None:
                self.run.load(trainer.resume_from)
            self.run.open()

        def update(self, groups):  # in place of the trainer's update with its own batch
            began = time.perf_counter()
            step = self.run.step([[self.row_of(sample) for sample in group] for group in groups])
            for rows in self.run.buffer.split(step.batch, updates=2):
                self.trainer.update([step.rollouts[row] for row in rows])
            seconds = {"training": time.perf_counter() - began}
            return self.run.record(step, outcomes=None, seconds=seconds)  # metrics to log

        def row_of(self, sample):
            return Row(
                prompt_token_ids=sample.prompt,
                completion_token_ids=sample.tokens,
                behavior_logprobs=sample.logprobs,
                reward=sample.reward,
                advantage=sample.advantage,
            )

        def save(self, checkpoint):
            self.run.save(checkpoint)

Everything is called on one process, the main one; with several, gather the rows first and broadcast
`step.rollouts` (`accelerated.from_main`). Train on `step.rollouts` in place of your batch, with
the advantages and the log-probs of birth (`behavior_logprobs`) in them, and compute anew what was
derived from the batch. Without replay (`settings.replays` False: preset `grpo`, or ratio 0) let
every method be the trainer's own, so that it trains bit for bit as without this package.
"""

import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_replay.errors import CheckpointError, RecipeError
from grpo_replay.integrations.host_rows import Row as Row
from grpo_replay.integrations.host_rows import rollouts_of_groups, unknown_outcome
from grpo_replay.integrations.host_words import HostWords as HostWords
from grpo_replay.integrations.output_folder import (
    METRICS,
    OutputFolder,
    refuse_another_run,
    refuse_without_history,
)
from grpo_replay.recipe import Recipe, ReplayConfig, ReplaySection
from grpo_replay.replay import BufferStats, ReplayBuffer
from grpo_replay.replay.batch import even_sizes
from grpo_replay.storage.atomic import json_values
from grpo_replay.storage.rollout_log import read_metrics, write_step
from grpo_replay.training.metrics import (
    Metrics,
    batch_metrics,
    buffer_metrics,
    cost_metrics,
    generation_metrics,
)
from grpo_replay.training.rollout_source import STAGES
from grpo_replay.training.shadow import (
    describe_replay,
    probe_indices,
    probe_is_due,
    shadow_metrics,
    summarise_replay,
)
from grpo_replay.types import ComposedBatch, Rollout, RolloutOutcome

SNAPSHOT = "buffer.parquet"
"""The buffer's file in a checkpoint of the host."""


def replay_settings(given: Mapping[str, Any] | None, source: str) -> ReplayConfig:
    """Validate `given`, a preset and keys of `replay` (docs/recipe.md); None or empty is preset
    `ours`. Raises RecipeError that begins with `source`, where the user wrote them, for an unknown
    key (and names those allowed, and the nearest), a bad value or a contradiction.

    >>> replay_settings({"preset": "ours", "max_age_steps": 4}, "my.yaml").max_age_steps
    4
    """
    if given is not None and not isinstance(given, Mapping):
        raise RecipeError(f"{source}: expected keys of replay and their values, found {given!r}")
    try:
        return ReplayConfig.model_validate(dict(given or {}))
    except RecipeError as error:
        raise RecipeError(str(error).replace("ReplayConfig: ", f"{source}: ")) from None


@dataclass(frozen=True, slots=True, eq=False)
class HostStep:
    """A step of the buffer: all rollouts `generated`, dropped ones included, and the `batch`."""

    number: int
    generated: Sequence[Rollout]
    batch: ComposedBatch
    before: ReplayBuffer
    """The buffer before the step."""
    stats: BufferStats
    probed: Mapping[int, Rollout]
    """With `replay.shadow`: drawn rollouts to score under the present policy, by index in the draw;
    empty in a step without a probe. Train on the host's own batch then, not on `rollouts`."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """What to train on, in the order of the rows of the composed batch; may be empty."""
        return self.batch.rollouts

    @property
    def filler(self) -> Rollout:
        """A rollout to pad with if a trainer needs more rows than the batch has: mask all of its
        tokens. A dropped rollout has no behaviour log-probs, so it gets the sampler's."""
        first = self.generated[0]
        return replace(first, behavior_logprobs=first.sampler_logprobs)


class HostRun:
    """The buffer of a run in another trainer, and the files that it leaves, on the main process:

    rollouts/ draws/ metrics.jsonl recipe.yaml   in the host's folder, for `inspect-buffer`, its
                                                 --verify and `plan --from-run`
    buffer.parquet                               in each of the host's checkpoints

    Order of calls: `describe`; `load`, if the run resumes; `open`. Then `step` and, after the
    update, `record`, for each step; `save` with a checkpoint; `print_summary` at the end. A host
    that plans ahead may call `step` again before it records the earlier ones.
    """

    def __init__(
        self, settings: ReplaySection, group_size: int, seed: int, folder: Path, words: HostWords
    ) -> None:
        """Makes an empty buffer; files are written from `open` on."""
        self.buffer = ReplayBuffer(settings, group_size, seed)
        self.folder, self.words = folder, words
        self._output: OutputFolder | None = None
        self._resumes = False
        self._unfinished: list[HostStep] = []

    def refuse_another_run(self) -> None:
        """Called at the start; OutputDirectoryError if the folder has a run without checkpoint."""
        refuse_another_run(self.folder, self.words, may_resume=True)

    def describe(self, sections: Mapping[str, Any]) -> None:
        """Set the recipe of the run: its `name`, and the `sections` other than `replay` as far as
        they are known. They need `model.path`, `run.steps` (of the buffer), `sampling.group_size`
        and `prompts_per_step`, `advantage.std`, and `batch.updates_per_step` 1 (a step makes one
        draw). Raises RecipeError in the host's names for values that a recipe refuses."""
        self._output = OutputFolder(self.folder, self.buffer.settings, sections, self.words)

    def open(self) -> None:
        """Begin the run's files, or continue them after `load`. Raises OutputDirectoryError."""
        self._files.open(self.buffer.last_step, self._resumes)

    @property
    def _files(self) -> OutputFolder:
        if self._output is None:
            raise RuntimeError("call describe(sections) before the first step")
        return self._output

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run, as far as it is known."""
        return self._files.recipe

    def step(self, groups: Sequence[Sequence[Row]]) -> HostStep:
        """Take the next step of the buffer, with all its completions by group. Raises UsageError
        for malformed groups (`rollouts_of_groups`), and what `ReplayBuffer.step` raises."""
        buffer = self.buffer
        before, std = copy(buffer), self.recipe.advantage.deviation
        generated = rollouts_of_groups(groups, buffer, std, self.words)
        fresh = [rollout for rollout in generated if rollout.kept]
        batch = buffer.step(fresh, generated=len(generated))
        number = buffer.last_step
        settings = buffer.settings
        indices = []
        if probe_is_due(settings, number):
            indices = probe_indices(batch.draw, settings.probe_rollouts)
        probed = {index: batch.draw.rollouts[index] for index in indices}
        step = HostStep(number, generated, batch, before, buffer.stats(number), probed)
        self._unfinished.append(step)
        return step

    def record(
        self,
        step: HostStep,
        outcomes: Mapping[int, RolloutOutcome] | None = None,
        seconds: Mapping[str, float] | None = None,
        probe: Mapping[int, RolloutOutcome] = MappingProxyType({}),
    ) -> Metrics:
        """Write the files of a step after its update. Returns the metrics (docs/metrics.md) that
        the host itself lacks: fresh/…, replay/…, buffer/…, cost/….

        `outcomes` are by row of `step.rollouts` (`outcomes.outcomes_of`); None if the host does not
        know them, then null in the files. `seconds` are by stage (`training.rollout_source.STAGES`)
        and of the whole `step`. A missing stage counts as 0 s, but without `generation` the costs μ
        and γ are unknown. With `replay.shadow`, `probe` has the outcomes of `HostStep.probed`, by
        its keys. Raises ValueError if an earlier step is not recorded yet, or an outcome is
        missing.
        """
        if not self._unfinished or self._unfinished[0] is not step:
            raise ValueError(f"step {step.number}: record each step once, in their order")
        seconds = {} if seconds is None else seconds
        stages = {**dict.fromkeys(STAGES, 0.0), "other": 0.0, **seconds}
        stages.setdefault("step", sum(stages.values()))
        trained, survivors = step.rollouts, sum(rollout.kept for rollout in step.generated)
        row_outcomes = _row_outcomes(step, outcomes)
        generation_seconds = seconds.get("generation")
        # In shadow the host trains on its own batch, with the groups that replay drops.
        updated_rows = len(step.generated) if self.buffer.settings.shadow else None
        metrics = json_values(
            batch_metrics(step.batch, row_outcomes, survivors, probe)
            | self._shadow_metrics(step, stages)
            | buffer_metrics(step.stats)
            | cost_metrics(stages, generation_seconds, step.generated, trained, updated_rows)
        )
        generation = generation_metrics(step.generated, self.buffer.group_size)
        write_step(self.folder, step.number, step.generated, step.batch, row_outcomes, probe=probe)
        self._files.log(step.number, {**generation, **metrics})
        self._unfinished.pop(0)
        return metrics

    def _shadow_metrics(self, step: HostStep, seconds: Mapping[str, float]) -> Metrics:
        if not self.buffer.settings.shadow:
            return {}
        draw, group_size = step.batch.draw, self.buffer.group_size
        return shadow_metrics(draw, step.rollouts, group_size, seconds.get("shadow", 0.0))

    def print_summary(self) -> None:
        """Print what replay cost, or in shadow would have done and cost, over all recorded steps,
        as far as it is known. Call it once, when training ends."""
        lines = read_metrics(self.folder / METRICS)
        summary = summarise_replay(lines, self.buffer.settings)
        for text in describe_replay(summary) if lines else ():
            print(f"grpo-replay: {text}", flush=True)

    @property
    def is_inside_a_step(self) -> bool:
        """Whether a step was taken that is not recorded yet."""
        return bool(self._unfinished)

    def save(self, checkpoint: Path) -> None:
        """Write the buffer into the host's checkpoint, as it was after the last recorded step: a
        run that resumes takes later steps again."""
        checkpoint.mkdir(parents=True, exist_ok=True)
        buffer = self._unfinished[0].before if self._unfinished else self.buffer
        buffer.save(checkpoint / SNAPSHOT)

    def load(self, checkpoint: Path, extras: Mapping[str, str] | None = None) -> None:
        """Load the buffer of a checkpoint; call `open` before the next step. A checkpoint of a run
        without replay has none: the buffer then begins empty, with a warning.

        `extras` names the extras that stored rollouts must have, and for each the setting that does
        without it. Raises SnapshotError for other replay settings than the run's, CheckpointError
        for another group size, missing extras, or a folder without the files of the run's steps.
        """
        path = checkpoint / SNAPSHOT
        self._unfinished.clear()
        if not path.exists():
            self._begin_empty(path)
            return
        buffer = ReplayBuffer.load(path, self.buffer.settings)
        if buffer.group_size != self.buffer.group_size:
            raise CheckpointError(
                f"{path} has groups of {buffer.group_size}: resume with {self.words.group_size} "
                f"{buffer.group_size}"
            )
        for name, remedy in ({} if extras is None else extras).items():
            if any(name not in rollout.extras for rollout in buffer.rollouts()):
                raise CheckpointError(
                    f"{path}: the run stored no {name} with its rollouts: resume with {remedy}, "
                    f"or train from its weights in a new {self.words.folder}"
                )
        refuse_without_history(self.folder, path.parent.parent, buffer.last_step, self.words)
        self.buffer, self._resumes = buffer, True

    def _begin_empty(self, path: Path) -> None:
        if (self.folder / METRICS).exists():
            raise CheckpointError(
                f"{path} is missing, and {self.folder} has rollouts of a run with replay: resume "
                f"from another checkpoint, or train from its weights in a new {self.words.folder}"
            )
        warnings.warn(f"{path} is missing: the buffer begins empty", stacklevel=3)


def _row_outcomes(
    step: HostStep, outcomes: Mapping[int, RolloutOutcome] | None
) -> list[RolloutOutcome]:
    """Returns the batch's outcomes (None: all unknown). Raises ValueError if one is missing."""
    if outcomes is None:
        return [unknown_outcome(rollout) for rollout in step.rollouts]
    if missing := sorted(set(range(len(step.rollouts))) - outcomes.keys()):
        raise ValueError(
            f"step {step.number}: no outcome of {len(missing)} of {len(step.rollouts)} rows, the "
            f"first is row {missing[0]}: give one for every row, or None for all"
        )
    return [outcomes[row] for row in range(len(step.rollouts))]


@dataclass(frozen=True, slots=True)
class RowAssignment:
    """Assigns the `rows` of a step to processes, and there to micro-batches. Shares differ by at
    most one row; padding fills the missing ones, so that every process has a row in every
    micro-batch. Example: 5 rows for 2 processes of 2 micro-batches are rows 0, 2, 4 and rows 1, 3,
    -1 (padding), in micro-batches of 2 and 1."""

    rows: int
    processes: int
    micro_batches: int

    @property
    def rows_per_process(self) -> int:
        """Number of rows of each process, padding included."""
        return max(-(-self.rows // self.processes), self.micro_batches)

    def rows_for(self, process: int) -> list[int]:
        """Returns the row indices of a process, and last -1 for each row of padding."""
        padding = [-1] * (self.rows_per_process * self.processes - self.rows)
        return [*range(self.rows), *padding][process :: self.processes]

    @property
    def sizes(self) -> list[int]:
        """The rows of each micro-batch of a process, padding included, the larger first."""
        return even_sizes(self.rows_per_process, self.micro_batches)

    def is_padding(self, turn: int) -> bool:
        """Whether micro-batch `turn`, in the order of `sizes`, is padding on every process."""
        return turn * self.processes >= self.rows

    def weight(self, size: int) -> float:
        """Returns the factor for the loss of a micro-batch of `size` rows, a mean over these,
        auxiliary losses included: it gives every row the weight it has in micro-batches of equal
        size without padding. (Use 0 if all rows are padding.) A term that divides by the tokens of
        the whole batch already weighs its rows: multiply those tokens by the factor, too."""
        return size * self.processes * self.micro_batches / self.rows
