"""`verify_run`: check that a finished run followed the algorithm of its recipe.

Recomputes combined rewards, advantages, kept flags, the buffer at each step, ages, draw counts,
first-draw probabilities, uses, texts and metrics from the run's files (rollouts/, draws/,
metrics.jsonl, its recipes, and buffer.parquet and tokenizer of its checkpoints), without the code
that wrote them. A statistical test compares the draws with the stated distribution; a correct run
fails it once in a million (`lab.verification.draw_test`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_replay.lab.verification.async_checks import check_ledger
from grpo_replay.lab.verification.draw_checks import DrawChecks
from grpo_replay.lab.verification.metric_checks import (
    Values,
    check_metrics,
    generated_metrics,
    stored_metrics,
    trained_metrics,
)
from grpo_replay.lab.verification.model_checks import Policy, check_with_models
from grpo_replay.lab.verification.reward_checks import check_rewards
from grpo_replay.lab.verification.rollout_checks import (
    check_advantages,
    check_files,
    check_groups,
    check_trained,
    check_versions,
)
from grpo_replay.lab.verification.run_files import RunFiles, read_run
from grpo_replay.lab.verification.snapshot_checks import check_snapshot
from grpo_replay.lab.verification.store import Store
from grpo_replay.lab.verification.text_checks import check_texts
from grpo_replay.lab.verification.verification_report import Check, Tally, VerifyReport
from grpo_replay.recipe import ReplaySection

_TOKENS = ("prompt_token_ids", "completion_token_ids")


def verify_run(run_dir: Path, open_policy: Callable[[int], Policy] | None = None) -> VerifyReport:
    """All checks of a run, in the order of the algorithm. With `open_policy`, the policy after a
    step (0: the one that the run began with), also those that need weights. Raises SnapshotError
    or RecipeError if the files cannot be read."""
    run = read_run(Path(run_dir))
    checks = [check_files(run), check_groups(run), check_versions(run)]
    checks += [*check_rewards(run), *check_advantages(run)]
    checks += [check_trained(run), check_texts(run)]
    if run.recipe.run.mode == "async":
        checks.append(check_ledger(run))
    checks += _Replay(run).checks()
    if open_policy is not None:
        checks += check_with_models(run, open_policy)
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
            "metrics", "metrics.jsonl agrees with rewards, lengths, outcomes, counts, ages, buffer"
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

    @property
    def active(self) -> bool:
        return self.settings.enabled and self.settings.ratio > 0

    def _step(self, step: int, line: Mapping[str, Any]) -> None:
        self._use_settings(self.run.recipe_at(step).replay)
        rows = self.run.rows_of_step[step]
        fresh = [row for row in range(rows.start, rows.stop) if self.run.rollouts["kept"][row]]
        evicted = 0
        if self.active:
            self._restart_if_emptied(step, fresh, line)
        evicted += self.store.evict(step)
        if self.active and self.settings.composition == "buffer_only":
            evicted += self.store.insert(fresh)
        pool = fresh if self.settings.composition == "pool" else []
        drawn = self.draws.check(step, self.store.rows + pool, len(fresh), self.store.uses > 0)
        self.store.record(drawn, step)
        if self.active:
            if self.settings.composition != "buffer_only":
                evicted += self.store.insert(fresh)
            evicted += self.store.evict(step + 1)
        self._check_draw_metrics(step, line, len(fresh))
        self.processed_tokens += int(sum(self.run.rollouts[name][rows].sum() for name in _TOKENS))
        expected: Values = {"buffer/rollouts": len(self.store.rows), "buffer/evicted": evicted}
        if self.run.recipe_at(step).run.mode == "sync":
            expected |= {
                **generated_metrics(self.run, step),
                **trained_metrics(self.run, step, self.draws.draws(step)),
                **stored_metrics(self.store, step),
                "num_tokens": self.processed_tokens,
            }
        check_metrics(self.metrics, step, line, expected)
        if step in self.snapshots and self.active:
            check_snapshot(self.run, self.store, step, self.snapshots[step], self.frozen)

    def _use_settings(self, settings: ReplaySection) -> None:
        if settings == self.settings:
            return
        self.settings = self.store.settings = settings
        self.store.insert([])  # a smaller capacity evicts as the run is resumed

    def _check_draw_metrics(self, step: int, line: Mapping[str, Any], fresh: int) -> None:
        ages = self.draws.draws(step)["age_steps"]
        replayed = ages if self.settings.composition == "buffer_only" else ages[ages > 0]
        count = len(replayed)
        expected = {
            "fresh/rollouts": fresh,
            "replay/rollouts": count,
            "replay/ratio": count / fresh if fresh else None,
            "replay/ess": self.draws.effective_sample_size,
            "replay/age_mean": float(replayed.mean()) if count else None,
            "replay/age_max": int(replayed.max()) if count else None,
        }
        check_metrics(self.metrics, step, line, expected)

    def _restart_if_emptied(self, step: int, fresh: list[int], line: Mapping[str, Any]) -> None:
        """Empty the store where a run was resumed with `checkpoint.restore_buffer: false`. The
        logged buffer size shows where that was."""
        if self.run.recipe_at(step).checkpoint.restore_buffer or not self.store.rows:
            return
        found = line.get("buffer/rollouts")
        kept, empty = self.store.copy(), Store(self.run.rollouts, self.settings)
        if found == _size_after(empty, step, fresh) != _size_after(kept, step, fresh):
            self.store.rows = []
            self.metrics.notes.append(f"buffer emptied by a resume before step {step}")


def _size_after(store: Store, step: int, fresh: list[int]) -> int:
    """Number of rollouts in `store` after evicting, inserting `fresh` and evicting in `step`."""
    store.evict(step)
    store.insert(fresh)
    store.evict(step + 1)
    return len(store.rows)
