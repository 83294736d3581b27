"""`verify_run`: check that a finished run is whole and followed the algorithm of its recipe.

Recomputes advantages, kept flags, the buffer at each step, ages, draw counts,
first-draw probabilities, uses and metrics from the run's files, without the code that wrote them.
"""

from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from grpo_replay.lab.verification.draw_checks import DrawChecks
from grpo_replay.lab.verification.metric_checks import (
    Values,
    check_ledger,
    check_metrics,
    family,
    generated_metrics,
    replayed_metrics,
    stored_metrics,
    trained_metrics,
)
from grpo_replay.lab.verification.rollout_checks import (
    Policy,
    check_advantages,
    check_groups,
    check_trained,
    check_versions,
    check_with_models,
)
from grpo_replay.lab.verification.run_files import (
    Check,
    Columns,
    RunFiles,
    Tally,
    VerifyReport,
    check_checkpoints,
    check_files,
    queries,
    read_buffer_columns,
    read_run_files,
)
from grpo_replay.recipe import ReplaySection
from grpo_replay.storage.rollout_log import optional_fields, read_rollout_table, step_path


class Store:
    """The stored rows and their uses. `evict` and `insert` return the number of evicted rows."""

    def __init__(self, rollouts: Columns, settings: ReplaySection) -> None:
        self.rollouts = rollouts
        self.settings = settings
        self.rows: list[int] = []
        self.uses = np.zeros(len(rollouts["rollout_id"]), dtype=np.int64)
        self.last_use = np.full(len(rollouts["rollout_id"]), -1, dtype=np.int64)

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


def check_snapshot(
    run: RunFiles, store: Store, priority_N: np.ndarray, step: int, path: Path, tally: Tally
) -> None:
    """Check content, order, uses and priorities, and each other column against rollouts/."""
    uses, table, written_at = read_buffer_columns(path)
    tally.expect(written_at == step, f"checkpoint {step}: its buffer is of step {written_at}")
    ids, expected_ids = table["rollout_id"].to_pylist(), run.rollouts["rollout_id"][store.rows]
    if not tally.expect(
        ids == expected_ids.tolist(),
        f"checkpoint {step}: holds {len(ids)} rollouts, expected {len(expected_ids)}, or in "
        "another order",
    ):
        return
    for name, expected in (
        ("times_used", store.uses[store.rows]),
        ("last_used_step", store.last_use[store.rows]),
        ("priority", priority_N),
    ):
        _check_column(step, ids, name, uses[name], expected, tally)
    stored = np.array(store.rows, dtype=np.int64)
    for logged, rows in run.rows_of_step.items():
        here = np.flatnonzero((rows.start <= stored) & (stored < rows.stop))
        if len(here):
            born = read_rollout_table(step_path(run.folder / "rollouts", logged))
            _check_frozen(step, table.take(here), born.take(stored[here] - rows.start), tally)


def _check_column(
    step: int, ids: list[int], name: str, found_N: np.ndarray, expected_N: np.ndarray, tally: Tally
) -> None:
    tally.expect_all(
        np.isclose(found_N, expected_N, rtol=1e-9, atol=0),
        lambda i: (
            f"checkpoint {step}, rollout {ids[i]}: {name} {found_N[i]}, recomputed {expected_N[i]}"
        ),
    )


def _check_frozen(step: int, found: pa.Table, born: pa.Table, tally: Tally) -> None:
    """Every column of stored rollouts is what it was at birth."""
    optional = (field.name for field in optional_fields(born.schema))
    for name in dict.fromkeys((*found.column_names, *optional)):
        now, then = (
            each[name].to_pylist() if name in each.column_names else [None] * len(each)
            for each in (found, born)
        )
        for rollout_id, a, b in zip(found["rollout_id"].to_pylist(), now, then, strict=True):
            tally.expect(
                a == b or repr(a) == repr(b),  # extras may be NaN
                f"checkpoint {step}, rollout {rollout_id}: {name} is not what it was at birth",
            )


_TOKENS = ("prompt_token_ids", "completion_token_ids")


def verify_run(run_dir: Path, open_policy: Callable[[int], Policy] | None = None) -> VerifyReport:
    """All checks of a run, in the order of the algorithm. With `open_policy`, the policy after a
    step (0: the one that the run began with), also those that need weights. Raises SnapshotError
    or RecipeError if the files cannot be read."""
    run = read_run_files(Path(run_dir))
    checks = [check_files(run), check_groups(run), check_versions(run)]
    checks += [*check_advantages(run), check_trained(run)]
    if run.recipe.run.is_async:
        checks.append(check_ledger(run))
    checks += _Replay(run).checks()
    checks += check_checkpoints(run)
    if open_policy is not None:
        checks.append(check_with_models(run, open_policy))
    return VerifyReport(len(run.steps), tuple(checks))


