"""Checks with the weights of the checkpoints: behaviour log-probs, and the first update after each.

A checkpoint of step v holds the policy that sampled step v + 1 and with which the first optimizer
update of that step began. A sample of rows is recomputed by plain forward passes. The caller gives
the policies, so that nothing here loads torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from grpo_replay.lab.verification.run_files import RunFiles
from grpo_replay.lab.verification.verification_report import Check, Tally
from grpo_replay.recipe import LossSection
from grpo_replay.storage.rollout_log import read_draw_table, read_rollout_table, step_path

ROWS_PER_CHECKPOINT = 32
"""Rows recomputed for each checkpoint, spread evenly; the loss takes all rows of an update."""

LARGEST_UPDATE = 512
"""Rows of the largest update whose loss is recomputed."""

_SPLIT_STREAM = 2  # purpose of the random stream: training.trainer.SPLIT_STREAM
_EXACT_NATS = 1e-3  # fp32 in another order
_KNOWN_LOSS = {"kind", "epsilon", "epsilon_high", "dual_clip", "beta", "aggregation",
               "behavior_logprobs", "asymre_delta"}  # fmt: skip
_COLUMNS = (
    *("rollout_id", "policy_version", "policy_version_end", "kept", "advantage", "tokens"),
    *("prompt_token_ids", "completion_token_ids", "behavior_logprobs", "completion_mask"),
    *("clip_fraction", "log_ratio_mean", "approx_kl", "entropy"),
)
_OUTCOMES = ("log_ratio_mean", "approx_kl", "entropy")

Row = Mapping[str, Any]


class Policy(Protocol):
    def logprobs(
        self, prompt_token_ids: np.ndarray, completion_token_ids: np.ndarray, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(log-probs, entropies) of the completion's tokens, float64 [T]."""
        ...


def check_with_models(run: RunFiles, open_policy: Callable[[int], Policy]) -> list[Check]:
    """The checks at every checkpoint that a later step was trained from, and at the base model.
    `open_policy(step)` is the policy after a step, 0 the one the run began with."""
    checks = _ModelChecks(run)
    steps = [0, *sorted(run.checkpoint_steps())]
    for step in steps:
        if step + 1 in run.rows_of_step:
            checks.check(step + 1, open_policy(step))
    return checks.results()


