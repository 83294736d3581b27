"""Verification of a run from its files, without the code that wrote them: is it complete, and did
it follow the algorithm of its recipe?"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grpo_replay.lab.verification.draw_checks import DrawChecks, priorities
from grpo_replay.lab.verification.metric_checks import (
    check_ledger,
    check_metrics,
    check_rate,
    generated_metrics,
    mean_of,
    used_metrics,
)
from grpo_replay.lab.verification.rollout_checks import (
    check_advantages,
    check_groups,
    check_trained,
    check_with_models,
    is_too_old,
)
from grpo_replay.lab.verification.run_files import (
    Check,
    RunFiles,
    VerifyReport,
    check_checkpoints,
    check_files,
    read_run_files,
)
from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.entry_store import NEVER_USED


def verify_run(run_dir: Path, open_policy: Callable[[int], Any] | None = None) -> VerifyReport:
    """Run all checks, in the order of the algorithm, with `open_policy`, which opens the policy
    after a step (0: the initial one), also those of weights. Raises SnapshotError for bad files."""
    run = read_run_files(Path(run_dir))
    checks = [check_files(run), check_groups(run), *check_advantages(run), check_trained(run)]
    if run.recipe.run.is_async:
        checks.append(check_ledger(run))
    checks += _BufferReplay(run).checks()
    checks += check_checkpoints(run)
    if open_policy is not None:
        checks.append(check_with_models(run, open_policy))
    return VerifyReport(len(run.steps), tuple(checks))


class _BufferReplay:
    """Repeats the run step by step with a second implementation of the buffer."""

    def __init__(self, run: RunFiles) -> None:
        """Starts with an empty buffer and no uses, before the first step."""
        self.run = run
        self.stored = np.zeros(0, np.int64)  # rows of `run.rollouts`, oldest first
        self.uses = np.zeros(len(run.rollouts["rollout_id"]), np.int64)
        self.last_use = np.full(len(self.uses), NEVER_USED)
        self.draws = DrawChecks(run)
        self.metrics = Check(
            "metrics", "metrics.jsonl agrees with rollouts/, draws/ and the buffer"
        )

    def checks(self) -> list[Check]:
        """Repeats all steps, and returns the checks of draws and metrics."""
        for line in self.run.metrics:
            step = int(line["step"])
            if step in self.run.rows_of_step:
                self._step(step, line)
        draws = self.draws
        draw_checks = [draws.stored, draws.counts, draws.units, draws.ages, draws.probabilities]
        return [*draw_checks, self.metrics]

    def _step(self, step: int, line: Mapping[str, Any]) -> None:
        """Repeats a step: candidates, draws, uses, insertion and eviction; checks its metrics. A
        resume that emptied the buffer before it is repeated too."""
        columns, rows = self.run.rollouts, self.run.rows_of_step[step]
        settings, start = self.run.recipe.replay, self.run.start_of(step)
        fresh = rows.start + np.flatnonzero(columns["kept"][rows])
        before = self.stored
        if start is not None and start.empty_buffer and start.after_step == step - 1:
            before = before[:0]
        old = _young_enough(before, step, columns, settings)
        candidates = np.append(old, fresh) if settings.pools_fresh else old
        if settings.replays and settings.stores_first:
            candidates = _within_capacity(np.append(old, fresh), columns, settings)
        drawn = self.draws.check(step, candidates, len(fresh), self.uses, self.last_use)
        np.add.at(self.uses, drawn, 1)
        self.last_use[drawn] = step
        self.stored = _stored_after(before, fresh, step, columns, settings)
        entered = len(fresh) if settings.replays else 0
        self._check_metrics(step, line, len(fresh), len(before) + entered - len(self.stored))

    def _check_metrics(self, step: int, line: Mapping[str, Any], fresh: int, evicted: int) -> None:
        """Compares a line of metrics with values recomputed from files and the repeated buffer."""
        run, stored = self.run, self.stored
        # Ages are those at the last draw of the step, of which there is one per update.
        updates = run.recipe.draws_per_step
        age_N = updates * (step - run.rollouts["birth_step"][stored]) + updates - 1
        expected = {
            **generated_metrics(run, step),
            **used_metrics(run, step, fresh),
            "replay/ess": self.draws.effective_sample_size,
            "replay/draw_entropy": self.draws.entropy,
            "buffer/rollouts": len(stored),
            "buffer/evicted": evicted,
            "buffer/priority_mean": mean_of(priorities(run, run.recipe.replay, stored)),
            "buffer/age_mean": mean_of(age_N),
            "buffer/age_max": int(age_N.max()) if len(age_N) else None,
            "buffer/times_used_mean": mean_of(self.uses[stored]),
        }
        check_metrics(self.metrics, line, expected, run.metrics[0])
        check_rate(self.metrics, line, run.start_of(step))


def _stored_after(
    stored: np.ndarray, fresh: np.ndarray, step: int, columns: np.ndarray, settings: ReplaySection
) -> np.ndarray:
    """Returns the rows that a buffer of `stored` rows holds after a step with `fresh` survivors."""
    stored = _young_enough(stored, step, columns, settings)
    if not settings.replays:
        return stored
    stored = _within_capacity(np.append(stored, fresh), columns, settings)
    return _young_enough(stored, step + 1, columns, settings)


def _young_enough(
    rows: np.ndarray, step: int, columns: np.ndarray, settings: ReplaySection
) -> np.ndarray:
    return rows[~is_too_old(settings, step, columns["birth_step"][rows])]


def _within_capacity(rows: np.ndarray, columns: np.ndarray, settings: ReplaySection) -> np.ndarray:
    """Returns the rows that the capacity leaves: the newest, in whole queries if these are the
    unit; with positive bias also correct older ones."""
    capacity = settings.capacity_rollouts
    if settings.positive_fraction > 0:
        reserved = round(settings.positive_fraction * capacity)
        start = max(len(rows) - (capacity - reserved), 0)
        older = rows[:start]
        are_equal = columns["group_reward_std"][older] == 0  # all correct, or none
        signal = np.where(are_equal, columns["group_correct"][older], columns["advantage"][older])
        correct = older[signal > 0]
        return np.append(correct[max(len(correct) - reserved, 0) :], rows[start:])
    if settings.unit == "query":
        ids = columns["group_id"][rows]
        _, first, size = np.unique(ids, return_index=True, return_counts=True)
        newest_first = size[np.argsort(first)[::-1]].cumsum()
        capacity = max(newest_first[newest_first <= capacity], default=0)
    return rows[max(len(rows) - capacity, 0) :]
