"""The source of asynchronous runs: a journal's steps, then a collector's groups as they arrive.

Rank 0 talks to the collector and keeps the journal (`collection.intake`); the other ranks take part
in updates and weight gathers. A step takes the groups that have arrived, while the servers go on
sampling (paper B, section 4; paper A's batches without the wait).

Behaviour log-probs are the sampler's, of the versions that sampled each token, and are never
recomputed; a rollout's birth step is that of the oldest token of its group, so a fresh rollout may
already have an age.
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
from grpo_replay.training.weight_sync import GAP_SAMPLE_ROLLOUTS, spread, sync_weights
from grpo_replay.types import GenerationRequest, RequestKey, Rollout, completion_seed

UNMEASURED_STEPS, PROBED_PROMPTS, PROBED_TOKENS = 5, 8, 16
"""After so many steps of which the newest weights sampled no rollout alone, so many prompts are
sampled with them, so long, to compare sampler and trainer."""


def open_collected(
    parts: Parts, state: RunState, checkpoint: Path | None, stack: ExitStack
) -> RolloutSource:
    """The source of an asynchronous run, at the step of the checkpoint. Collective."""
    if checkpoint is not None:
        _push(parts, state.policy_version)
    intake = run_collectively(parts.comm, lambda: _open_intake(parts, state, stack))
    if intake is None:
        return FollowerSource(parts, state)
    source = MainSource(parts, state, intake)
    stack.callback(source.close)  # before the journal closes
    return source


def _open_intake(parts: Parts, state: RunState, stack: ExitStack) -> Intake | None:
    """The intake on rank 0. The journal of the run goes on, and is closed with the stack; one that
    is repeated is only read."""
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
    """Gather and stage everything, then switch the servers one after the other."""
    with parts.clock.stage("sync"):
        sync_weights(parts.engine, parts.sampler, version)


class FollowerSource:
    """Implements `rollout_source.RolloutSource` for the ranks other than 0, which have no rollouts:
    they take part in what is collective."""

    def __init__(self, parts: Parts, state: RunState) -> None:
        self.parts, self.comm, self.recipe, self.state = parts, parts.comm, parts.recipe, state
        self._is_live = False

    def take(self, step: int) -> StepRollouts | None:
        """A step that the journal has never waits. After its last one, a run that repeats it raises
        SamplerError; any other goes live, and waits for what the collector delivers."""
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
        """On rank 0: whether the next step is in the journal."""
        return False

    def _wait(self, step: int) -> bool:
        """On rank 0: whether the rollouts of the step are there, or a stop was requested first."""
        return False

    def _take_recorded(self, step: int) -> StepRollouts:
        return self._nothing()

    def _take_arrived(self, step: int, waited_seconds: float) -> StepRollouts:
        return self._nothing()

    def _nothing(self) -> StepRollouts:
        return StepRollouts((), (), self.recipe.rollouts_per_step, 0, 0, None)

    def _go_live(self) -> None:
        """Bring the servers the policy, after the journal's last step."""
        version = self.state.policy_version
        if self.parts.sampler.policy_version != version:
            _push(self.parts, version)

    def advance(self, version: int) -> None:
        """Bring the servers every `run.sync_every_steps`-th version, but not the last one, and not
        those of steps repeated from the journal."""
        is_last = version == self.recipe.run.steps
        if self._is_live and not is_last and version % self.recipe.run.sync_every_steps == 0:
            _push(self.parts, version)

    def metrics(self, record: StepRecord) -> Metrics:
        return {}

    def save(self, folder: Path) -> None:
        """Rank 0 has everything."""


