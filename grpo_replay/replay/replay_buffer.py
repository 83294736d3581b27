"""The replay buffer: rollouts in insertion order, bounded by age and capacity (paper A, section 4;
positive-bias variant: paper B).

The buffer stores the values frozen at a rollout's birth, its priority and its uses. A use is a
draw: `times_used` is the number of the rollout's rows in draws/, and does not count training as a
fresh rollout in its birth step. The text of the completion is not stored; rollouts/ has it. Ages
are in training steps. `step` is all that another trainer calls, and draws from the buffer's seed. A
caller of `draw` passes its own random generator.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.compose import buffer_step
from grpo_replay.replay.insertion import check_insertable, frozen, is_correct
from grpo_replay.replay.priorities import (
    Candidates,
    check_groups_adjacent,
    pick,
    query_spans,
    rollout_priorities,
)
from grpo_replay.types import ComposedBatch, Draw, Rollout, stream

NEVER_USED = -1
"""`last_used_step` of a rollout that was never drawn. Null in files."""

DRAW_STREAM = 1
"""Purpose of the random stream of a step's draw, as in a run of this package."""

_DTYPES: Mapping[str, Any] = {
    "rollout_id": np.int64,
    "group_id": np.int64,
    "birth_step": np.int64,
    "priority": np.float64,
    "correct": np.bool_,
    "times_used": np.int32,
    "last_used_step": np.int64,
    "rollout": np.object_,
}


@dataclass(frozen=True, slots=True)
class BufferStats:
    """Statistics of the buffer at one step. Means and maxima are None if the buffer is empty."""

    rollouts: int
    age_mean: float | None
    age_max: int | None
    priority_mean: float | None  # of p, before the exponent
    times_used_mean: float | None
    evicted: int  # in this step, by age and by capacity
    evicted_undrawn: int  # of those, the rollouts that were never drawn
    evicted_by_capacity: int  # since the start of the run, those left out by positive bias too


