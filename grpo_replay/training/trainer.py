"""The training loop: paper A's Algorithm 1, one line per stage (see `Trainer.train_step`).

Departures from textbook GRPO: every rollout's behaviour log-probs are computed once, at birth;
what is trained on is composed of fresh and stored rollouts; nothing about a rollout is recomputed
when it is replayed.

Rank 0 owns the buffer, the draw and the files. The other ranks sample, score and train their
share: on them, lists that rank 0 owns are empty.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_replay.buffer import ReplayBuffer
from grpo_replay.buffer.compose import compose_batch, insert_after_update, insert_before_draw
from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.protocol import Engine, UpdateResult
from grpo_replay.grpo.batch import logprob_row, mini_batch_indices, train_rows
from grpo_replay.grpo.rollouts import (
    assemble_rollouts,
    gather_rollouts,
    group_requests,
    with_behavior_logprobs,
)
from grpo_replay.grpo.seeding import stream
from grpo_replay.prompts.prompt_set import PromptSet
from grpo_replay.recipe import Recipe
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.protocol import Sampler
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.storage.rollout_log import step_path, write_draws, write_rollouts
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training.metrics import (
    Stopwatch,
    batch_metrics,
    buffer_metrics,
    cost_metrics,
    generation_metrics,
    null_where_not_finite,
    sampler_metrics,
    update_metrics,
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

DRAW_STREAM, SPLIT_STREAM = 1, 2  # purposes of the per-step random streams


@dataclass(slots=True)
class Parts:
    """What a trainer is made of. All of it real: tests swap the sizes, not the parts."""

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
    """What a lagging sampler holds, on rank 0; None if every step pushes."""


class Trainer:
    """Runs training steps. `state` and the buffer are all it remembers between them."""

    def __init__(self, parts: Parts, state: RunState) -> None:
        self.parts = parts
        self.recipe = parts.recipe
        self.comm = parts.comm
        self.buffer = parts.buffer
        self.state = state
        self.notices: list[str] = []  # sentences for the user, to be taken by whoever drives
        self._clock = Stopwatch()

    def train_step(self) -> dict[str, Any]:
        """One step of Algorithm 1; returns its metrics on rank 0, nothing elsewhere."""
        self._clock = Stopwatch()
        step = self.state.step + 1
        self.comm.position.begin_step(step)
        generated = self.sample_and_score(step)
        fresh, gap = self.freeze_behavior(generated, step)
        batch = self.compose(fresh, len(generated), step)
        results, outcomes = self.update(batch, step)
        self.insert(fresh, batch, step)
        self.sync_weights()
        self._count(step, generated, batch)
        if not self.comm.is_main:
            return {}
        self._write_logs(step, generated, fresh, batch, outcomes)
        return self._metrics(step, generated, fresh, gap, batch, results, outcomes)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        with self._clock.stage(name), self.comm.position.stage(name):
            yield

    def sample_and_score(self, step: int) -> list[Rollout]:
        """Take prompts, sample G completions of each, score them as they finish, and compute
        group advantages. All rollouts of the step, on rank 0."""
        comm, settings = self.comm, self.recipe.sampling
        prompts = self.parts.prompts.take(self.state.prompt_cursor, settings.prompts_per_step)
        mine = {i: p for i, p in enumerate(prompts) if i % comm.world_size == comm.rank}
        completions, texts = {}, {}
        with self._stage("generation"):
            requests = group_requests(mine, step, self.recipe)
            finished = self.parts.sampler.generate(requests)
            for completion in comm.position.each("completion", finished, len(requests)):
                key = completion.key
                prompt = mine[key.prompt_index]
                text = self.parts.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
                completions[key], texts[key] = completion, text
                self.parts.scorer.submit(key, text, prompt.answer, prompt.row)
            # A step that ends with a push brings the sampler its weights, also if nothing trained.
            self.parts.sampler.sleep(keep_weights=not self._push_is_due())
        with self._stage("reward"):
            verdicts = self.parts.scorer.results()
            rollouts = assemble_rollouts(
                mine, completions, texts, verdicts, step, self.recipe,
                self.state.next_rollout_id, self.state.next_group_id,
            )  # fmt: skip
            return gather_rollouts(comm, rollouts)

    def freeze_behavior(
        self, generated: Sequence[Rollout], step: int
    ) -> tuple[list[Rollout], LogprobGap | None]:
        """Behaviour log-probs at birth, from the policy that sampled; and the proof that sampler
        and trainer are the same policy, unless the sampler lags on purpose. Returns the survivors,
        and the gap, on rank 0."""
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

    def compose(self, fresh: Sequence[Rollout], generated: int, step: int) -> ComposedBatch:
        """Evict what is too old, draw, and compose fresh and drawn (paper A, steps 2 to 4)."""
        self.buffer.evict(step)
        insert_before_draw(self.buffer, fresh, step)
        rng = stream(self.recipe.run.seed, step, DRAW_STREAM)
        return compose_batch(self.buffer, fresh, step, generated, rng)

    def update(
        self, batch: ComposedBatch, step: int
    ) -> tuple[list[UpdateResult], list[RolloutOutcome]]:
        """The optimizer updates of the step; per rollout of the batch, what its update saw."""
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

    def insert(self, fresh: Sequence[Rollout], batch: ComposedBatch, step: int) -> None:
        """Store the fresh survivors, evict what would be too old at the next step (step 5)."""
        insert_after_update(self.buffer, fresh, step, batch)
        settings = self.recipe.replay
        # Without an age limit the capacity is meant to bind.
        unexpected = (
            settings.max_age_steps is not None and self.buffer.stats(step).evicted_by_capacity
        )
        if unexpected and not self.state.capacity_warned:
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

    def _count(self, step: int, generated: Sequence[Rollout], batch: ComposedBatch) -> None:
        state, settings = self.state, self.recipe.sampling
        state.step = step
        state.prompt_cursor += settings.prompts_per_step
        state.next_rollout_id += self.recipe.rollouts_per_step
        state.next_group_id += settings.prompts_per_step
        state.generated_tokens += sum(len(r.completion_token_ids) for r in generated)
        state.trained_tokens += sum(len(r.completion_token_ids) for r in batch.rollouts)
        state.processed_tokens += sum(
            len(r.prompt_token_ids) + len(r.completion_token_ids) for r in generated
        )
        state.replayed_rollouts += int(batch.replayed_N.sum())

    def _write_logs(
        self,
        step: int,
        generated: Sequence[Rollout],
        fresh: Sequence[Rollout],
        batch: ComposedBatch,
        outcomes: Sequence[RolloutOutcome],
    ) -> None:
        if not self.recipe.tracking.log_rollouts:
            return
        survivors = {rollout.rollout_id: rollout for rollout in fresh}
        at_birth = {
            rollout.rollout_id: outcome
            for rollout, age, outcome in zip(batch.rollouts, batch.ages_N, outcomes, strict=True)
            if age == 0
        }
        folder = self.parts.run_dir.path
        write_rollouts(
            step_path(folder / "rollouts", step),
            [survivors.get(rollout.rollout_id, rollout) for rollout in generated],
            at_birth,
        )
        if self.recipe.replays:
            drawn = len(batch.draw.rollouts)
            outcomes_of_draw = outcomes[len(outcomes) - drawn :]
            write_draws(step_path(folder / "draws", step), step, batch.draw, outcomes_of_draw)

    def _metrics(
        self,
        step: int,
        generated: Sequence[Rollout],
        fresh: Sequence[Rollout],
        gap: LogprobGap,
        batch: ComposedBatch,
        results: Sequence[UpdateResult],
        outcomes: Sequence[RolloutOutcome],
    ) -> dict[str, Any]:
        return null_where_not_finite(
            {
                "step": step,
                **generation_metrics(generated, self.recipe.sampling.group_size),
                **update_metrics(results, self.recipe.loss.beta),
                **batch_metrics(batch, outcomes, len(fresh)),
                **buffer_metrics(self.buffer.stats(step)),
                **sampler_metrics(gap, generated[0].policy_version),
                **cost_metrics(self._clock.read(), generated, batch.rollouts),
                "num_tokens": self.state.processed_tokens,
                "learning_rate": self.recipe.optimizer.learning_rate,
            }
        )
