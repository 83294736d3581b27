"""The training loop of asynchronous runs (paper B, section 4; paper A's batches without the wait).

A step takes the groups that have arrived, composes a batch as in synchronous runs, updates, and
brings the servers the new weights while they go on sampling. Rank 0 talks to the collector and
keeps the journal; the other ranks take part in updates and weight gathers.

Departures from the synchronous loop: behaviour log-probs are the sampler's, of the versions that
sampled each token, and are never recomputed; a rollout's birth step is that of its oldest token, so
a fresh rollout may already have an age.
"""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo_replay.collection.admission import unacknowledged_limit
from grpo_replay.collection.assembly import TakenRollouts, rollouts_to_insert
from grpo_replay.collection.intake import Intake
from grpo_replay.collection.journal import Journal, JournalRecords
from grpo_replay.collection.link import CollectorSettings
from grpo_replay.collection.messages import Report
from grpo_replay.distributed.failures import run_collectively
from grpo_replay.distributed.long_work import run_on_main
from grpo_replay.replay.batch import logprob_row
from grpo_replay.replay.compose import (
    compose_batch,
    draw_count,
    insert_after_update,
    insert_before_draw,
)
from grpo_replay.sampling.server.rolling import RollingServerSampler
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.training.async_record import (
    AsyncStep,
    SamplerShare,
    SamplerTimes,
    UndrawnEvictions,
    async_step_metrics,
    count_async_step,
)
from grpo_replay.training.journal_rules import JOURNAL_FOLDER
from grpo_replay.training.learning_watch import refuse_failed_verdicts
from grpo_replay.training.metrics import Stopwatch
from grpo_replay.training.step_record import StepRecord, write_step_files
from grpo_replay.training.trainer import Parts, Trainer
from grpo_replay.training.weight_sync import (
    GAP_SAMPLE_ROLLOUTS,
    LogprobGap,
    measure_gap,
    refuse_gap,
    sync_weights,
)
from grpo_replay.types import Rollout

logger = logging.getLogger(__name__)


def open_async_trainer(parts: Parts, state: RunState, stack: ExitStack) -> Trainer:
    """The trainer of an asynchronous run. Collective. What it opens is closed with `stack`."""
    intake = run_collectively(parts.comm, lambda: _open_intake(parts, state, stack))
    trainer = AsyncTrainer(parts, state, intake)
    if intake is not None:
        stack.callback(intake.close)  # before the journal closes
    return trainer


def _open_intake(parts: Parts, state: RunState, stack: ExitStack) -> Intake | None:
    """The intake on rank 0, at the step of the checkpoint."""
    if not parts.comm.is_main:
        return None
    source = parts.recipe.sampling.collection.replay_journal
    if source is not None:
        records = JournalRecords.of(Path(source) / JOURNAL_FOLDER)
        return Intake(parts.recipe, None, records, state.step)
    journal, records = Journal.open(parts.run_dir.path / JOURNAL_FOLDER)
    stack.callback(journal.close)
    return Intake(parts.recipe, journal, records, state.step)


