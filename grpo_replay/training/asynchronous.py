"""The source of rollouts of asynchronous runs: steps from a journal, then groups from a collector.

Rank 0 talks to the collector and keeps the journal (`collection.intake`); the other ranks take part
in updates and weight gathers. A step trains on the groups that have arrived, while the servers keep
sampling (paper B, section 4; paper A's batches without the wait).

Behaviour log-probs are those of the sampler and are never recomputed: each token has the log-prob
of the policy version that sampled it. The birth step of a rollout is that of the oldest token in
its group, so a fresh rollout may have an age above 0.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from grpo_replay.collection.arrivals import is_partial, rollouts_to_insert
from grpo_replay.collection.intake import Intake
from grpo_replay.collection.journal import Journal, JournalRecords
from grpo_replay.collection.messages import CollectorSettings, Report
from grpo_replay.distributed.failures import run_collectively, run_on_main
from grpo_replay.errors import SamplerError, ServersLost
from grpo_replay.replay.compose import draw_count
from grpo_replay.sampling.server.sampler import VllmServerSampler
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.storage.run_directory import JOURNAL_FOLDER
from grpo_replay.training.rollout_source import (
    Metrics,
    Parts,
    RolloutSource,
    StepRecord,
    StepRollouts,
)
from grpo_replay.training.weight_sync import GAP_SAMPLE_ROLLOUTS, evenly_spaced, sync_weights
from grpo_replay.types import GenerationRequest, RequestKey, Rollout, completion_seed

UNCHECKED_STEPS, PROBED_PROMPTS, PROBED_TOKENS = 5, 8, 16
"""Consecutive steps without a rollout that only the newest weights sampled, after which sampler and
trainer are compared on a probe: its number of prompts, and maximum tokens of each completion."""


def open_async_source(
    parts: Parts, state: RunState, checkpoint: Path | None, stack: ExitStack
) -> RolloutSource:
    """Open the source of an asynchronous run, at the step of the checkpoint. Collective."""
    if checkpoint is not None:
        _push(parts, state.policy_version)
    intake = run_collectively(parts.comm, lambda: _open_intake(parts, state, stack))
    if intake is None:
        return FollowerSource(parts, state)
    source = MainSource(parts, state, intake)
    stack.callback(source.close)  # before the journal closes
    return source


def _open_intake(parts: Parts, state: RunState, stack: ExitStack) -> Intake | None:
    """Open the intake on rank 0. The run's own journal is opened for appending, and closed with the
    stack; the journal of `sampling.collection.replay_journal` is only read."""
    if not parts.comm.is_main:
        return None
    repeated = parts.recipe.sampling.collection.replay_journal
    if repeated is not None:
        records = JournalRecords.of(Path(repeated) / JOURNAL_FOLDER)
        return Intake(parts.recipe, None, records, state.step)
    journal, records = Journal.open(parts.run_dir.path / JOURNAL_FOLDER)
    stack.callback(journal.close)
    return Intake(parts.recipe, journal, records, state.step)


def _push(parts: Parts, version: int) -> None:
    """Gather and stage the weights, then switch the servers one after the other."""
    with parts.clock.stage("sync"):
        sync_weights(parts.engine, parts.sampler, version)


class FollowerSource:
    """The `RolloutSource` of ranks other than 0: takes part in collectives."""

    def __init__(self, parts: Parts, state: RunState) -> None:
        self.parts, self.comm, self.recipe, self.state = parts, parts.comm, parts.recipe, state
        self._is_live = False

    def take(self, step: int) -> StepRollouts | None:
        """Take the step from the journal if it is recorded there, else wait for the collector's
        groups. Raises SamplerError after the last step of a replayed journal."""
        if self.comm.broadcast(self._is_recorded()):
            return self._take_recorded(step)
        if self.recipe.sampling.collection.replay_journal is not None:
            raise SamplerError(
                "a run that replays a journal (sampling.collection.replay_journal) samples "
                f"nothing: its journal has no step {step}; lower run.steps"
            )
        started = time.perf_counter()
        if not self._is_live:
            self._is_live = True
            self._go_live()
        ready = run_on_main(self.comm, lambda: self._wait(step))
        waited_seconds = time.perf_counter() - started
        return self._take_arrived(step, waited_seconds) if self.comm.broadcast(ready) else None

    def _is_recorded(self) -> bool:
        """Returns whether the next step is in the journal; known on rank 0 only."""
        return False

    def _wait(self, step: int) -> bool:
        """Wait on rank 0 for the rollouts of the step. False if a stop was requested first."""
        return False

    def _take_recorded(self, step: int) -> StepRollouts:
        return self._empty_step()

    def _take_arrived(self, step: int, waited_seconds: float) -> StepRollouts:
        return self._empty_step()

    def _empty_step(self) -> StepRollouts:
        return StepRollouts((), (), self.recipe.rollouts_per_step, 0, 0, None)

    def _go_live(self) -> None:
        """Push the policy to the servers, after the last step of the journal."""
        version = self.state.policy_version
        if self.parts.sampler.policy_version != version:
            _push(self.parts, version)

    def advance(self, version: int) -> None:
        """Push every `run.sync_every_steps`-th version to the servers, except the last version and
        those of steps taken from the journal."""
        run = self.recipe.run
        is_due = version % run.sync_every_steps == 0 and version != run.steps
        if self._is_live and is_due:
            _push(self.parts, version)

    def metrics(self, record: StepRecord) -> Metrics:
        return {}

    def save(self, folder: Path) -> None:
        """Write nothing: rank 0 saves the source."""


class MainSource(FollowerSource):
    """Implements `rollout_source.RolloutSource` on rank 0: first the steps recorded in the journal,
    then the groups that the collector delivers while the trainer works."""

    def __init__(self, parts: Parts, state: RunState, intake: Intake) -> None:
        """Starts with the steps that `intake` has from the journal; no collector runs yet."""
        super().__init__(parts, state)
        self.intake = intake
        self._times = ServerTimes(parts.recipe.sampling.gpus_per_server / parts.comm.world_size)
        self._insertable: dict[int, int] = {}  # group number -> rollouts that can be stored
        self._waited_seconds = 0.0
        # Consecutive steps without a log-prob check. The first step after a start is checked.
        self._unchecked_steps = UNCHECKED_STEPS - 1
        self._metrics: Metrics = {}  # those of the step that are known when it begins

    def _is_recorded(self) -> bool:
        return self.intake.replaying

    def _take_recorded(self, step: int) -> StepRollouts:
        taken = self._to_step_rollouts(self.intake.take_recorded(step), ServerUse(None, None))
        return replace(taken, repeated=True)

    def _take_arrived(self, step: int, waited_seconds: float) -> StepRollouts:
        """Takes the step's groups from the queue, with the use of the servers since the last step.
        After `UNCHECKED_STEPS` steps without rollouts of the newest weights alone, a probe is
        sampled, so that sampler and trainer are still compared."""
        self._waited_seconds = waited_seconds
        taken = self.intake.close_step(step)
        report, scorer = self.intake.newest_report, self.parts.scorer
        scorer.first_error = scorer.first_error or report.first_error
        use = self._times.step(report, self._server_sampler().pusher.paused_seconds)
        rollouts = self._to_step_rollouts(taken, use)
        self._unchecked_steps = 0 if rollouts.measured else self._unchecked_steps + 1
        if self._unchecked_steps < UNCHECKED_STEPS:
            return rollouts
        self._unchecked_steps = 0
        return replace(rollouts, measured=self._probe(taken, step))

    def _probe(self, taken: Sequence[Rollout], step: int) -> list[Rollout]:
        """Samples short completions of a few of the step's prompts with the newest weights, only to
        compare log-probs: servers that run ahead may never finish a group with them. Empty if the
        sampler lags (`run.sync_every_steps`), nothing was taken, or no server is left."""
        sampler, sampling = self._server_sampler(), self.recipe.sampling
        lags = sampler.policy_version != self.state.policy_version  # run.sync_every_steps
        if lags or not taken:
            return []
        probed = enumerate(evenly_spaced(taken, PROBED_PROMPTS))
        rollout_of_key = {RequestKey(step, index, 0): rollout for index, rollout in probed}
        requests = [
            GenerationRequest(
                key,
                rollout.prompt_token_ids,
                completion_seed(self.recipe.run.seed, key),
                min(PROBED_TOKENS, sampling.max_completion_length),
                sampling.temperature,
            )
            for key, rollout in rollout_of_key.items()
        ]
        try:
            completions = list(sampler.generate(requests))
        except ServersLost:
            return []  # the next wait for rollouts ends the run
        return [
            replace(
                rollout_of_key[completion.key],
                completion_token_ids=completion.token_ids,
                sampler_logprobs=completion.sampler_logprobs,
                policy_version=completion.policy_version,
                policy_version_end=completion.policy_version_end,
                completion_mask=None,
                extras={},
            )
            for completion in completions
        ]

    def _server_sampler(self) -> VllmServerSampler:
        """Returns the sampler. Recipes of asynchronous runs with a sampler that is not on servers
        are refused, and the facts of a sampler on servers require this class."""
        return cast(VllmServerSampler, self.parts.sampler)

    def _to_step_rollouts(self, taken: Sequence[Rollout], use: "ServerUse") -> StepRollouts:
        """Returns `taken` as the trainer needs it, with those of the newest weights alone to
        compare, and sets the metrics that are known when the step begins."""
        arrivals, state = self.intake.arrivals, self.state
        self._metrics = {
            "async/sampler_idle": use.idle,
            "async/partial_rollouts": sum(map(is_partial, taken)),
            "async/outstanding_groups": self.intake.outstanding_groups(),
            **arrivals.ledger.metrics(),
        }
        return StepRollouts(
            generated=taken,
            measured=sampled_only_by(taken, state.policy_version),
            nominal_rollouts=self.recipe.rollouts_per_step,
            prompts=arrivals.records - state.prompt_cursor,
            groups=arrivals.arrived_groups - state.next_group_id,
            generation_seconds=use.busy_seconds,
        )

    def _go_live(self) -> None:
        """Push the policy to the servers, and start the collector."""
        super()._go_live()
        self._server_sampler().pusher.on_switch = self.intake.announce
        version = self.state.policy_version
        self.intake.go_live(self._collector_settings(), len(self.parts.prompts), version)

    def _collector_settings(self) -> CollectorSettings:
        """Returns the settings of the collector: it samples from the servers of our sampler."""
        recipe, servers = self.recipe, self._server_sampler().servers.all
        return CollectorSettings(
            recipe=recipe,
            run=servers[0].prefix.removesuffix("/"),
            urls=[server.url for server in servers],
            stop_token_ids=self.parts.sampler.stop_token_ids,
            log=self.parts.run_dir.path / "log" / "collector.log",
        )

    def _wait(self, step: int) -> bool:
        """Waits on rank 0 until the step can begin: until enough groups that are young enough have
        arrived, or with `buffer_only` until buffer and queue can fill a batch. False if a stop was
        requested, or no server is left, which requests one."""
        arrivals, stored = self.intake.arrivals, len(self.parts.buffer.drawable(step))
        groups, version = arrivals.groups_per_step, self.state.policy_version

        def is_ready() -> bool:
            if groups is not None:
                return len(arrivals.young(step)) >= groups
            available = stored + self._insertable_rollouts(step)
            return available >= self._rollouts_per_batch()

        try:
            ready = self.intake.wait(is_ready, self.parts.stop, version)
            if ready:
                self.intake.poll(version)  # what has arrived meanwhile
            return ready
        except ServersLost as error:
            self.parts.stop.end(error)
            return False

    def _rollouts_per_batch(self) -> int:
        replay, size = self.recipe.replay, self.recipe.sampling.group_size
        units = draw_count(replay, size, self.recipe.rollouts_per_step)
        return min(units * (size if replay.unit == "query" else 1), replay.capacity_rollouts)

    def _insertable_rollouts(self, step: int) -> int:
        """Counts the queued rollouts that will enter the buffer at `step`. Called at every poll, so
        the count of a group is kept for the next call."""
        known, self._insertable = self._insertable, {}
        for group in self.intake.arrivals.young(step):
            count = known.get(group.number)
            if count is None:
                count = rollouts_to_insert(group, self.recipe)
            self._insertable[group.number] = count
        return sum(self._insertable.values())

    def advance(self, version: int) -> None:
        """Called after a step's updates: cancels groups that have become too old, pushes the
        version and gives the collector credit for more; after the last step, ends it. Does nothing
        while steps come from the journal."""
        if not self._is_live:
            return
        if version == self.recipe.run.steps:
            self.intake.close()
            return
        self.intake.cancel_stale(version + 1)
        super().advance(version)
        self.intake.give_credit(version)

    def metrics(self, record: StepRecord) -> Metrics:
        """Returns the step's metrics `async/*`, `ledger/*` and ages. Trainer idle is the share of
        the step's time that it waited for groups."""
        step_seconds = self.parts.clock.read()["step"]
        return {
            "sampler/policy_version": self.parts.sampler.policy_version,
            **self._metrics,
            "async/trainer_idle": self._waited_seconds / max(step_seconds, 1e-9),
            "async/undrawn_evicted": self.parts.buffer.stats(record.step).evicted_undrawn,
            **trained_ages(record),
        }

    def save(self, folder: Path) -> None:
        """Flush the journal: the checkpoint relies on it."""
        self.intake.sync()

    def close(self) -> None:
        """End the collector. May be called twice."""
        self.intake.close()


