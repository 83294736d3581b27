"""The replay buffer as a library: everything that another trainer calls.

`ReplayBuffer` extends the store of entries (`entry_store`): it runs a training step in one call
(`compose`), makes groups and counts their ids (`group`), and saves itself to a file (`snapshot`).
Its `step` draws with the buffer's seed; a run of this package calls `buffer_step` with a generator
instead (`training/trainer.py`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.errors import RecipeError, SnapshotError
from grpo_replay.recipe import BatchSection, ReplayConfig, ReplaySection
from grpo_replay.replay.batch import update_indices
from grpo_replay.replay.compose import buffer_step
from grpo_replay.replay.entry_store import EntryStore, checked_settings
from grpo_replay.replay.group import rollouts_of_group
from grpo_replay.replay.insertion import check_insertable, entries_of
from grpo_replay.storage.stored_recipe import differences
from grpo_replay.types import (
    DRAW_STREAM,
    SPLIT_STREAM,
    ComposedBatch,
    Entry,
    Rollout,
    stream,
)

_STANDALONE_STATE = ("seed", "next_rollout_id", "next_group_id")
"""State that `save` adds to a snapshot; a run of this package has it in its checkpoint."""


class ReplayBuffer(EntryStore):
    """Stored rollouts that can be drawn again.

    Life cycle in any trainer: each step, make the fresh rollouts (`new_group`, or `Rollout` with
    ids of your own), call `step` once, train on the batch that it returns with the log-probs frozen
    in it, and call `save` with your checkpoint. `load` continues as if never interrupted, bit for
    bit. If a batch is already planned when a checkpoint is written, save the buffer before that
    step: `before = copy.copy(buffer)`, then `buffer.step(…)`, and `before.save(path)`.

    >>> from grpo_replay import ReplayBuffer, ReplayConfig
    >>> config = ReplayConfig.of("ours", warmup_steps=0, max_age_steps=2)
    >>> buffer = ReplayBuffer(config, group_size=2, seed=0)
    >>> for step in range(1, 5):
    ...     fresh = buffer.new_group(
    ...         prompt_id="1 + 1",
    ...         prompt_token_ids=[1, 5, 1],
    ...         completion_token_ids=[[2], [3, 3]],
    ...         behavior_logprobs=[[-0.5], [-1.0, -0.2]],
    ...         rewards=[1.0, -1.0],
    ...     )
    ...     batch = buffer.step(fresh)  # both fresh rollouts, and round(0.5 · 2) replayed
    ...     print(len(batch.rollouts), batch.ages.max(), len(buffer))
    2 0 2
    3 1 4
    3 2 4
    3 1 4

    A trainer that keeps its own tensors passes entries to `step`: `Entry(rollout_id, group_id,
    birth_step, columns, payload)`, with a handle as payload. At the start of a step, `on_evict` is
    called with the entries that left the buffer since the start of the step before: until then the
    batch may need them.
    """

    def __init__(
        self,
        settings: ReplaySection,
        group_size: int,
        seed: int = 0,
        on_evict: Callable[[tuple[Entry, ...]], None] | None = None,
    ) -> None:
        """Creates an empty buffer before its first step. `seed` decides the draws of `step`."""
        super().__init__(settings, group_size, on_evict)
        self.seed = seed
        self.last_step = 0  # the last step made, 0 before the first
        self.next_rollout_id = 0
        self.next_group_id = 0

    @property
    def next_step(self) -> int:
        """The step that `step` makes next, counted from 1: the birth step of its fresh rollouts."""
        return self.last_step + 1

    def new_group(self, *, birth_step: int | None = None, **group: Any) -> list[Rollout]:
        """Make the rollouts of one group for the next `step`: `rollouts_of_group` with the next
        ids. `replay.drop_zero_variance` decides whether a group of equal rewards is empty.

        `birth_step` is the step whose policy sampled them, from which ages count: by default the
        next one, or an earlier one if sampling runs ahead of training. Raises ValueError for a step
        before the first or after the next, and for more completions than `group_size`.
        """
        birth_step = self.next_step if birth_step is None else birth_step
        if not 1 <= birth_step <= self.next_step:
            raise ValueError(
                f"birth_step {birth_step}: the step whose policy sampled the group is at least 1 "
                f"and at most {self.next_step}, the next step of the buffer; leave it out for that"
            )
        if (size := len(group["rewards"])) > self.group_size:
            raise ValueError(
                f"prompt {group.get('prompt_id')}: {size} completions, more than group_size "
                f"{self.group_size}: give each sampling of a prompt a group of its own, or make "
                "the buffer with the number of completions that a prompt has"
            )
        rollouts = rollouts_of_group(
            first_rollout_id=self.next_rollout_id,
            group_id=self.next_group_id,
            birth_step=birth_step,
            keep_zero_variance=not self.settings.drop_zero_variance,
            **group,
        )
        self.next_rollout_id += size
        self.next_group_id += 1
        return rollouts

    def step(self, fresh: Sequence[Entry | Rollout], generated: int | None = None) -> ComposedBatch:
        """Run one training step: evict, insert, draw and compose in the order of the composition.
        Returns the batch to train on: `entries` (`rollouts` are their payloads), their `ages`, and
        which of them are `replayed`.

        `fresh` are the survivors of the step, rollouts or entries, ordered by group. `generated` is
        the number of rollouts before groups were dropped (None: no group was): `buffer_only` draws
        in proportion to it, and needs it where groups are dropped. The draw uses the random stream
        of `seed` and the step, as a run of this package does. Raises, and changes nothing:
        ValueError for entries that `insert` refuses, for more rollouts than the capacity, and for a
        group larger than `group_size`; RecipeError if a priority cannot be computed.
        """
        step, entries = self.next_step, entries_of(fresh)
        needs_generated = self.settings.stores_first and self.settings.drop_zero_variance
        if generated is None and needs_generated:
            raise ValueError(
                f"step {step}: replay.composition {self.settings.composition} draws in proportion "
                "to the rollouts before groups of equal rewards were dropped: pass generated=…"
            )
        generated = len(entries) if generated is None else generated
        if generated < len(entries):
            raise ValueError(f"step {step}: generated {generated}, but {len(entries)} are fresh")
        if entries:
            self._check_fresh(entries, step, generated)
        rng = stream(self.seed, step, DRAW_STREAM)
        batch = buffer_step(self, entries, step, generated, rng)
        if not self.settings.replays and self.on_evict is not None:
            self._unreported.extend(entries)  # the batch needs them until the next step
        self.last_step = step
        self.count_ids(entries)
        return batch

    def split(self, batch: ComposedBatch, updates: int) -> list[np.ndarray]:
        """Split the rows of the last step's `batch` at random between `updates` optimizer updates,
        as a run of this package does: fresh and replayed rows are mixed. Returns the ascending row
        indices of each update, int64, the same for the same seed and step. Sizes differ by at most
        one. No update is empty: fewer rows than updates make fewer, and an empty batch none."""
        rng = stream(self.seed, self.last_step, SPLIT_STREAM)
        return update_indices(batch, BatchSection(updates_per_step=updates), rng)

    def save(self, path: str | Path) -> None:
        """Write what `load` needs to continue after the last `step`: a snapshot (`replay.snapshot`)
        with the seed and the next ids. Payloads are saved if they are whole rollouts."""
        from grpo_replay.replay.snapshot import write_snapshot  # loads pyarrow

        standalone = {name: getattr(self, name) for name in _STANDALONE_STATE}
        write_snapshot(Path(path), self, self.last_step, standalone)

    @staticmethod
    def load(
        path: str | Path,
        settings: ReplaySection | None = None,
        payload_of: Callable[[int], Any] | None = None,
        on_evict: Callable[[tuple[Entry, ...]], None] | None = None,
    ) -> "ReplayBuffer":
        """Load the buffer that `save` wrote. Its next steps are those of a buffer that was never
        interrupted, with the replay settings saved in the file. `settings` are those that the
        caller expects, and `payload_of` returns the payload of a rollout id. From a checkpoint's
        buffer.parquet, the seed is 0 and the next ids follow the stored ones.

        Raises SnapshotError if the file cannot be read, if `settings` differ from the saved ones
        (the message names the keys), or if payloads are not rollouts and there is no `payload_of`.
        """
        from grpo_replay.replay.snapshot import load_state, read_snapshot  # loads pyarrow

        path = Path(path)
        snapshot = read_snapshot(path, payload_of)
        try:
            saved_settings = ReplayConfig.model_validate(snapshot.settings)
        except RecipeError as error:
            raise SnapshotError(f"{path}: its replay settings are not valid: {error}") from error
        if settings is not None:
            _refuse_other_settings(path, saved_settings, checked_settings(settings))
        buffer = ReplayBuffer(saved_settings, snapshot.group_size, on_evict=on_evict)
        load_state(path, snapshot, buffer)
        buffer.last_step = snapshot.step
        buffer.count_ids(buffer.entries())
        for name in _STANDALONE_STATE:
            setattr(buffer, name, snapshot.library.get(name, getattr(buffer, name)))
        return buffer

    def count_ids(self, entries: Sequence[Entry]) -> None:
        """Move the next ids past those of `entries`."""
        for entry in entries:
            self.next_rollout_id = max(self.next_rollout_id, entry.rollout_id + 1)
            self.next_group_id = max(self.next_group_id, entry.group_id + 1)

    def _check_fresh(self, fresh: Sequence[Entry], step: int, generated: int) -> None:
        """Raises, before `step` changes anything, for a group above `group_size` and, if the buffer
        replays, for entries that cannot be stored or a step larger than the capacity."""
        group_id, size = Counter(entry.group_id for entry in fresh).most_common(1)[0]
        if size > self.group_size:
            raise ValueError(
                f"step {step}: group {group_id} has {size} rollouts, more than group_size "
                f"{self.group_size}, the completions of one prompt"
            )
        if not self.settings.replays:
            return
        check_insertable(fresh, step, self._columns, self.settings.unit)
        self._new_priorities(fresh)
        if max(generated, len(fresh)) > self.settings.capacity_rollouts:
            raise ValueError(
                f"step {step}: replay.capacity_rollouts {self.settings.capacity_rollouts} is less "
                f"than the rollouts of one step, {max(generated, len(fresh))}: it counts rollouts, "
                "neither groups nor batches; raise it"
            )


def _refuse_other_settings(
    path: Path, saved_settings: ReplaySection, expected: ReplaySection
) -> None:
    """Raise SnapshotError if the expected settings differ in effect from the saved ones."""
    changed = [
        f"replay.{key} is {saved!r} in the file and {passed!r} in the settings given"
        for key, saved, passed in differences(saved_settings, expected)
        if key != "preset"  # its values are compared
    ]
    if changed:
        raise SnapshotError(
            f"{path}: {'; '.join(changed)}: a run keeps the replay settings that it began with. "
            f"Continue with {saved_settings!r}, or begin a new run with an empty buffer"
        )