class AsyncTrainer(Trainer):
    """Runs asynchronous training steps. `intake` is None on ranks other than 0."""

    def __init__(self, parts: Parts, state: RunState, intake: Intake | None) -> None:
        super().__init__(parts, state)
        self.intake = intake
        self._replaying = True
        self._times = SamplerTimes(parts.recipe, parts.comm.world_size)
        self._undrawn = UndrawnEvictions()
        self._waited_seconds = 0.0

    def await_step(self, stop_requested: Callable[[], bool]) -> bool:
        """Wait until the next step may begin; False if a stop was requested first. Collective.

        `fresh_anchored` and the use-once queue wait for the step's groups; `buffer_only` only until
        the buffer can give one batch. A step that the journal has never waits.
        """
        step, intake = self.state.step + 1, self.intake
        self._clock, self._waited_seconds = Stopwatch(), 0.0
        self.comm.position.begin_step(step)
        self._replaying = self.comm.broadcast_json(intake is not None and intake.replaying)
        if self._replaying:
            return True
        self._go_live()
        started = time.perf_counter()
        with self.comm.position.stage("waiting for rollouts"):
            ready = run_on_main(self.comm, lambda: self._wait(step, stop_requested))
        self._waited_seconds = time.perf_counter() - started
        return self.comm.broadcast_json(ready)

    def _go_live(self) -> None:
        """After the journal's last step: bring the servers the policy, and start the collector."""
        sampler, version = self.parts.sampler, self.state.policy_version
        live = self.comm.broadcast_json(self.intake is not None and self.intake.live)
        if live:
            return
        if sampler.policy_version != version:
            self._push(version)
        if self.intake is None:
            return
        if not isinstance(sampler, RollingServerSampler):
            list(sampler.generate([]))  # a replayed journal has ended: the sampler says what to do
            raise AssertionError("unreachable")
        sampler.on_switch = self.intake.announce
        self.intake.go_live(self._collector_settings(sampler), len(self.parts.prompts), version)

    def _collector_settings(self, sampler: RollingServerSampler) -> CollectorSettings:
        recipe = self.recipe
        assert self.intake is not None
        never_gated = self.intake.arrivals.rules.groups_per_step is None
        capacity, size = recipe.replay.capacity_rollouts, recipe.sampling.group_size
        return CollectorSettings(
            recipe=recipe,
            run=sampler.servers[0].prefix.removesuffix("/"),
            urls=[server.url for server in sampler.servers],
            stop_token_ids=sampler.stop_token_ids,
            unacknowledged_limit=unacknowledged_limit(capacity, size) if never_gated else None,
            log=self.parts.run_dir.path / "log" / "collector.log",
        )

    def _wait(self, step: int, stop_requested: Callable[[], bool]) -> bool:
        intake, sampler = self.intake, self.parts.sampler
        assert intake is not None and isinstance(sampler, RollingServerSampler)
        needed = intake.arrivals.rules.groups_per_step

        def look(report: Report) -> None:
            sampler.suspect(report.down)

        if needed is not None:
            return intake.wait(
                lambda: intake.arrivals.ready(step) >= needed, stop_requested, look,
                f"the {needed} groups of step {step}, of which {intake.arrivals.ready(step)} had "
                "arrived when the wait began", self.state.policy_version,
            )  # fmt: skip
        batch = draw_count(
            self.recipe.replay, self.buffer.group_size, self.recipe.rollouts_per_step
        )
        unit = self.buffer.group_size if self.recipe.replay.unit == "query" else 1
        fill = min(batch * unit, self.recipe.replay.capacity_rollouts)
        return intake.wait(
            lambda: len(self.buffer) + self._rollouts_waiting(step) >= fill, stop_requested, look,
            f"the {fill} stored rollouts of one batch, of which the buffer had {len(self.buffer)}",
            self.state.policy_version,
        )  # fmt: skip

    def _rollouts_waiting(self, step: int) -> int:
        """Rollouts in the queue that will enter the buffer at `step`."""
        assert self.intake is not None
        young = self.intake.arrivals.young(step)
        return sum(rollouts_to_insert(each, self.recipe) for each in young)

    def train_step(self) -> dict[str, Any]:
        """One step: take what has arrived, then Algorithm 1 from the eviction on. Returns the
        step's metrics on rank 0, an empty dict on other ranks. `await_step` comes before it."""
        step = self.state.step + 1
        self.parts.engine.begin_step(step)
        taken = self._take(step)
        self.generated = taken.generated
        gap = self._measure_gap(taken, step)
        ledger = self.intake.arrivals.ledger.metrics() if self.intake else {}
        fresh = taken.fresh
        self._undrawn.begin(self.buffer, fresh)
        self.buffer.evict(step)
        insert_before_draw(self.buffer, fresh, step)
        draws = self._draw_stream(step)
        batch = compose_batch(self.buffer, fresh, step, self.recipe.rollouts_per_step, draws)
        results, outcomes = self.update(batch, step)
        insert_after_update(self.buffer, fresh, step, batch)
        self.sync_weights()
        count_async_step(self.state, self.intake, taken, batch)
        if self.intake is None:
            return {}
        self._after_step(step)
        refuse_failed_verdicts(taken.generated, step, self.recipe, first_error=None)
        record = StepRecord(step, taken.generated, fresh, gap, batch, results, outcomes)
        self._warn_if_capacity_binds(step)
        if taken.generated:
            self._watch(step, taken.generated)
        if self.recipe.tracking.log_rollouts:
            write_step_files(self.parts.run_dir.path, self.recipe, record)
        asynchronous = AsyncStep(
            waited_seconds=self._waited_seconds,
            sampler=self._sampler_share(),
            straddlers=taken.straddlers,
            outstanding_groups=self.intake.outstanding_groups(),
            undrawn_evicted=self._undrawn.end(self.buffer, batch),
            sampler_version=self.parts.sampler.policy_version,
            ledger=ledger,
        )
        return async_step_metrics(
            self.recipe, self.state, record, self.buffer.stats(step), self._clock.read(),
            asynchronous,
        )  # fmt: skip

    def _take(self, step: int) -> TakenRollouts:
        """The groups of the step: those that the journal says, or all that are there now."""
        intake = self.intake
        if intake is None:
            return TakenRollouts((), (), 0)
        if self._replaying:
            return intake.take_recorded(step)
        intake.poll(self.state.policy_version)
        return intake.cut(step, self.state.policy_version, self.parts.sampler.policy_version)

    def _after_step(self, step: int) -> None:
        """Let the collector go on, or end it with the last step."""
        assert self.intake is not None
        if not self.intake.live:
            return
        if step == self.recipe.run.steps:
            self.intake.finish()
            return
        self.intake.give_credit(self.state.policy_version)
        self.parts.sampler.suspect(self.intake.newest_report.down)  # type: ignore[attr-defined]

    def _measure_gap(self, taken: TakenRollouts, step: int) -> LogprobGap | None:
        """The gap on rollouts that the present policy sampled alone: there, sampler and trainer
        must agree. None if there are none. Collective."""
        version = self.state.policy_version
        sample = _gap_sample(taken, version)
        if not self.comm.broadcast_json(len(sample)):
            return None
        with self._stage("logprob"):
            rows = [logprob_row(r.prompt_token_ids, r.completion_token_ids) for r in sample]
            logprobs = self.parts.engine.logprobs(rows if self.comm.is_main else None)
        if not self.comm.is_main:
            return None
        gap = measure_gap(sample, logprobs)
        refuse_gap(gap, self.recipe.logprob_gap_limit, step, version)
        return gap

    def sync_weights(self) -> None:
        """The new policy is the next version. Bring it to the servers every
        `run.sync_every_steps`-th version, unless the step was replayed from the journal; none is
        waited for after the last step."""
        version = self.state.policy_version + 1
        if not self._replaying and version < self.recipe.run.steps:
            if self.intake is not None:
                self.intake.cancel_stale(version + 1)
            if self._push_is_due():
                self._push(version)
        self.state.policy_version = version

    def _push(self, version: int) -> None:
        """Gather and stage everything, then switch the servers one after the other."""
        parts = self.parts
        with self._stage("sync"):
            bucket_mib = self.recipe.sampling.sync_bucket_mib
            sync_weights(parts.engine, parts.sampler, version, bucket_mib)

    def before_checkpoint(self) -> None:
        if self.intake is not None:
            self.intake.sync()

    def _sampler_share(self) -> SamplerShare:
        if self._replaying:
            return SamplerShare(None, None)
        assert self.intake is not None
        paused = getattr(self.parts.sampler, "paused_seconds", 0.0)
        return self._times.step(self.intake.newest_report, paused)


def _gap_sample(taken: TakenRollouts, version: int) -> list[Rollout]:
    """At most `GAP_SAMPLE_ROLLOUTS` rollouts that `version` sampled alone, spread over the step."""
    own = [
        rollout
        for rollout in taken.generated
        if (rollout.policy_version, rollout.policy_version_end) == (version, version)
    ]
    count = min(len(own), GAP_SAMPLE_ROLLOUTS)
    return [own[i * len(own) // count] for i in range(count)]
