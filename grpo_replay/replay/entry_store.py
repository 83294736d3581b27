"""Stores the entries of the replay buffer in insertion order, bounded by age and capacity (paper A,
section 4; positive-bias variant: paper B).

The store holds the priority and the uses of every entry. A use is a draw: `times_used` is the
number of the rollout's rows in draws/, and does not count training as a fresh rollout in its birth
step. Ages are in training steps. A caller of `draw` passes its own random generator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.insertion import check_insertable, entries_of, is_correct, stored_form
from grpo_replay.replay.priorities import (
    Candidates,
    check_groups_adjacent,
    entry_column,
    entry_priorities,
    pick,
    query_spans,
)
from grpo_replay.types import Draw, Entry, Rollout

NEVER_USED = -1
"""`last_used_step` of an entry that was never drawn. Null in files."""

_DTYPES: Mapping[str, Any] = {
    "rollout_id": np.int64,
    "group_id": np.int64,
    "birth_step": np.int64,
    "priority": np.float64,
    "correct": np.bool_,
    "times_used": np.int32,
    "last_used_step": np.int64,
    "entry": np.object_,
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
    evicted_undrawn: int  # rollouts evicted in this step that were never drawn
    evicted_by_capacity: int  # since the start of the run, including those of positive bias


class EntryStore:
    """Stored entries that can be drawn again.

    If `replay.unit` is query, a query (the entries of one group) is inserted, evicted and drawn as
    a whole: its entries must be inserted together and adjacent, and capacity evicts whole groups,
    first stored, first out. If it is rollout, capacity may evict part of a group; the rest can
    still be drawn.
    """

    def __init__(
        self,
        settings: ReplaySection,
        group_size: int,
        on_evict: Callable[[tuple[Entry, ...]], None] | None = None,
    ) -> None:
        """Creates an empty store. `on_evict` gets evicted entries, at the next `evict`."""
        self.settings = checked_settings(settings)
        self.group_size = group_size
        self.on_evict = on_evict
        self._unreported: list[Entry] = []  # evicted, and not yet passed to `on_evict`
        self._columns = {name: np.empty(0, dtype) for name, dtype in _DTYPES.items()}
        self._evicted_by_capacity = 0
        self._evicted_at = (0, 0)  # step, number of entries evicted in it
        self._evicted_undrawn = 0  # entries evicted in that step that were never drawn

    def __len__(self) -> int:
        """Counts the stored entries."""
        return len(self._columns["entry"])

    def __copy__(self) -> Self:
        """Returns a copy that later changes of the original do not affect. Entries are shared."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied._columns = {name: column.copy() for name, column in self._columns.items()}
        copied._unreported = [*self._unreported]
        return copied

    def column(self, name: str) -> np.ndarray:
        """Returns a read-only view of one column, in the order of insertion: rollout_id, group_id,
        birth_step, priority, correct, times_used, last_used_step. Valid until the buffer changes.
        """
        view = self._columns[name].view()
        view.flags.writeable = False
        return view

    def entries(self) -> tuple[Entry, ...]:
        """Returns the stored entries, in the order of insertion."""
        return tuple(self._columns["entry"])

    def rollouts(self) -> tuple[Any, ...]:
        """Returns the payloads of the stored entries: rollouts, where whole rollouts are stored."""
        return tuple(entry.payload for entry in self._columns["entry"])

    def insert(
        self, items: Sequence[Entry | Rollout], step: int, times_used_N: np.ndarray | None = None
    ) -> int:
        """Store entries or rollouts, born at or before `step`; returns the number of evicted ones.

        `times_used_N` (int32 [N]) says how often an item was already drawn in `step`: only the pool
        composition draws fresh items before it stores them. The text of a rollout is not stored
        (rollouts/ has it), and its arrays become read-only. Raises ValueError for a dropped
        rollout, an advantage or behaviour log-prob that is missing or not finite, a log-prob above
        `LARGEST_LOGPROB`, a birth after `step`, an item that is already stored, and, if
        `replay.unit` is query, a group whose entries are not adjacent.
        """
        entries = entries_of(items)
        if not entries:
            return 0
        check_insertable(entries, step, self._columns, self.settings.unit)
        self._append(self._new_columns(entries, step, times_used_N))
        evicted = self._enforce_capacity(step)
        self._evicted_by_capacity += evicted
        return evicted

    def evict(self, step: int) -> int:
        """Remove entries with `step - birth_step > max_age_steps`, and call `on_evict` with all
        entries evicted since its last call. Returns the number removed now."""
        evicted = self._evict_born_before(step, step)
        unreported, self._unreported = tuple(self._unreported), []
        if unreported and self.on_evict is not None:
            self.on_evict(unreported)
        return evicted

    def evict_ahead(self, step: int) -> int:
        """Remove, at the end of `step`, entries that would be too old at `step + 1`. Returns their
        number. Between steps the buffer then holds entries of at most `max_age_steps` births."""
        return self._evict_born_before(step, step + 1)

    def drawable(self, step: int) -> np.ndarray:
        """Returns indices, int64, of entries that may be drawn in `step` (`replay.max_uses`,
        `replay.cooldown_steps`). Priority 0 is left out, unless all have it."""
        columns, settings = self._columns, self.settings
        drawable_N = np.ones(len(self), dtype=np.bool_)
        uses_priority = settings.unit == "rollout" and settings.priority_exponent > 0
        if uses_priority and columns["priority"].any():
            drawable_N &= columns["priority"] > 0
        if settings.max_uses is not None:
            drawable_N &= columns["times_used"] < settings.max_uses
        if settings.cooldown_steps > 0:
            unused_N = columns["times_used"] == 0
            drawable_N &= unused_N | (step - columns["last_used_step"] > settings.cooldown_steps)
        return np.flatnonzero(drawable_N)

    def _candidates(self, indices: np.ndarray | slice, step: int) -> Candidates:
        """Returns what a draw at `step` needs to know of the stored entries at `indices`."""
        columns = self._columns
        return Candidates(
            columns["priority"][indices],
            columns["group_id"][indices],
            columns["times_used"][indices] > 0,
            step - columns["birth_step"][indices],
        )

    def draw(
        self, count: int, step: int, rng: np.random.Generator, fresh: Sequence[Entry] = ()
    ) -> Draw:
        """Draw `count` units (rollouts or queries) from the buffer and `fresh` together.

        No entry is removed. Uses of stored entries are recorded here, uses of fresh ones when
        they are inserted. The draw is empty if there are no candidates.
        """
        limits_reuse = self.settings.max_uses is not None or self.settings.cooldown_steps > 0
        indices_N = self.drawable(step) if limits_reuse else np.arange(len(self))
        stored = len(indices_N)
        if count <= 0 or stored + len(fresh) == 0:
            return Draw.empty()
        candidates = self._candidates(indices_N if limits_reuse else slice(None), step)
        if fresh:
            group_id_N = np.array([entry.group_id for entry in fresh], dtype=np.int64)
            if self.settings.unit == "query":
                check_groups_adjacent(group_id_N)
            priority_N = entry_priorities(self.settings.priority, fresh)
            used_N = np.zeros(len(fresh), dtype=np.bool_)
            age_N = step - np.array([entry.birth_step for entry in fresh], dtype=np.int64)
            candidates = candidates + Candidates(priority_N, group_id_N, used_N, age_N)
        picks = pick(candidates, count, self.settings, rng)
        used = indices_N[picks.indices[picks.indices < stored]]
        np.add.at(self._columns["times_used"], used, 1)
        self._columns["last_used_step"][used] = step
        entry_N = self._columns["entry"]
        drawn = tuple(
            entry_N[indices_N[i]] if i < stored else fresh[i - stored] for i in picks.indices
        )
        return Draw(
            entries=drawn,
            probabilities=picks.probabilities,
            ages=candidates.age_N[picks.indices],
            effective_sample_size=picks.effective_sample_size,
            entropy=picks.entropy,
        )

    def stats(self, step: int) -> BufferStats:
        """Computes the statistics at `step`, with its evictions so far (of no earlier step)."""
        evicted, undrawn = 0, 0
        if self._evicted_at[0] == step:
            evicted, undrawn = self._evicted_at[1], self._evicted_undrawn
        evictions = (evicted, undrawn, self._evicted_by_capacity)
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
        """Return the complete state: the entries, copies of the columns, and the counters."""
        return {
            "entries": self.entries(),
            "priority": self._columns["priority"].copy(),
            "times_used": self._columns["times_used"].copy(),
            "last_used_step": self._columns["last_used_step"].copy(),
            "evicted_by_capacity": self._evicted_by_capacity,
            "evicted_at": self._evicted_at,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Replace the contents by a state from `get_state` of a buffer with the same settings.

        Priorities are recomputed from the entries, and must equal the saved ones bit for bit.
        Entries evicted earlier are not passed to `on_evict`. Raises ValueError for an inconsistent
        state; the buffer is then unchanged.
        """
        restored = EntryStore(self.settings, self.group_size)
        entries = state["entries"]
        if entries:
            newest = max(entry.birth_step for entry in entries)
            check_insertable(entries, newest, restored._columns, self.settings.unit)
            columns = restored._new_columns(entries, newest, state["times_used"])
            last_used_N = np.asarray(state["last_used_step"], dtype=np.int64)
            columns["last_used_step"] = last_used_N
            restored._append(columns)
        if not np.array_equal(state["priority"], restored._columns["priority"]):
            raise ValueError(
                f"the saved priorities are not those that replay.priority {self.settings.priority} "
                "gives now (undo a change of that function, or give it another name)"
            )
        self._columns = restored._columns
        self._unreported = []
        self._evicted_by_capacity = state["evicted_by_capacity"]
        self._evicted_at, self._evicted_undrawn = tuple(state["evicted_at"]), 0

    def _append(self, new: Mapping[str, np.ndarray]) -> None:
        self._columns = {
            name: np.concatenate([column, new[name]]) for name, column in self._columns.items()
        }

    def _remove(self, removed_N: np.ndarray, step: int) -> int:
        """Evict in `step` the entries where `removed_N` (bool [N]) is True; return their number."""
        if self.on_evict is not None:
            self._unreported.extend(self._columns["entry"][removed_N])
        undrawn = int((self._columns["times_used"][removed_N] == 0).sum())
        evicted = int(np.count_nonzero(removed_N))
        if evicted:
            kept_N = ~removed_N
            self._columns = {name: column[kept_N] for name, column in self._columns.items()}
        if self._evicted_at[0] != step:
            self._evicted_at, self._evicted_undrawn = (step, 0), 0
        self._evicted_at = (step, self._evicted_at[1] + evicted)
        self._evicted_undrawn += undrawn
        return evicted

    def _new_columns(
        self, entries: Sequence[Entry], step: int, times_used_N: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Computes the columns, with priorities, of entries to be stored at `step`."""
        count = len(entries)
        times_used = np.zeros(count, dtype=np.int32)
        if times_used_N is not None:
            times_used[:] = times_used_N
        priority_N = self._new_priorities(entries)
        stored = np.empty(count, dtype=np.object_)
        stored[:] = [stored_form(entry) for entry in entries]
        return {
            "rollout_id": np.array([entry.rollout_id for entry in entries]),
            "group_id": np.array([entry.group_id for entry in entries]),
            "birth_step": np.array([entry.birth_step for entry in entries]),
            "priority": priority_N,
            "correct": np.array([is_correct(entry.columns) for entry in entries]),
            "times_used": times_used,
            "last_used_step": np.where(times_used > 0, step, NEVER_USED),
            "entry": stored,
        }

    def _new_priorities(self, entries: Sequence[Entry]) -> np.ndarray:
        """Compute the priorities of new entries, float64 [N]. Raises RecipeError, also if an entry
        lacks a column that the positive bias reads."""
        if self.settings.positive_fraction > 0:
            for name in ("advantage", "group_reward_std"):
                entry_column(entries, name, "replay.positive_fraction")
        return entry_priorities(self.settings.priority, entries)

    def _evict_born_before(self, step: int, now: int) -> int:
        if self.settings.max_age_steps is None:
            return 0
        return self._remove(now - self._columns["birth_step"] > self.settings.max_age_steps, step)

    def _enforce_capacity(self, step: int) -> int:
        """Evict what exceeds the capacity, and return the number: the first stored, with unit query
        rounded up to whole groups; with `positive_fraction`, by `_kept_by_positive_bias`."""
        if self.settings.positive_fraction > 0:
            return self._remove(~self._kept_by_positive_bias(), step)
        excess = len(self) - self.settings.capacity_rollouts
        if excess <= 0:
            return 0
        if self.settings.unit == "query":
            starts_Q, _ = query_spans(self._columns["group_id"])
            excess = int(np.append(starts_Q, len(self))[np.searchsorted(starts_Q, excess)])
        return self._remove(np.arange(len(self)) < excess, step)

    def _kept_by_positive_bias(self) -> np.ndarray:
        """Mark the newest (1-δ)N entries, and the newest δN correct ones of the older, bool [N]."""
        capacity = self.settings.capacity_rollouts
        reserved = round(self.settings.positive_fraction * capacity)
        older = max(len(self) - (capacity - reserved), 0)
        kept_N = np.ones(len(self), dtype=np.bool_)
        kept_N[:older] = False
        correct = np.flatnonzero(self._columns["correct"][:older])
        kept_N[correct[max(correct.size - reserved, 0) :]] = True
        return kept_N


def checked_settings(settings: Any) -> ReplaySection:
    """Return the settings as they are. Raises TypeError for another type, such as a mapping."""
    if not isinstance(settings, ReplaySection):
        raise TypeError(
            f"the settings of replay are a {type(settings).__name__}: give a ReplayConfig, such as "
            'ReplayConfig.of("ours", max_age_steps=10)'
        )
    return settings