class ReplayBuffer:
    """Stored rollouts that can be drawn again.

    Life cycle in any trainer: each step, make the fresh rollouts (`new_group`, or `Rollout` with
    ids of your own), call `step` once, train on what it returns with the log-probs frozen in it,
    and call `save` with your checkpoint. `load` continues as if never interrupted, bit for bit.

    >>> from grpo_replay import ReplayBuffer, ReplayConfig
    >>> config = ReplayConfig.preset("ours", warmup_steps=0, max_age_steps=2)
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

    A trainer that keeps tensors itself stores `Rollout.index_only(…, payload=handle)`. `on_evict`
    then tells it which rollouts left the buffer. It is called by `evict`, at the start of a step,
    with all that left since the start of the step before: until then the batch may need them.

    If `replay.unit` is query, a query (the rollouts of one group) is inserted, evicted and drawn as
    a whole: its rollouts must be inserted together and adjacent, and capacity evicts whole groups,
    oldest first. If it is rollout, capacity may evict part of a group; the rest can still be drawn.
    """

    def __init__(
        self,
        settings: ReplaySection,
        group_size: int,
        seed: int = 0,
        on_evict: Callable[[tuple[Rollout, ...]], None] | None = None,
    ) -> None:
        self.settings = checked_settings(settings)
        self.group_size = group_size
        self.seed = seed
        self.on_evict = on_evict
        self.last_step = 0  # the last of `step`
        self.next_rollout_id = 0
        self.next_group_id = 0
        self._gone: list[Rollout] = []  # left, and not yet told to `on_evict`
        self._columns = {name: np.empty(0, dtype) for name, dtype in _DTYPES.items()}
        self._evicted_by_age = 0
        self._evicted_by_capacity = 0
        self._evicted_at = (0, 0)  # step, number of rollouts evicted in it
        self._evicted_undrawn = 0  # of those

    def __len__(self) -> int:
        """Number of stored rollouts."""
        return len(self._columns["rollout"])

    def column(self, name: str) -> np.ndarray:
        """A read-only view of one column, oldest first: rollout_id, group_id, birth_step,
        priority, correct, times_used, last_used_step. Valid until the buffer changes."""
        view = self._columns[name].view()
        view.flags.writeable = False
        return view

    def rollouts(self) -> tuple[Rollout, ...]:
        """The stored rollouts, oldest first."""
        return tuple(self._columns["rollout"])

    @property
    def next_step(self) -> int:
        """The step that `step` makes next, from 1 on: the birth step of its fresh rollouts."""
        return self.last_step + 1

    def new_group(self, **group: Any) -> list[Rollout]:
        """The rollouts of one group for the next `step`: `rollouts_of_group` with the next ids and
        step. If all rewards are equal, it is empty or kept, as `replay.drop_zero_variance` says."""
        from grpo_replay.replay.group import rollouts_of_group

        rollouts = rollouts_of_group(
            first_rollout_id=self.next_rollout_id,
            group_id=self.next_group_id,
            step=self.next_step,
            keep_zero_variance=not self.settings.drop_zero_variance,
            **group,
        )
        self.next_rollout_id += len(group["rewards"])
        self.next_group_id += 1
        return rollouts

    def step(self, fresh: Sequence[Rollout], generated: int | None = None) -> ComposedBatch:
        """One training step: evict, insert, draw and compose in the order of the composition.
        Returns what to train on: `rollouts`, their `ages` and which are `replayed`.

        `fresh` are the survivors of the step, ordered by group; `generated` the rollouts generated
        for it, dropped ones included (all were kept if None): `buffer_only` draws in proportion to
        it. The draw uses the random stream of `seed` and the step, as a run of this package does.
        Raises ValueError, and changes nothing, for what `insert` refuses, for more rollouts than
        the capacity, and for a group larger than `group_size`.
        """
        step = self.next_step
        generated = len(fresh) if generated is None else generated
        if fresh:
            self._check_fresh(fresh, step, generated)
        rng = stream(self.seed, step, DRAW_STREAM)
        batch = buffer_step(self, fresh, step, generated, rng)
        if not self.settings.replays and self.on_evict is not None:
            self._gone.extend(fresh)  # the batch needs them until the next step
        self.last_step = step
        self.count_ids(fresh)
        return batch

    def save(self, path: str | Path) -> None:
        """Write everything that `load` needs to continue after the last `step`: a snapshot
        (`replay.snapshot`) with the seed and the next ids. Payloads are not saved."""
        from grpo_replay.replay.snapshot import save_buffer  # loads pyarrow

        save_buffer(Path(path), self)

    @staticmethod
    def load(
        path: str | Path,
        payload_of: Callable[[int], Any] | None = None,
        on_evict: Callable[[tuple[Rollout, ...]], None] | None = None,
    ) -> "ReplayBuffer":
        """The buffer that `save` wrote. Its next steps are those of a buffer that was never
        interrupted. `payload_of` gives the payload of a rollout id; without it a file whose
        rollouts had payloads is refused. From a checkpoint's buffer.parquet, seed is 0 and the
        next ids follow the stored ones. Raises SnapshotError.
        """
        from grpo_replay.replay.snapshot import load_buffer  # loads pyarrow

        return load_buffer(Path(path), payload_of, on_evict)

    def count_ids(self, rollouts: Sequence[Rollout]) -> None:
        """Move the next ids past those of `rollouts`."""
        for rollout in rollouts:
            self.next_rollout_id = max(self.next_rollout_id, rollout.rollout_id + 1)
            self.next_group_id = max(self.next_group_id, rollout.group_id + 1)

    def attach(self, payload_of: Callable[[int], Any]) -> None:
        """Give each stored rollout the payload of its id."""
        stored = self._columns["rollout"]
        for i, rollout in enumerate(stored):
            stored[i] = replace(rollout, payload=payload_of(rollout.rollout_id))

    def insert(
        self, rollouts: Sequence[Rollout], step: int, times_used_N: np.ndarray | None = None
    ) -> int:
        """Store rollouts born at or before `step`. Returns how many the capacity evicted.

        `times_used_N` counts draws in `step` before the insertion: the pool composition also draws
        fresh rollouts. The arrays of the rollouts become read-only. Raises ValueError for a dropped
        rollout, a missing advantage or behaviour log-prob, one that is not finite, a positive
        log-prob, a birth in the future, a second insertion, and, if `replay.unit` is query, a group
        that is not adjacent.
        """
        if not rollouts:
            return 0
        check_insertable(rollouts, step, self._columns, self.settings.unit)
        self._append(self._new_columns(rollouts, step, times_used_N))
        evicted = self._enforce_capacity(step)
        self._evicted_by_capacity += evicted
        return evicted

    def evict(self, step: int) -> int:
        """Remove rollouts with `step - birth_step > max_age_steps`. Returns their number."""
        evicted = self._evict_born_before(step, step)
        gone, self._gone = tuple(self._gone), []
        if gone and self.on_evict is not None:
            self.on_evict(gone)
        return evicted

    def evict_ahead(self, step: int) -> int:
        """At the end of `step`, remove rollouts that would be too old at `step + 1`. Returns their
        number. Between steps the buffer then holds rollouts of at most `max_age_steps` births."""
        return self._evict_born_before(step, step + 1)

    def candidates(self) -> Candidates:
        """The candidates of a draw from the buffer."""
        columns = self._columns
        return Candidates(columns["priority"], columns["group_id"], columns["times_used"] > 0)

    def draw(
        self, count: int, step: int, rng: np.random.Generator, fresh: Sequence[Rollout] = ()
    ) -> Draw:
        """Draw `count` units (rollouts or queries) from the buffer and `fresh` together.

        No rollout is removed. Uses of stored rollouts are recorded here, uses of fresh ones when
        they are inserted. The draw is empty if there are no candidates.
        """
        stored = len(self)
        if count <= 0 or stored + len(fresh) == 0:
            return Draw.empty()
        candidates = self.candidates()
        if fresh:
            candidates = candidates + self._candidates_of(fresh)
        picks = pick(candidates, count, self.settings, rng)
        self._record_use(picks.indices[picks.indices < stored], step)
        payload = self._columns["rollout"]
        drawn = tuple(payload[i] if i < stored else fresh[i - stored] for i in picks.indices)
        return Draw(
            rollouts=drawn,
            probabilities=picks.probabilities,
            ages=np.array([step - rollout.birth_step for rollout in drawn], dtype=np.int64),
            effective_sample_size=picks.effective_sample_size,
            entropy=picks.entropy,
        )

    def stats(self, step: int) -> BufferStats:
        """Statistics at `step`, with the evictions of `step` so far."""
        now = self._evicted_at[0] == step
        evictions = (
            self._evicted_at[1] * now, self._evicted_undrawn * now, self._evicted_by_capacity
        )  # fmt: skip
        if len(self) == 0:
            return BufferStats(0, None, None, None, None, *evictions)
        ages_N = step - self._columns["birth_step"]
        return BufferStats(
            len(self),
            float(ages_N.mean()),
            int(ages_N.max()),
            float(self._columns["priority"].mean()),
            float(self._columns["times_used"].mean()),
            *evictions,
        )

    def get_state(self) -> dict[str, Any]:
        """The complete state: rollouts, copies of the columns, and counters."""
        return {
            "rollouts": self.rollouts(),
            "priority": self._columns["priority"].copy(),
            "times_used": self._columns["times_used"].copy(),
            "last_used_step": self._columns["last_used_step"].copy(),
            "priority_kind": self.settings.priority,
            "evicted_by_age": self._evicted_by_age,
            "evicted_by_capacity": self._evicted_by_capacity,
            "evicted_at": self._evicted_at,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Replace the contents by a state from `get_state`.

        Priorities are recomputed from the rollouts under this buffer's settings, so that a run can
        be resumed with another `replay.priority`. Under the same settings they must equal the saved
        ones bit for bit. A smaller capacity evicts at once. Raises ValueError for an inconsistent
        state; the buffer is then unchanged.
        """
        restored = ReplayBuffer(self.settings, self.group_size)
        rollouts = state["rollouts"]
        if rollouts:
            newest = max(rollout.birth_step for rollout in rollouts)
            check_insertable(rollouts, newest, restored._columns, self.settings.unit)
            columns = restored._new_columns(rollouts, newest, state["times_used"])
            columns["last_used_step"] = np.asarray(state["last_used_step"], dtype=np.int64)
            _check_uses(columns)
            restored._append(columns)
        restored._check_saved_priorities(state)
        self._columns = restored._columns
        self._evicted_by_age = state["evicted_by_age"]
        self._evicted_by_capacity = state["evicted_by_capacity"] + self._enforce_capacity(0)
        self._evicted_at, self._evicted_undrawn = tuple(state["evicted_at"]), 0

    def _check_fresh(self, fresh: Sequence[Rollout], step: int, generated: int) -> None:
        group_id, size = Counter(rollout.group_id for rollout in fresh).most_common(1)[0]
        if size > self.group_size:
            raise ValueError(
                f"step {step}: group {group_id} has {size} rollouts, more than group_size "
                f"{self.group_size}, the completions of one prompt"
            )
        if not self.settings.replays:
            return
        check_insertable(fresh, step, self._columns, self.settings.unit)
        if max(generated, len(fresh)) > self.settings.capacity_rollouts:
            raise ValueError(
                f"step {step}: replay.capacity_rollouts {self.settings.capacity_rollouts} is less "
                f"than the rollouts of one step, {max(generated, len(fresh))}: it counts rollouts, "
                "neither groups nor batches; raise it"
            )

    def _append(self, new: Mapping[str, np.ndarray]) -> None:
        self._columns = {
            name: np.concatenate([column, new[name]]) for name, column in self._columns.items()
        }

    def _remove(self, removed_N: np.ndarray, step: int) -> int:
        """Evict rollouts in `step`. Returns their number."""
        if self.on_evict is not None:
            self._gone.extend(self._columns["rollout"][removed_N])
        undrawn = int((self._columns["times_used"][removed_N] == 0).sum())
        evicted = int(np.count_nonzero(removed_N))
        if evicted:
            kept_N = ~removed_N
            self._columns = {name: column[kept_N] for name, column in self._columns.items()}
        same_step = self._evicted_at[0] == step
        self._evicted_at = (step, evicted + self._evicted_at[1] * same_step)
        self._evicted_undrawn = undrawn + self._evicted_undrawn * same_step
        return evicted

    def _new_columns(
        self, rollouts: Sequence[Rollout], step: int, times_used_N: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        count = len(rollouts)
        times_used = np.zeros(count, dtype=np.int32)
        if times_used_N is not None:
            times_used[:] = times_used_N
        payload = np.empty(count, dtype=np.object_)
        payload[:] = [frozen(rollout) for rollout in rollouts]
        return {
            "rollout_id": np.array([rollout.rollout_id for rollout in rollouts]),
            "group_id": np.array([rollout.group_id for rollout in rollouts]),
            "birth_step": np.array([rollout.birth_step for rollout in rollouts]),
            "priority": self._priorities_of(rollouts),
            "correct": np.array([is_correct(rollout) for rollout in rollouts]),
            "times_used": times_used,
            "last_used_step": np.where(times_used > 0, step, NEVER_USED),
            "rollout": payload,
        }

    def _candidates_of(self, rollouts: Sequence[Rollout]) -> Candidates:
        group_id_N = np.array([rollout.group_id for rollout in rollouts], dtype=np.int64)
        if self.settings.unit == "query":
            check_groups_adjacent(group_id_N)
        never_drawn = np.zeros(len(rollouts), dtype=np.bool_)
        return Candidates(self._priorities_of(rollouts), group_id_N, never_drawn)

    def _priorities_of(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        return rollout_priorities(self.settings.priority, rollouts)

    def _check_saved_priorities(self, state: Mapping[str, Any]) -> None:
        same_law = state["priority_kind"] == self.settings.priority
        if same_law and not np.array_equal(state["priority"], self._columns["priority"]):
            raise ValueError("the saved priorities are not those that replay.priority gives now")

    def _evict_born_before(self, step: int, now: int) -> int:
        if self.settings.max_age_steps is None:
            return 0
        evicted = self._remove(
            now - self._columns["birth_step"] > self.settings.max_age_steps, step
        )
        self._evicted_by_age += evicted
        return evicted

    def _enforce_capacity(self, step: int) -> int:
        if self.settings.positive_fraction > 0:
            return self._remove(~self._positive_bias_keeps(), step)
        excess = len(self) - self.settings.capacity_rollouts
        if excess <= 0:
            return 0
        if self.settings.unit == "query":
            starts_Q, _ = query_spans(self._columns["group_id"])
            excess = int(np.append(starts_Q, len(self))[np.searchsorted(starts_Q, excess)])
        return self._remove(np.arange(len(self)) < excess, step)

    def _positive_bias_keeps(self) -> np.ndarray:
        """The newest (1-δ)N rollouts, and the newest δN correct ones among the older; bool [N]."""
        capacity = self.settings.capacity_rollouts
        reserved = round(self.settings.positive_fraction * capacity)
        outside = max(len(self) - (capacity - reserved), 0)
        keeps_N = np.ones(len(self), dtype=np.bool_)
        keeps_N[:outside] = False
        correct = np.flatnonzero(self._columns["correct"][:outside])
        keeps_N[correct[max(correct.size - reserved, 0) :]] = True
        return keeps_N

    def _record_use(self, indices: np.ndarray, step: int) -> None:
        np.add.at(self._columns["times_used"], indices, 1)
        self._columns["last_used_step"][indices] = step


def checked_settings(settings: Any) -> ReplaySection:
    """The settings. Raises TypeError for anything else, such as a mapping."""
    if not isinstance(settings, ReplaySection):
        raise TypeError(
            f"the settings of replay are a {type(settings).__name__}: give a ReplayConfig, such as "
            'ReplayConfig.preset("ours", max_age_steps=10)'
        )
    return settings


def _check_uses(columns: Mapping[str, np.ndarray]) -> None:
    last_used, used = columns["last_used_step"], columns["times_used"] > 0
    if not np.array_equal(used, last_used != NEVER_USED):
        raise ValueError("times_used and last_used_step disagree")
    if (last_used < columns["birth_step"])[used].any():
        raise ValueError("a rollout was used before its birth")