class ServerUse(NamedTuple):
    """How much the servers were used during one step. `busy_seconds` are per trainer rank; None for
    a step from the journal, whose rollouts an earlier attempt generated. `idle` is the fraction of
    time without a request; None if no server was in use."""

    busy_seconds: float | None
    idle: float | None


class ServerTimes:
    """Computes the use of the servers in a step from the collector's cumulative reports.

    A server that loads weights counts as idle. `busy_seconds` are GPU-seconds of the servers per
    trainer rank, so that μ compares the cost of generating a rollout with that of training on one
    (paper B).
    """

    def __init__(self, gpus_per_rank: float) -> None:
        self._gpus_per_rank = gpus_per_rank
        self._last = (0.0, 0.0, 0.0)

    def step(self, report: Report, paused_seconds: float) -> ServerUse:
        """Returns the use since the last call. `report` and `paused_seconds` (of servers that load
        weights) are cumulative; a report below the last one is that of a new collector."""
        now = (report.idle_seconds, report.server_seconds, paused_seconds)
        if now[1] < self._last[1]:  # a new collector counts from zero
            self._last = (0.0, 0.0, self._last[2])
        idle, used, paused = (a - b for a, b in zip(now, self._last, strict=True))
        self._last = now
        if used <= 0:
            return ServerUse(0.0, None)
        idle = min(idle + paused, used)
        return ServerUse((used - idle) * self._gpus_per_rank, idle / used)


def sampled_only_by(rollouts: Sequence[Rollout], version: int) -> list[Rollout]:
    """Returns at most `GAP_SAMPLE_ROLLOUTS` rollouts of which policy `version` sampled every token,
    evenly spaced over the step. On these, sampler and trainer must agree."""
    matching = [
        rollout
        for rollout in rollouts
        if (rollout.policy_version, rollout.policy_version_end) == (version, version)
    ]
    return evenly_spaced(matching, GAP_SAMPLE_ROLLOUTS)


def trained_ages(record: StepRecord) -> Metrics:
    """Ages of all rollouts trained on, in steps, or in updates if a step makes several draws."""
    births = [rollout.birth_step for rollout in record.batch.rollouts]
    if not births:
        return {"async/age_mean": None, "async/age_max": None}
    ages = record.batch.draw.in_updates(record.step - np.array(births))
    return {"async/age_mean": float(ages.mean()), "async/age_max": int(ages.max())}
