"""The training loop: paper A's Algorithm 1, one line per stage (see `Trainer.train_step`).

Departures from textbook GRPO: the behaviour log-probs of a rollout are computed once, at birth;
a batch is composed of fresh and stored rollouts; nothing about a rollout is recomputed when it is
replayed. docs/algorithm.md names the function and the test of every equation.

Rank 0 owns the buffer, the draw and the files. The other ranks sample, score and train their
share; on them, the lists of rollouts are empty.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.engine_protocol import Engine, UpdateResult
from grpo_replay.prompts.prompt_set import PromptSet
from grpo_replay.recipe import Recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.batch import logprob_row, mini_batch_indices, train_rows
from grpo_replay.replay.compose import compose_batch, insert_after_update, insert_before_draw
from grpo_replay.replay.replay_buffer import DRAW_STREAM
from grpo_replay.replay.rollouts import assemble_rollouts, group_requests, with_behavior_logprobs
from grpo_replay.replay.seeding import stream
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.sampler_protocol import Sampler
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training.gather import Graded, gather_graded, share_of_rank
from grpo_replay.training.learning_watch import (
    LearningWatch,
    MissingWatch,
    refuse_failed_verdicts,
)
from grpo_replay.training.metrics import Stopwatch
from grpo_replay.training.step_record import (
    StepRecord,
    count_step,
    step_metrics,
    write_step_files,
)
from grpo_replay.training.weight_sync import (
    LogprobGap,
    PushedWeights,
    gap_sample,
    measure_gap,
    refuse_gap,
    sync_weights,
)
from grpo_replay.types import ComposedBatch, Rollout, RolloutOutcome

SPLIT_STREAM = 2  # purpose of a random stream of the step, as `DRAW_STREAM` is


@dataclass(slots=True)
class Parts:
    """The components of a trainer."""

    recipe: Recipe
    comm: Comm
    engine: Engine
    sampler: Sampler
    scorer: RewardScorer
    prompts: PromptSet
    tokenizer: Any
    buffer: ReplayBuffer
    run_dir: RunDirectory
    pushed: PushedWeights | None = None
    """The weights that a lagging sampler holds, on rank 0; None if every step pushes."""


class Trainer:
    """Runs training steps. Only `state` and the buffer persist between them."""

    def __init__(self, parts: Parts, state: RunState) -> None:
        self.parts = parts
        self.recipe = parts.recipe
        self.comm = parts.comm
        self.buffer = parts.buffer
        self.generated: Sequence[Rollout] = ()  # of the last step, on rank 0
        self.state = state
        self.notices: list[str] = []  # messages for the user; the caller shows and clears them
        self._learning = LearningWatch(parts.recipe)
        self._missing = MissingWatch()
        self._clock = Stopwatch()

    def await_step(self, stop_requested: Callable[[], bool]) -> bool:
        """Whether the next step may begin: at once, in a synchronous run."""
        return True

    def before_checkpoint(self) -> None:
        """Flush what a checkpoint relies on: nothing, in a synchronous run."""

    def train_step(self) -> dict[str, Any]:
        """One step of Algorithm 1. Returns its metrics on rank 0, an empty dict on other ranks."""
        self._clock = Stopwatch()
        step = self.state.step + 1
        self.comm.position.begin_step(step)
        self.parts.engine.begin_step(step)
        generated, prompts = self.sample_and_score(step)
        fresh, gap = self.freeze_behavior(generated, step)
        self.buffer.evict(step)
        insert_before_draw(self.buffer, fresh, step)
        batch = compose_batch(self.buffer, fresh, step, len(generated), self._draw_stream(step))
        results, outcomes = self.update(batch, step)
        insert_after_update(self.buffer, fresh, step, batch)
        self.sync_weights()
        count_step(self.state, self.recipe, prompts, generated, batch)
        if not self.comm.is_main:
            return {}
        assert gap is not None
        self.generated = generated
        record = StepRecord(step, generated, fresh, gap, batch, results, outcomes)
        self._warn_if_capacity_binds(step)
        self._watch(step, generated)
        if self.recipe.tracking.log_rollouts:
            write_step_files(self.parts.run_dir.path, self.recipe, record)
        buffer = self.buffer.stats(step)
        return step_metrics(self.recipe, self.state, record, buffer, self._clock.read())

    def _watch(self, step: int, generated: Sequence[Rollout]) -> None:
        """Notices about rewards that did not come, and about steps without a signal."""
        self.notices += self._missing.observe(step, generated, self.parts.scorer.first_error)
        self.notices += self._learning.observe(step, generated)

    def _draw_stream(self, step: int) -> np.random.Generator:
        return stream(self.recipe.run.seed, step, DRAW_STREAM)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        with self._clock.stage(name), self.comm.position.stage(name):
            yield

    def sample_and_score(self, step: int) -> tuple[list[Rollout], int]:
        """Take prompts, sample G completions of each, score them as they finish, and compute
        group advantages; again for dropped groups, up to `sampling.max_refills` times (DAPO).
        Returns all rollouts of the step, on rank 0, and the number of prompts taken. Raises
        RewardError if the reward function failed on most of them."""
        settings = self.recipe.sampling
        generated: list[Rollout] = []
        taken, missing = 0, settings.prompts_per_step
        for refill in range(settings.max_refills + 1):
            is_last = refill == settings.max_refills
            generated += self._sample_prompts(step, taken, missing, is_last)
            taken += missing
            if is_last:
                break
            survivors = len({rollout.group_id for rollout in generated if rollout.kept})
            missing = self.comm.broadcast_json(settings.prompts_per_step - survivors)
            if missing == 0:
                self._sleep()
                break
        refuse_failed_verdicts(generated, step, self.recipe, self.parts.scorer.first_error)
        return generated, taken

    def _sample_prompts(self, step: int, first: int, count: int, is_last: bool) -> list[Rollout]:
        """The rollouts of the step's prompts `first` … `first + count - 1`, on rank 0. The sampler
        sleeps after the last ones."""
        comm = self.comm
        taken = self.parts.prompts.take(self.state.prompt_cursor + first, count)
        prompts = dict(enumerate(taken, start=first))
        completions, texts = {}, {}
        with self._stage("generation"):
            everything = group_requests(prompts, step, self.recipe)
            requests = share_of_rank(everything, comm.rank, comm.world_size)
            finished = self.parts.sampler.generate(requests)
            for completion in comm.position.each("completion", finished, len(requests)):
                key = completion.key
                prompt = prompts[key.prompt_index]
                text = self.parts.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
                completions[key], texts[key] = completion, text
                self.parts.scorer.submit(
                    key, text, prompt.answer, prompt.row, prompt=prompt.text, step=step,
                    truncated=completion.finish_reason == "length",
                )  # fmt: skip
            if is_last:
                self._sleep()
        with self._stage("reward"):
            verdicts = self.parts.scorer.results()
            mine = {k: Graded(each, texts[k], verdicts[k]) for k, each in completions.items()}
            graded = gather_graded(comm, mine)
            if not comm.is_main:
                return []
            return assemble_rollouts(
                prompts,
                {key: each.completion for key, each in graded.items()},
                {key: each.text for key, each in graded.items()},
                {key: each.verdict for key, each in graded.items()},
                step, self.recipe, self.state.next_rollout_id, self.state.next_group_id,
            )  # fmt: skip

    def _sleep(self) -> None:
        # A step that ends with a push brings the sampler its weights, also if nothing trained.
        self.parts.sampler.sleep(keep_weights=not self._push_is_due())

    def freeze_behavior(
        self, generated: Sequence[Rollout], step: int
    ) -> tuple[list[Rollout], LogprobGap | None]:
        """Compute the behaviour log-probs at birth, under the policy that sampled, and check that
        sampler and trainer hold the same policy (unless the sampler lags on purpose). Returns the
        survivors and the gap on rank 0."""
        frozen_by_trainer = self.recipe.loss.behavior_logprobs == "trainer"
        with self._stage("logprob"):
            sample = gap_sample(generated, every_survivor=frozen_by_trainer)
            rows = [logprob_row(r.prompt_token_ids, r.completion_token_ids) for r in sample]
            logprobs = self.parts.engine.logprobs(rows if self.comm.is_main else None)
        if not self.comm.is_main:
            return [], None
        gap = measure_gap(sample, logprobs)
        version = self.parts.sampler.policy_version
        if version == self.state.policy_version:
            refuse_gap(gap, self.recipe.logprob_gap_limit, step, version)
        if frozen_by_trainer:
            frozen = {r.rollout_id: lp for r, lp in zip(sample, logprobs, strict=True)}
        else:
            frozen = {r.rollout_id: r.sampler_logprobs for r in generated}
        return with_behavior_logprobs(generated, frozen), gap

    def update(
        self, batch: ComposedBatch, step: int
    ) -> tuple[list[UpdateResult], list[RolloutOutcome]]:
        """Make the optimizer updates of the step. Returns them, and the outcome of every rollout
        of the batch."""
        rng = stream(self.recipe.run.seed, step, SPLIT_STREAM)
        parts = mini_batch_indices(len(batch.rollouts), self.recipe.batch, rng)
        results: list[UpdateResult] = []
        outcomes: list[RolloutOutcome | None] = [None] * len(batch.rollouts)
        with self._stage("training"):
            count = self.comm.broadcast_json(len(parts))
            for index in self.comm.position.each("update", range(count), count):
                members = parts[index] if self.comm.is_main else np.zeros(0, dtype=np.int64)
                result = self._update_once([batch.rollouts[i] for i in members])
                if result is None:
                    continue
                results.append(result)
                for i, outcome in zip(members, result.outcomes, strict=True):
                    outcomes[i] = outcome
        return results, [outcome for outcome in outcomes if outcome is not None]

    def _update_once(self, rollouts: Sequence[Rollout]) -> UpdateResult | None:
        engine, is_main = self.parts.engine, self.comm.is_main
        reference = None
        if self.recipe.loss.beta > 0:
            plain = [logprob_row(r.prompt_token_ids, r.completion_token_ids) for r in rollouts]
            reference = engine.reference_logprobs(plain if is_main else None)
        longest = self.recipe.sampling.max_completion_length
        rows = train_rows(rollouts, reference, self.recipe.loss, longest)
        return engine.update(rows if is_main else None)

    def _warn_if_capacity_binds(self, step: int) -> None:
        """Say once that the capacity evicts before the age limit does. Without an age limit the
        capacity is meant to bind."""
        settings = self.recipe.replay
        if settings.max_age_steps is None or self.state.capacity_warned:
            return
        if self.buffer.stats(step).evicted_by_capacity:
            self.state.capacity_warned = True
            self.notices.append(
                f"step {step}: replay.capacity_rollouts {settings.capacity_rollouts} binds: "
                f"rollouts leave before they are {settings.max_age_steps} steps old; raise it, or "
                "lower replay.max_age_steps"
            )

    def sync_weights(self) -> None:
        """Push the new policy, which is the next version, to the sampler; or only every
        `run.sync_every_steps`-th version."""
        version = self.state.policy_version + 1
        if self._push_is_due():
            parts, bucket_mib = self.parts, self.recipe.sampling.sync_bucket_mib
            with self._stage("sync"):
                sync_weights(parts.engine, parts.sampler, version, bucket_mib, parts.pushed)
        self.state.policy_version = version

    def _push_is_due(self) -> bool:
        return (self.state.policy_version + 1) % self.recipe.run.sync_every_steps == 0