class _ModelChecks:
    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self.behavior = Tally("behaviour log-probs", "recomputed from the weights that sampled")
        self.outcomes = Tally("update outcomes", "log-ratios, KL, entropy of the first update")
        self.losses = Tally("loss", "of steps with one update, from its rows and the weights")
        self._tables: dict[int, dict[int, Row]] = {}

    def results(self) -> list[Check]:
        return [self.behavior.result(), self.outcomes.result(), self.losses.result()]

    def check(self, step: int, policy: Policy) -> None:
        """Check the step that was sampled with `policy`, and whose first update began with it."""
        rows = self._rows(step)
        sampled = [
            row
            for row in rows.values()
            if row["policy_version"] == row["policy_version_end"] == step - 1
            if row["kept"] and row["completion_token_ids"]
        ]
        for row in _spread(sampled, ROWS_PER_CHECKPOINT):
            self._check_behavior(step, row, policy)
        if self.run.recipe_at(step).run.is_async:
            return
        batch = self._batch(step)
        parts = self._mini_batches(len(batch), step)
        if not parts:
            return
        first = [batch[i] for i in parts[0]]
        for row in _spread(first, ROWS_PER_CHECKPOINT):
            self._check_outcome(step, row, policy)
        if len(parts) == 1:
            self._check_loss(step, first, policy)

    def _rows(self, step: int) -> dict[int, Row]:
        """The rollouts born at a step, by id."""
        if step not in self._tables:
            path = step_path(self.run.folder / "rollouts", step)
            rows = read_rollout_table(path, _COLUMNS).to_pylist()
            self._tables[step] = {row["rollout_id"]: row for row in rows}
        return self._tables[step]

    def _batch(self, step: int) -> list[Row]:
        """The rows that the step trained on, in the order of the batch, each with its outcome."""
        path = step_path(self.run.folder / "draws", step)
        drawn = read_draw_table(path).to_pylist() if path.exists() else []
        replayed = [self._rows(step - d["age_steps"])[d["rollout_id"]] | d for d in drawn]
        if drawn and not self.run.recipe_at(step).replay.anchors_fresh:
            return replayed
        return [row for row in self._rows(step).values() if row["tokens"] is not None] + replayed

    def _check_behavior(self, step: int, row: Row, policy: Policy) -> None:
        recipe = self.run.recipe_at(step)
        logprobs, _ = self._recompute(step, row, policy)
        gaps = np.abs(logprobs - _trained(row, row["behavior_logprobs"]))
        exact = recipe.model.dtype == "float32" and recipe.loss.behavior_logprobs == "trainer"
        gap, limit = (gaps.max(), _EXACT_NATS) if exact else (gaps.mean(), recipe.logprob_gap_limit)
        self.behavior.expect(
            bool(gap <= limit),
            f"step {step}, rollout {row['rollout_id']}: behaviour log-probs are {gap:.3g} nats "
            f"from those of the weights, at most {limit:g} are expected",
        )

    def _check_outcome(self, step: int, row: Row, policy: Policy) -> None:
        if not row["tokens"]:
            return
        recipe = self.run.recipe_at(step)
        logprobs, entropies = self._recompute(step, row, policy)
        log_ratios = logprobs - _trained(row, row["behavior_logprobs"])
        expected = {
            "log_ratio_mean": log_ratios.mean(),
            "approx_kl": (np.exp(log_ratios) - 1 - log_ratios).mean(),
            "entropy": entropies.mean(),
        }
        limit = _EXACT_NATS if recipe.model.dtype == "float32" else recipe.logprob_gap_limit
        for name in _OUTCOMES:
            self.outcomes.expect(
                bool(abs(row[name] - expected[name]) <= limit),
                f"step {step}, rollout {row['rollout_id']}: {name} {row[name]:.6g}, recomputed "
                f"{expected[name]:.6g}",
            )

    def _check_loss(self, step: int, rows: Sequence[Row], policy: Policy) -> None:
        recipe = self.run.recipe_at(step)
        reason = _why_not(recipe.loss) or (
            f"an update of {len(rows)} rows" if len(rows) > LARGEST_UPDATE else None
        )
        if reason:
            note = f"not recomputed for {reason}"
            self.losses.notes += [] if note in self.losses.notes else [note]
            return
        logged = {int(line["step"]): line.get("loss") for line in self.run.metrics}[step]
        expected = self._clipped_loss(step, rows, policy)
        limit = 1e-4 if recipe.model.dtype == "float32" else recipe.logprob_gap_limit
        self.losses.expect(
            logged is not None and abs(logged - expected) <= limit,
            f"step {step}: loss {logged}, recomputed {expected:.6g}",
        )

    def _recompute(self, step: int, row: Row, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs and entropies of the tokens that trained."""
        prompt, completion = (np.array(row[f"{n}_token_ids"]) for n in ("prompt", "completion"))
        temperature = self.run.recipe_at(step).sampling.temperature
        logprobs, entropies = policy.logprobs(prompt, completion, temperature)
        return _trained(row, logprobs), _trained(row, entropies)

    def _clipped_loss(self, step: int, rows: Sequence[Row], policy: Policy) -> float:
        """Paper A, equation 3, summed over the tokens of the mini-batch with their weights."""
        recipe, count = self.run.recipe_at(step), len(rows)
        settings, tokens = recipe.loss, sum(row["tokens"] for row in rows)
        total = 0.0
        for row in rows:
            if not row["tokens"]:
                continue
            logprobs, _ = self._recompute(step, row, policy)
            ratios = np.exp(logprobs - _trained(row, row["behavior_logprobs"]))
            a = row["advantage"]
            clipped = np.clip(ratios, 1 - settings.epsilon, 1 + settings.epsilon_high)
            surrogate = np.minimum(ratios * a, clipped * a)
            if settings.dual_clip is not None and a < 0:
                surrogate = np.maximum(surrogate, settings.dual_clip * a)
            weight = {
                "token_mean": 1 / max(tokens, 1),
                "sequence_mean": 1 / (count * max(row["tokens"], 1)),
                "constant": 1 / (count * recipe.sampling.max_completion_length),
            }[settings.aggregation]
            total -= weight * float(surrogate.sum())
        return total

    def _mini_batches(self, count: int, step: int) -> list[np.ndarray]:
        """The rows of each update of a step, as indices into its batch."""
        recipe = self.run.recipe_at(step)
        if count == 0:
            return []
        size = recipe.batch.mini_batch_rollouts
        parts = min(recipe.batch.updates_per_step, count) if size is None else -(-count // size)
        seeds = np.random.SeedSequence([recipe.run.seed, step, _SPLIT_STREAM])
        order = np.random.default_rng(seeds).permutation(count)
        return [np.sort(part) for part in np.array_split(order, parts)]


def _trained(row: Row, values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Those of a completion's tokens that are not masked."""
    mask = row["completion_mask"]
    return np.asarray(values) if mask is None else np.asarray(values)[np.array(mask)]


def _why_not(settings: LossSection) -> str | None:
    """The setting for which the loss is not recomputed here; None for the clipped surrogate."""
    for name, field in type(settings).model_fields.items():
        if name not in _KNOWN_LOSS and getattr(settings, name) != field.default:
            return f"loss.{name} {getattr(settings, name)}"
    if settings.kind != "clipped":
        return f"loss.kind {settings.kind}"
    return f"loss.beta {settings.beta:g}" if settings.beta > 0 else None


def _spread(rows: Sequence[Row], most: int) -> list[Row]:
    """At most so many rows, evenly spaced."""
    if len(rows) <= most:
        return list(rows)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, most).astype(int)]
