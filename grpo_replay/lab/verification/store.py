"""The contents of the buffer at each step, recomputed from rollouts/ and the recipe.

Rows are indices into the run's rollout columns, oldest first. A deliberately simple second
implementation of `grpo_replay.replay`, with which it shares no code.
"""

import numpy as np

from grpo_replay.lab.verification.run_files import Columns
from grpo_replay.recipe import ReplaySection


class Store:
    """The stored rows and their uses. `evict` and `insert` return the number of evicted rows."""

    def __init__(self, rollouts: Columns, settings: ReplaySection) -> None:
        self.rollouts = rollouts
        self.settings = settings
        self.rows: list[int] = []
        self.uses = np.zeros(len(rollouts["rollout_id"]), dtype=np.int64)
        self.last_use = np.full(len(rollouts["rollout_id"]), -1, dtype=np.int64)

    def copy(self) -> "Store":
        """A copy with the same rows, without their uses."""
        other = Store(self.rollouts, self.settings)
        other.rows = list(self.rows)
        return other

    def evict(self, now: int) -> int:
        """Remove rows older than `max_age_steps` at step `now`."""
        if self.settings.max_age_steps is None:
            return 0
        births = self.rollouts["birth_step"]
        young = [row for row in self.rows if now - births[row] <= self.settings.max_age_steps]
        return self._keep(young)

    def insert(self, fresh: list[int]) -> int:
        """Append rows, then evict those over the capacity."""
        self.rows = self.rows + fresh
        capacity = self.settings.capacity_rollouts
        if self.settings.positive_fraction > 0:
            return self._keep(self._positive_bias(capacity))
        if self.settings.unit == "query":
            return self._keep(self._newest_queries(capacity))
        return self._keep(self.rows[-capacity:])

    def record(self, rows: list[int], step: int) -> None:
        """Count one use per row, at `step`."""
        for row in rows:
            self.uses[row] += 1
            self.last_use[row] = step

    def _keep(self, rows: list[int]) -> int:
        evicted = len(self.rows) - len(rows)
        self.rows = rows
        return evicted

    def _positive_bias(self, capacity: int) -> list[int]:
        reserved = round(self.settings.positive_fraction * capacity)
        window = capacity - reserved
        newest_first = self.rows[::-1]
        outside = [row for row in newest_first[window:] if self._is_correct(row)]
        return (newest_first[:window] + outside[:reserved])[::-1]

    def _is_correct(self, row: int) -> bool:
        if self.rollouts["group_reward_std"][row] == 0:  # all correct, or none
            return bool(self.rollouts["group_correct"][row] > 0)
        return bool(self.rollouts["advantage"][row] > 0)

    def _newest_queries(self, capacity: int) -> list[int]:
        kept: list[int] = []
        for members in reversed(queries(self.rows, self.rollouts)):
            if len(kept) + len(members) > capacity:
                break
            kept = members + kept
        return kept


def queries(rows: list[int], rollouts: Columns) -> list[list[int]]:
    """The rows of each group. Groups are in the order of their first row."""
    by_group: dict[int, list[int]] = {}
    for row in rows:
        by_group.setdefault(int(rollouts["group_id"][row]), []).append(row)
    return list(by_group.values())