class MainSource(FollowerSource):
    """Implements it on rank 0, with the journal and the collector: the steps that the journal has,
    then the groups that the collector delivers while the trainer works."""

    def __init__(self, parts: Parts, state: RunState, intake: Intake) -> None:
        super().__init__(parts, state)
        self.intake = intake
        self._times = ServerTimes(parts.recipe.sampling.gpus_per_server / parts.comm.world_size)
        self._insertable: dict[int, int] = {}  # rollouts of each waiting group that can be stored
        self._waited_seconds = 0.0
        # Steps until now that no log-prob checked; the first one, or the first after a resume, is.
        self._unmeasured = UNMEASURED_STEPS - 1
        self._metrics: Metrics = {}  # of the step, as far as they are known when it begins

    def _is_recorded(self) -> bool:
        return self.intake.replaying

    def _take_recorded(self, step: int) -> StepRollouts:
        taken = self._step_rollouts(self.intake.take_recorded(step), ServerShare(None, None))
        return replace(taken, repeated=True)

    def _take_arrived(self, step: int, waited_seconds: float) -> StepRollouts:
        self._waited_seconds = waited_seconds
        taken = self.intake.close_step(step)
        report, scorer = self.intake.newest_report, self.parts.scorer
        scorer.first_error = scorer.first_error or report.first_error
        share = self._times.step(report, self._server_sampler().pusher.paused_seconds)
        found = self._step_rollouts(taken, share)
        self._unmeasured = 0 if found.measured else self._unmeasured + 1
        if self._unmeasured < UNMEASURED_STEPS:
            return found
        self._unmeasured = 0
        return replace(found, measured=self._probed(taken, step))

    def _probed(self, taken: Sequence[Rollout], step: int) -> list[Rollout]:
        """Short completions of a few prompts of the step, sampled now and only measured: servers
        that run ahead may finish no group with the newest weights alone."""
        sampler, sampling = self._server_sampler(), self.recipe.sampling
        lags = sampler.policy_version != self.state.policy_version  # run.sync_every_steps
        if lags or not taken:
            return []
        chosen = enumerate(spread(taken, PROBED_PROMPTS))
        of_key = {RequestKey(step, index, 0): rollout for index, rollout in chosen}
        requests = [
            GenerationRequest(
                key,
                rollout.prompt_token_ids,
                completion_seed(self.recipe.run.seed, key),
                min(PROBED_TOKENS, sampling.max_completion_length),
                sampling.temperature,
            )
            for key, rollout in of_key.items()
        ]
        try:
            completions = list(sampler.generate(requests))
        except ServersLost:
            return []  # the next wait ends the run
        return [
            replace(
                of_key[each.key],
                completion_token_ids=each.token_ids,
                sampler_logprobs=each.sampler_logprobs,
                policy_version=each.policy_version,
                policy_version_end=each.policy_version_end,
                completion_mask=None,
                extras={},
            )
            for each in completions
        ]

    def _server_sampler(self) -> VllmServerSampler:
        """The sampler of a run that is live: recipes with another one are refused."""
        return cast(VllmServerSampler, self.parts.sampler)

    def _step_rollouts(self, taken: Sequence[Rollout], servers: "ServerShare") -> StepRollouts:
        """What the trainer gets."""
        arrivals, state = self.intake.arrivals, self.state
        self._metrics = {
            "async/sampler_idle": servers.idle,
            "async/partial_rollouts": sum(map(is_partial, taken)),
            "async/outstanding_groups": self.intake.outstanding_groups(),
            **arrivals.ledger.metrics(),
        }
        return StepRollouts(
            generated=taken,
            measured=sampled_by(taken, state.policy_version),
            nominal_rollouts=self.recipe.rollouts_per_step,
            prompts=arrivals.records - state.prompt_cursor,
            groups=arrivals.arrived_groups - state.next_group_id,
            generation_seconds=servers.busy_seconds,
        )

    def _go_live(self) -> None:
        """Open the sampler, and start the collector."""
        super()._go_live()
        self._server_sampler().pusher.on_switch = self.intake.announce
        version = self.state.policy_version
        self.intake.go_live(self._collector_settings(), len(self.parts.prompts), version)

    def _collector_settings(self) -> CollectorSettings:
        recipe, servers = self.recipe, self._server_sampler().servers.all
        return CollectorSettings(
            recipe=recipe,
            run=servers[0].prefix.removesuffix("/"),
            urls=[server.url for server in servers],
            stop_token_ids=self.parts.sampler.stop_token_ids,
            log=self.parts.run_dir.path / "log" / "collector.log",
        )

    def _wait(self, step: int) -> bool:
        """`fresh_anchored` and the use-once queue wait for the step's groups; `buffer_only` only
        until the buffer can give one batch. False if a stop was requested, or no server is left."""
        arrivals, stored = self.intake.arrivals, len(self.parts.buffer.drawable(step))
        groups, version = arrivals.groups_per_step, self.state.policy_version

        def is_ready() -> bool:
            if groups is not None:
                return len(arrivals.young(step)) >= groups
            return stored + self._rollouts_waiting(step) >= self._rollouts_of_a_batch()

        try:
            ready = self.intake.wait(is_ready, self.parts.stop, version)
            if ready:
                self.intake.poll(version)
            return ready
        except ServersLost as error:
            self.parts.stop.end(error)
            return False

    def _rollouts_of_a_batch(self) -> int:
        replay, size = self.recipe.replay, self.recipe.sampling.group_size
        units = draw_count(replay, size, self.recipe.rollouts_per_step)
        return min(units * (size if replay.unit == "query" else 1), replay.capacity_rollouts)

    def _rollouts_waiting(self, step: int) -> int:
        """Rollouts in the queue that will enter the buffer at `step`. Each group is looked into
        once."""
        known, self._insertable = self._insertable, {}
        for each in self.intake.arrivals.young(step):
            count = known.get(each.number)
            if count is None:
                count = rollouts_to_insert(each, self.recipe)
            self._insertable[each.number] = count
        return sum(self._insertable.values())

    def advance(self, version: int) -> None:
        """Push, and let the collector go on, or end it after the last step."""
        if not self._is_live:
            return
        if version == self.recipe.run.steps:
            self.intake.close()
            return
        self.intake.cancel_stale(version + 1)
        super().advance(version)
        self.intake.give_credit(version)

    def metrics(self, record: StepRecord) -> Metrics:
        step_seconds = self.parts.clock.read()["step"]
        return {
            "sampler/policy_version": self.parts.sampler.policy_version,
            **self._metrics,
            "async/trainer_idle": self._waited_seconds / max(step_seconds, 1e-9),
            "async/undrawn_evicted": self.parts.buffer.stats(record.step).evicted_undrawn,
            **trained_ages(record),
        }

    def save(self, folder: Path) -> None:
        """The checkpoint relies on the journal: it is on disk first."""
        self.intake.sync()

    def close(self) -> None:
        """End the collector. May be called twice."""
        self.intake.close()


