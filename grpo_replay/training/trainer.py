"""The training loop: paper A's Algorithm 1, one line per stage (see `Trainer.train_step`).

Departures from textbook GRPO: the behaviour log-probs of a rollout are fixed once, in the step that
takes it; a batch is composed of fresh and stored rollouts; nothing about a rollout is recomputed
when it is replayed. docs/algorithm.md names the function and the test of every equation.

A `rollout_source.RolloutSource` delivers rollouts and brings new weights to the sampler, so
synchronous and asynchronous runs have the same steps.

Rank 0 owns the buffer, the draw and the files. Other ranks train their share; their lists of
rollouts are empty.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from grpo_replay.engine import UpdateResult
from grpo_replay.replay.batch import logprob_row, train_rows, update_indices
from grpo_replay.replay.compose import buffer_step
from grpo_replay.replay.rollouts import with_behavior_logprobs
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.storage.rollout_log import write_step
from grpo_replay.training.metrics import step_metrics
from grpo_replay.training.reward_watch import (
    CorrectWatch,
    LearningWatch,
    SlowWatch,
    notices_of_ids,
    refuse_failed_verdicts,
)
from grpo_replay.training.rollout_source import Parts, RolloutSource, StepRecord
from grpo_replay.training.shadow import probe_indices, probe_is_due
from grpo_replay.training.weight_sync import LogprobGap, measure_gap, refuse_gap
from grpo_replay.types import (
    DRAW_STREAM,
    SPLIT_STREAM,
    ComposedBatch,
    Draw,
    Rollout,
    RolloutOutcome,
    stream,
)


class Trainer:
    """Runs training steps. Only `state`, the buffer and the source persist between them."""

    def __init__(self, parts: Parts, state: RunState, source: RolloutSource) -> None:
        """`state` has the counters, those of the checkpoint after a resume."""
        self.parts, self.state, self.source = parts, state, source
        self.recipe = parts.recipe
        self.comm = parts.comm
        self.buffer = parts.buffer
        self.generated: Sequence[Rollout] = ()  # of the last step, on rank 0
        self.notices: list[str] = []  # messages for the user; the caller shows and clears them
        recipe = self.recipe
        self._learning = LearningWatch(recipe.reward, recipe.sampling, recipe.run.steps)
        self._ids_reported = False
        self._correct, self._slow = CorrectWatch(recipe.reward), SlowWatch(recipe.reward)

    def train_step(self) -> dict[str, Any] | None:
        """Make one step of Algorithm 1. Returns its metrics on rank 0, an empty dict on other
        ranks; None if a stop was requested while it waited for rollouts. Raises RewardError if the
        reward function failed on more than `reward.max_failed_share` of them, LogprobGapError if
        the sampler is not the policy."""
        step, seed = self.state.step + 1, self.recipe.run.seed
        self.parts.clock.restart()
        self.parts.engine.begin_step(step)
        taken = self.source.take(step)
        if taken is None:
            return None
        if not taken.repeated:  # failures of repeated rollouts have stopped an earlier attempt
            refuse_failed_verdicts(
                taken.generated, step, self.recipe.reward, self.parts.scorer.first_error
            )
        logprobs = self.trainer_logprobs(taken.measured)
        gap = self.check_sampler(taken.measured, logprobs, step)
        fresh = self.freeze_behavior(taken.generated, logprobs)
        rng, draws = stream(seed, step, DRAW_STREAM), self.recipe.draws_per_step
        with self.parts.clock.stage("shadow") if self.recipe.replay.shadow else nullcontext():
            batch = buffer_step(self.buffer, fresh, step, taken.nominal_rollouts, rng, draws)
            probe = self.probe(batch.draw, step)
        results, outcomes = self.update(batch, step)
        self.advance()
        record = StepRecord(step, taken, fresh, gap, batch, results, outcomes, probe)
        recipe = self.recipe
        count_step(self.state, record, recipe.sampling.group_size, recipe.batch.epochs)
        return self._report(record) if self.comm.is_main else {}

    def trainer_logprobs(self, rollouts: Sequence[Rollout]) -> dict[int, np.ndarray]:
        """Compute the trainer's log-probs, float32 [T], by rollout id, on rank 0. Collective."""
        if not self.comm.broadcast(len(rollouts)):
            return {}
        with self.parts.clock.stage("logprob"):
            rows = [logprob_row(r.prompt_token_ids, r.completion_token_ids) for r in rollouts]
            logprobs = self.parts.engine.logprobs(rows if self.comm.is_main else None)
        return {r.rollout_id: lp for r, lp in zip(rollouts, logprobs, strict=True)}

    def check_sampler(
        self, measured: Sequence[Rollout], logprobs: Mapping[int, np.ndarray], step: int
    ) -> LogprobGap | None:
        """Measure the gap between the sampler's and the trainer's log-probs; None without tokens.
        Raises LogprobGapError if it is too large although the current policy sampled every token.
        """
        gap = measure_gap(measured, [logprobs[rollout.rollout_id] for rollout in measured])
        if gap is None:
            return None
        version = self.state.policy_version
        if {v for r in measured for v in (r.policy_version, r.policy_version_end)} == {version}:
            is_async = self.recipe.run.is_async
            refuse_gap(gap, self.recipe.logprob_gap_limit, step, version, is_repeated=is_async)
        return gap

    def freeze_behavior(
        self, generated: Sequence[Rollout], trainer_logprobs: Mapping[int, np.ndarray]
    ) -> list[Rollout]:
        """Return the survivors with behaviour log-probs, which never change again: the trainer's
        (the policy that sampled is still the current one, and every survivor is measured), or the
        sampler's, which asynchronous runs and `run.sync_every_steps` above 1 require."""
        if self.recipe.loss.behavior_logprobs == "trainer":
            return with_behavior_logprobs(generated, trainer_logprobs)
        return with_behavior_logprobs(
            generated, {rollout.rollout_id: rollout.sampler_logprobs for rollout in generated}
        )

    def probe(self, draw: Draw, step: int) -> dict[int, RolloutOutcome]:
        """Score drawn rollouts as an update would now, without training on them. Returns outcomes
        by index in the draw; empty on ranks other than 0, and if no probe is due."""
        settings, loss = self.recipe.replay, self.recipe.loss
        if not probe_is_due(settings, step):
            return {}
        chosen = probe_indices(draw, settings.probe_rollouts)
        rows = train_rows(
            [draw.rollouts[i] for i in chosen],
            None,
            loss,
            self.recipe.sampling.max_completion_length,
        )
        measured = self.parts.engine.measure(rows if self.comm.is_main else None)
        return dict(zip(chosen, measured, strict=self.comm.is_main))

    def update(
        self, batch: ComposedBatch, step: int
    ) -> tuple[list[UpdateResult], list[RolloutOutcome]]:
        """Make the optimizer updates of the step. Returns their results, and the outcome of every
        rollout of the batch (that of the last epoch)."""
        rng = stream(self.recipe.run.seed, step, SPLIT_STREAM)
        parts = update_indices(batch, self.recipe.batch, rng)
        results: list[UpdateResult] = []
        outcomes: list[RolloutOutcome | None] = [None] * len(batch.rollouts)
        with self.parts.clock.stage("training"):
            count = self.comm.broadcast(len(parts))
            for index in range(count):
                members = parts[index] if self.comm.is_main else np.zeros(0, dtype=np.int64)
                result = self._update_once([batch.rollouts[i] for i in members])
                if result is None:
                    continue
                results.append(result)
                for i, outcome in zip(members, result.outcomes, strict=True):
                    outcomes[i] = outcome
        return results, [outcome for outcome in outcomes if outcome is not None]

    def _update_once(self, rollouts: Sequence[Rollout]) -> UpdateResult | None:
        """Makes one optimizer update on the rollouts (those of rank 0), with reference log-probs if
        the loss has a KL term. Returns None on ranks other than 0. Collective."""
        engine, is_main = self.parts.engine, self.comm.is_main
        reference = None
        if self.recipe.loss.beta > 0:
            plain = [logprob_row(r.prompt_token_ids, r.completion_token_ids) for r in rollouts]
            reference = engine.reference_logprobs(plain if is_main else None)
        longest = self.recipe.sampling.max_completion_length
        rows = train_rows(rollouts, reference, self.recipe.loss, longest)
        return engine.update(rows if is_main else None)

    def advance(self) -> None:
        """Increase the policy version, also without updates; the source pushes it if due."""
        version = self.state.policy_version + 1
        self.source.advance(version)
        self.state.policy_version = version

    def _report(self, record: StepRecord) -> dict[str, Any]:
        """Write the files of the step, and collect notices about it. Returns its metrics."""
        self.generated = record.generated
        recipe, step = self.recipe, record.step
        if record.generated:
            self.notices += self._learning.observe(step, record.generated)
            self.notices += self._correct.observe(step, record.generated)
            if not self._ids_reported:
                notices = notices_of_ids(step, record.generated, len(self.parts.tokenizer))
                self.notices, self._ids_reported = self.notices + notices, bool(notices)
        fresh = {rollout.rollout_id: rollout for rollout in record.fresh}
        taken = [fresh.get(rollout.rollout_id, rollout) for rollout in record.generated]
        folder = self.parts.run_dir.path
        write_step(folder, step, taken, record.batch, record.outcomes, recipe.replays, record.probe)
        seconds = self.parts.clock.read()
        self.notices += self._slow.observe(step, seconds)
        metrics = step_metrics(
            record,
            recipe,
            buffer=self.buffer.stats(step),
            seconds=seconds,
            source_metrics=self.source.metrics(record),
        )
        return {**metrics, "num_tokens": self.state.processed_tokens}


def count_step(state: RunState, record: StepRecord, group_size: int, epochs: int) -> None:
    """Advance the counters of the run by one step. Token counts are complete on rank 0 only."""
    taken = record.taken
    state.step = record.step
    state.prompt_cursor += taken.prompts
    state.next_group_id += taken.groups
    state.next_rollout_id += taken.groups * group_size
    state.generated_tokens += sum(len(r.completion_token_ids) for r in taken.generated)
    tokens_per_epoch = sum(rollout.trained_tokens for rollout in record.batch.rollouts)
    state.trained_tokens += epochs * tokens_per_epoch
    state.processed_tokens += sum(
        len(r.prompt_token_ids) + len(r.completion_token_ids) for r in taken.generated
    )
    state.replayed_rollouts += int(record.batch.replayed.sum())
