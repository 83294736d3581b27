"""Replay in TRL's AsyncGRPOTrainer, of TRL 1.16.0: an example to copy.

    trainer = ReplayAsyncGRPOTrainer(model, reward, args, rows, replay=ReplayConfig.of("ours", …))

TRL samples in a process of its own; a queue brings scored rollouts to the trainer, a planner cuts
them into micro-batches, and a DataLoader brings these to the ranks. Replay goes between the last
two: behind that place nothing of TRL asks how stale a rollout is (it would drop replayed ones) or
counts groups (for the end of an epoch, and to resume). A step of the buffer is an optimizer step. A
rollout is born in the step whose policy sampled it: docs/integrations.md says what follows.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import FixedCountBatcher

from grpo_replay import ReplayBuffer, ReplayConfig
from grpo_replay.errors import UsageError
from grpo_replay.integrations.host_rows import hash_of
from grpo_replay.integrations.interception import intercepted
from grpo_replay.replay.batch import even_sizes
from grpo_replay.types import Rollout

SNAPSHOT, VERSION = "buffer.parquet", "model_version"
Row = dict[str, Any]  # a rollout as TRL's planner has it


class QueueWithVersions:
    """TRL's queue. The planner is not told which policy sampled a rollout: its metrics are."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self._queue.get(*args, **kwargs)
        return replace(sample, metrics=sample.metrics | {VERSION: sample.model_version})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class ReplayPlanner(IterableDataset):
    """TRL's planner; the micro-batches of an optimizer step are made anew of what the buffer
    returns. They grow by the ratio, so TRL's `token_budget` bounds fresh rows alone."""

    def __init__(self, planner: Any, trainer: "ReplayAsyncGRPOTrainer") -> None:
        self._planner, self._trainer = planner, trainer

    def __iter__(self) -> Iterator[Any]:
        planned, args = iter(self._planner), self._trainer.args
        micro_batches = args.gradient_accumulation_steps
        processes = self._trainer.accelerator.num_processes
        while True:
            of_step = [next(planned) for _ in range(micro_batches)]
            fresh = [sample for rows in of_step for row in rows for sample in row.samples]
            # Rows of a prompt stay side by side; a hash mixes fresh and replayed ones.
            composed = sorted(self._trainer.compose(fresh), key=lambda row: row["group_id"])
            missing = max(0, micro_batches * processes - len(composed))
            composed += [_without_signal(fresh[0])] * missing
            for size in even_sizes(len(composed), micro_batches):
                part, composed = composed[:size], composed[size:]
                yield from FixedCountBatcher(part, processes, size)  # balances it over processes