class ServerShare(NamedTuple):
    """The servers during one step. `busy_seconds` are per trainer rank, None for a step repeated
    from the journal: its generation was in an earlier attempt. `idle` is the share of their time
    without a request; None if none was in use."""

    busy_seconds: float | None
    idle: float | None


class ServerTimes:
    """Differences between the collector's reports of two steps.

    A server that loads weights is idle, too. `busy_seconds` are GPU-seconds of the servers per
    trainer rank, so that μ compares the cost of generating a rollout with that of training on one
    (paper B).
    """

    def __init__(self, gpus_per_rank: float) -> None:
        self._gpus_per_rank = gpus_per_rank
        self._last = (0.0, 0.0, 0.0)

    def step(self, report: Report, paused_seconds: float) -> ServerShare:
        now = (report.idle_seconds, report.server_seconds, paused_seconds)
        if now[1] < self._last[1]:  # another collector
            self._last = (0.0, 0.0, self._last[2])
        idle, used, paused = (a - b for a, b in zip(now, self._last, strict=True))
        self._last = now
        if used <= 0:
            return ServerShare(0.0, None)
        idle = min(idle + paused, used)
        return ServerShare((used - idle) * self._gpus_per_rank, idle / used)


def sampled_by(rollouts: Sequence[Rollout], version: int) -> list[Rollout]:
    """At most `GAP_SAMPLE_ROLLOUTS` rollouts that `version` sampled alone, spread over the step:
    there, sampler and trainer must agree."""
    own = [
        rollout
        for rollout in rollouts
        if (rollout.policy_version, rollout.policy_version_end) == (version, version)
    ]
    return spread(own, GAP_SAMPLE_ROLLOUTS)


def trained_ages(record: StepRecord) -> Metrics:
    """Of everything trained on; in optimizer updates if a step makes several draws."""
    births = [rollout.birth_step for rollout in record.batch.rollouts]
    if not births:
        return {"async/age_mean": None, "async/age_max": None}
    ages = record.batch.draw.in_updates(record.step - np.array(births))
    return {"async/age_mean": float(ages.mean()), "async/age_max": int(ages.max())}
