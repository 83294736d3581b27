"""`verify_run`: is a finished run the algorithm that its recipe states?

Recomputes from the run's files alone (rollouts/, draws/, metrics.jsonl, recipe.yaml, and the
buffer.parquet of its checkpoints), with code of its own: advantages, kept flags, what was stored
at each step, ages, draw counts, first-draw probabilities, uses; and holds the draws against the
stated law with a test that a right run fails once in a million (`verification.draw_test`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_replay.verification.draw_checks import DrawChecks
from grpo_replay.verification.report import Check, Tally, VerifyReport
from grpo_replay.verification.rollout_checks import (
    check_advantages,
    check_files,
    check_groups,
    check_trained,
    check_versions,
)
from grpo_replay.verification.run_files import RunFiles, read_run
from grpo_replay.verification.snapshot_checks import check_snapshot
from grpo_replay.verification.store import Store


def verify_run(run_dir: Path) -> VerifyReport:
    """One line per check, in the order of the algorithm. Raises SnapshotError or RecipeError if
    the files cannot be read."""
    run = read_run(Path(run_dir))
    checks = [check_files(run), check_groups(run), check_versions(run), *check_advantages(run)]
    checks.append(check_trained(run))
    return VerifyReport(len(run.steps), (*checks, *_Replay(run).checks()))


class _Replay:
    """Goes through the run step by step beside a store of its own."""

    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self.settings = run.recipe.replay
        self.active = self.settings.enabled and self.settings.ratio > 0
        self.store = Store(run.rollouts, self.settings)
        self.draws = DrawChecks(run)
        self.snapshots = run.snapshots()
        self.metrics = Tally(
            "metrics", "metrics.jsonl agrees on counts, ages, evictions, sample size"
        )
        self.frozen = Tally(
            "snapshots", "buffer.parquet: content, uses, and log-probs unchanged since birth"
        )

    def checks(self) -> list[Check]:
        for line in self.run.metrics:
            step = int(line["step"])
            if step in self.run.rows_of_step:
                self._step(step, line)
        return [*self.draws.results(), self.metrics.result(), self.frozen.result()]

    def _step(self, step: int, line: Mapping[str, Any]) -> None:
        rows = self.run.rows_of_step[step]
        fresh = [row for row in range(rows.start, rows.stop) if self.run.rollouts["kept"][row]]
        evicted = 0
        if self.active:
            self._restart_if_emptied(step, fresh, line)
            evicted += self.store.evict(step)
            if self.settings.composition == "buffer_only":
                evicted += self.store.insert(fresh)
        pool = fresh if self.settings.composition == "pool" else []
        drawn = self.draws.check(step, self.store.rows + pool, len(fresh), self.store.uses > 0)
        self.store.record(drawn, step)
        if self.active:
            if self.settings.composition != "buffer_only":
                evicted += self.store.insert(fresh)
            evicted += self.store.evict(step + 1)
        self._check_draw_metrics(step, line, len(fresh))
        self._compare(line, step, "buffer/rollouts", len(self.store.rows))
        self._compare(line, step, "buffer/evicted", evicted)
        if step in self.snapshots and self.active:
            check_snapshot(self.run, self.store, step, self.snapshots[step], self.frozen)

    def _check_draw_metrics(self, step: int, line: Mapping[str, Any], fresh: int) -> None:
        ages = self.draws.draws(step)["age_steps"]
        replayed = ages if self.settings.composition == "buffer_only" else ages[ages > 0]
        count = len(replayed)
        self._compare(line, step, "fresh/rollouts", fresh)
        self._compare(line, step, "replay/rollouts", count)
        self._compare(line, step, "replay/ratio", count / fresh if fresh else None)
        self._compare(line, step, "replay/ess", self.draws.effective_sample_size)
        self._compare(line, step, "replay/age_mean", float(replayed.mean()) if count else None)
        self._compare(line, step, "replay/age_max", int(replayed.max()) if count else None)

    def _compare(
        self, line: Mapping[str, Any], step: int, name: str, expected: float | None
    ) -> None:
        if name not in line:
            return
        found = line[name]
        same = found == expected
        if found is not None and expected is not None:
            same = abs(found - expected) <= 1e-9 * max(1.0, abs(expected))
        self.metrics.expect(same, f"step {step}: {name} {found}, recomputed {expected}")

    def _restart_if_emptied(self, step: int, fresh: list[int], line: Mapping[str, Any]) -> None:
        """A run resumed with `checkpoint.restore_buffer: false` began again with an empty buffer;
        the logged buffer size says where."""
        if self.run.recipe.checkpoint.restore_buffer or not self.store.rows:
            return
        found = line.get("buffer/rollouts")
        kept, empty = self.store.copy(), Store(self.run.rollouts, self.settings)
        if found == _size_after(empty, step, fresh) != _size_after(kept, step, fresh):
            self.store.rows = []
            self.metrics.notes.append(f"buffer emptied by a resume before step {step}")


def _size_after(store: Store, step: int, fresh: list[int]) -> int:
    """Rollouts that `store` would hold at the end of `step`."""
    store.evict(step)
    store.insert(fresh)
    store.evict(step + 1)
    return len(store.rows)