class _Replay:
    """Replays the run step by step with its own store."""

    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self.settings = run.recipes.first.replay  # those of the step being replayed
        self.store = Store(run.rollouts, self.settings)
        self.draws = DrawChecks(run)
        self.snapshots = run.snapshots()
        self.processed_tokens = 0
        self.metrics = Tally(
            "metrics",
            "metrics.jsonl agrees with rewards, lengths, outcomes, updates, draws, ages, buffer",
        )
        self.written: set[str] = set()  # the names of metrics in the lines so far
        self.frozen = Tally(
            "snapshots", "buffer.parquet: rollouts, uses, priorities; all else as at birth"
        )

    def checks(self) -> list[Check]:
        for line in self.run.metrics:
            step = int(line["step"])
            if step in self.run.rows_of_step:
                self._step(step, line)
        return [*self.draws.results(), self.metrics.result(), self.frozen.result()]

    def _step(self, step: int, line: Mapping[str, Any]) -> None:
        self._use_settings(step)
        rows = self.run.rows_of_step[step]
        fresh = [row for row in range(rows.start, rows.stop) if self.run.rollouts["kept"][row]]
        if self.settings.replays:
            self._restart_if_emptied(step, fresh, line)
        evicted = self.store.evict(step)
        if self.settings.replays and self.settings.stores_first:
            evicted += self.store.insert(fresh)
        pool = fresh if self.settings.pools_fresh else []
        drawn = self.draws.check(step, self.store.rows + pool, len(fresh), self.store.uses > 0)
        self.store.record(drawn, step)
        if self.settings.replays:
            if not self.settings.stores_first:
                evicted += self.store.insert(fresh)
            evicted += self.store.evict(step + 1)
        self._check_metrics(step, line, len(fresh), evicted)
        path = self.snapshots.get(step)
        if path is not None and self.settings.replays:
            check_snapshot(self.run, self.store, self._priorities(), step, path, self.frozen)

    def _priorities(self) -> np.ndarray:
        """p of the stored rollouts, oldest first."""
        return self.draws.priorities(self.store.rows)[self.store.rows]

    def _use_settings(self, step: int) -> None:
        settings = self.run.recipe_at(step).replay
        if settings != self.settings:
            self.settings = self.store.settings = settings
            self.store.insert([])  # a smaller capacity evicts as the run is resumed

    def _check_metrics(self, step: int, line: Mapping[str, Any], fresh: int, evicted: int) -> None:
        draws, store, rows = self.draws.draws(step), self.store, self.run.rows_of_step[step]
        ages = draws.get("age_updates", draws["age_steps"])
        chosen = np.full(len(ages), True) if self.settings.stores_first else ages > 0
        replayed, count = ages[chosen], int(chosen.sum())
        of_replayed = {name: values[chosen] for name, values in draws.items()}
        known = [self.draws.row_of.get(i, -1) for i in of_replayed["rollout_id"].tolist()]
        advantages, priorities = self.run.rollouts["advantage"][known], self._priorities()
        expected: Values = {
            "fresh/rollouts": fresh,
            "replay/rollouts": count,
            "replay/ratio": count / fresh if fresh else None,
            "replay/ess": self.draws.effective_sample_size,
            "replay/draw_entropy": self.draws.entropy,
            "replay/age_mean": float(replayed.mean()) if count else None,
            "replay/age_max": int(replayed.max()) if count else None,
            "buffer/rollouts": len(store.rows),
            "buffer/evicted": evicted,
            "buffer/priority_mean": float(priorities.mean()) if len(priorities) else None,
            **{name: None for name in line if family(name) == "replay/age_"},
            **replayed_metrics(of_replayed, replayed, advantages),
        }
        self.processed_tokens += int(sum(self.run.rollouts[name][rows].sum() for name in _TOKENS))
        if not self.run.recipe_at(step).run.is_async:
            births, uses = store.rollouts["birth_step"][store.rows], store.uses[store.rows]
            expected |= {
                **{name: 0 for name in line if family(name) == "verdict"},
                **generated_metrics(self.run, step),
                **trained_metrics(self.run, step, draws),
                **stored_metrics(births, uses, step, self.run.draws_per_step(step)),
                "num_tokens": self.processed_tokens,
            }
        check_metrics(self.metrics, step, line, expected, self.written)

    def _restart_if_emptied(self, step: int, fresh: list[int], line: Mapping[str, Any]) -> None:
        """Empty the store where a run was resumed with `checkpoint.restore_buffer: false`. The
        logged buffer size shows where that was."""
        if self.run.recipe_at(step).checkpoint.restore_buffer or not self.store.rows:
            return
        found = line.get("buffer/rollouts")
        kept, empty = copy(self.store), Store(self.run.rollouts, self.settings)
        if found == _size_after(empty, step, fresh) != _size_after(kept, step, fresh):
            self.store.rows = []
            self.metrics.notes.append(f"buffer emptied by a resume before step {step}")


def _size_after(store: Store, step: int, fresh: list[int]) -> int:
    """Number of rollouts in `store` after evicting, inserting `fresh` and evicting in `step`."""
    store.evict(step)
    store.insert(fresh)
    store.evict(step + 1)
    return len(store.rows)