class ReplayAsyncGRPOTrainer(AsyncGRPOTrainer):
    def __init__(self, *args: Any, replay: ReplayConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stalest = self.args.max_staleness * self.args.weight_sync_steps
        if replay.replays and replay.max_age_steps is not None and replay.max_age_steps <= stalest:
            raise UsageError(
                f"replay.max_age_steps {replay.max_age_steps}: rollouts are up to {stalest} steps "
                "old when they are trained on first (max_staleness · weight_sync_steps): set "
                "max_age_steps higher, or max_staleness lower"
            )
        self.replay = replay
        self.replay_buffer = ReplayBuffer(replay, self.args.num_generations, self.args.seed)
        self._arriving: dict[int, list[Row]] = defaultdict(list)  # of groups not whole yet
        self._before: dict[int, tuple[ReplayBuffer, set[int]]] = {}  # each step planned

    # Between planner and DataLoader, on the main process: the others get its micro-batches

    def get_train_dataloader(self) -> DataLoader:
        if not (self.replay.replays and self.accelerator.is_main_process):
            return super().get_train_dataloader()
        self.rollout_queue = QueueWithVersions(self.rollout_queue)
        with intercepted(self.accelerator, prepare=self._prepare_with_replay):
            return super().get_train_dataloader()

    def _prepare_with_replay(self, prepare: Any, loader: DataLoader) -> Any:
        # TRL's collator counts the groups that it sees; `_whole_groups` counts fresh ones.
        collate = replace(loader.collate_fn, groups_trained=set())
        planner = ReplayPlanner(loader.dataset, self)
        return prepare(DataLoader(planner, batch_size=1, collate_fn=collate, num_workers=0))

    def compose(self, fresh: Sequence[Row]) -> list[Row]:
        """What the next optimizer step trains on, from the rows that TRL planned for it."""
        buffer, log = self.replay_buffer, self._metrics["train"]
        step, every = buffer.next_step, self.args.weight_sync_steps
        self._before[step] = copy(buffer), set(self._trained_groups)
        self._before.pop(step - 2, None)
        # The policy of that step (TRL plans ahead, and syncs in between), and its first step.
        policy = self.model_version + (step - 1) // every - self.state.global_step // every
        first = step - (step - 1) % every
        rollouts, groups = [], self._whole_groups(fresh)
        for rows in groups:
            stalest = min(row["metrics"][VERSION] for row in rows)
            rollouts += self._new_group(rows, max(1, first - (policy - stalest) * every))
        batch = buffer.step(rollouts, generated=len(groups) * buffer.group_size)
        ages = batch.ages[batch.replayed]
        for row in fresh:  # TRL's metrics are of all that was generated
            for name, value in row["metrics"].items():
                log[name].append(value)
        log["fresh/rollouts"].append(float(len(rollouts)))
        log["replay/rollouts"].append(float(len(ages)))
        log["buffer/rollouts"].append(float(len(buffer)))
        if len(ages):
            log["replay/age_mean"].append(float(ages.mean()))
        return [_row_of(rollout) for rollout in batch.rollouts]

    def _whole_groups(self, fresh: Sequence[Row]) -> list[list[Row]]:
        """The groups of which these are the last rows: TRL's micro-batches cut groups anywhere, and
        its limit of staleness may drop single rows, whose groups never become whole."""
        size = self.args.num_generations
        for row in fresh:
            self._arriving[row["group_id"]].append(row)
        largest = max(map(len, self._arriving.values()))
        if largest > size or not self._trained_groups.isdisjoint(self._arriving):
            raise UsageError(f"a group has more rows than num_generations {size}: it forked")
        whole = [number for number, rows in self._arriving.items() if len(rows) == size]
        self._trained_groups.update(whole)  # as TRL's collator counts them
        groups = [self._arriving.pop(number) for number in whole]
        for number, rows in [*self._arriving.items()]:
            if rows[0]["metrics"][VERSION] < self.model_version - self.args.max_staleness - 1:
                del self._arriving[number]
        return groups

    def _new_group(self, rows: Sequence[Row], birth_step: int) -> list[Rollout]:
        starts = [int(np.argmax(row["completion_mask"])) for row in rows]  # the first that trains
        both = [*zip(rows, starts, strict=True)]
        prompt, rewards = rows[0]["input_ids"][: starts[0]], [r["metrics"]["reward"] for r in rows]
        if any(row["input_ids"][:start].tolist() != prompt.tolist() for row, start in both):
            raise UsageError("a group has several prompts: replay needs conversations of one turn")
        return self.replay_buffer.new_group(
            birth_step=birth_step,
            prompt_id=hash_of(prompt),
            prompt_token_ids=prompt,
            completion_token_ids=[row["input_ids"][start:] for row, start in both],
            behavior_logprobs=[row["old_log_probs"][start:] for row, start in both],
            completion_mask=[row["completion_mask"][start:] for row, start in both],
            rewards=[None if np.isnan(reward) else reward for reward in rewards],
            advantages=[row["advantage"] for row in rows],
        )

    # Checkpoints: what was before the step that is planned ahead

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not (self.replay.replays and self.accelerator.is_main_process):
            return super()._save_checkpoint(model, trial)
        step, planned = self.state.global_step, self._trained_groups
        buffer, self._trained_groups = self._before.get(step + 1, (self.replay_buffer, planned))
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{step}")
        folder.mkdir(parents=True, exist_ok=True)
        buffer.save(folder / SNAPSHOT)
        super()._save_checkpoint(model, trial)
        self._trained_groups = planned

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and self.replay.replays and self.accelerator.is_main_process:
            self.replay_buffer = ReplayBuffer.load(Path(checkpoint) / SNAPSHOT, self.replay)


def _row_of(rollout: Rollout) -> Row:
    """A rollout as TRL's planner has it, beside others of its prompt."""
    prompt, tokens = rollout.prompt_token_ids, rollout.completion_token_ids
    before_P = np.zeros(len(prompt), np.float32)
    mask_T = np.ones(len(tokens)) if rollout.completion_mask is None else rollout.completion_mask
    return {
        "input_ids": np.concatenate([prompt, tokens]).astype(np.int64),
        "completion_mask": np.concatenate([before_P, mask_T]).astype(np.int64),
        "old_log_probs": np.concatenate([before_P, rollout.behavior_logprobs]),
        "advantage": rollout.advantage,
        "group_id": rollout.prompt_id,
        "metrics": {},
    }


def _without_signal(row: Row) -> Row:
    """A row that changes nothing, where there are fewer than micro-batches: TRL needs a token that
    trains in each."""
    mask = np.zeros_like(row["completion_mask"])
    mask[-1] = 1
    return row | {"advantage": 0.0, "completion_mask": mask, "metrics": {}, "group_id": ""}
