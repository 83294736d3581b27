"""Outcome of training on rollouts, by their age at use."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from grpo_replay.lab.inspection.column_reader import iter_columns
from grpo_replay.lab.inspection.source import Source
from grpo_replay.terminal.progress import tracked

OUTCOME_COLUMNS = ("tokens", "clip_fraction", "log_ratio_mean", "log_ratio_var", "approx_kl")


@dataclass(frozen=True, slots=True)
class AgeOutcome:
    """Token-weighted outcome of all uses at one age (training steps)."""

    uses: int
    tokens: int
    clip_fraction: float  # share of tokens whose gradient was removed by clipping
    log_ratio_mean: float  # nats, policy minus behaviour
    log_ratio_square: float  # nats², mean square of the log-ratio
    approx_kl: float  # nats per token (k3)

    @property
    def ratio(self) -> float:
        """Geometric mean of the per-token importance ratio."""
        return float(np.exp(self.log_ratio_mean))


def outcomes_by_age(source: Source) -> dict[int, AgeOutcome]:
    """Outcomes by age in training steps. Age 0 is fresh rollouts: draws at age 0, and those of
    rollouts/ that were trained on without a draw. Empty if the run logged nothing. Ages at which no
    token was trained on are left out."""
    sums: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(6))
    drawn: dict[int, np.ndarray] = {}
    for step, path in tracked(source.draw_files, "reading outcomes of draws"):
        for batch in iter_columns(path, "draws", ("rollout_id", "age_steps", *OUTCOME_COLUMNS)):
            ids, ages = (column.to_numpy() for column in batch.columns[:2])
            drawn[step] = np.append(drawn.get(step, []), ids)
            _add(sums, ages, [_floats(column) for column in batch.columns[2:]])
    for step, path in tracked(source.rollout_files, "reading outcomes of fresh rollouts"):
        for batch in iter_columns(path, "rollouts", ("rollout_id", *OUTCOME_COLUMNS)):
            tokens, *others = (_floats(column) for column in batch.columns[1:])
            # With pool and FIFO, rollouts drawn in the step that took them are already counted.
            tokens[np.isin(batch.column(0).to_numpy(), drawn.get(step, []))] = np.nan
            _add(sums, np.zeros(batch.num_rows, dtype=np.int64), [tokens, *others])
    return {age: _outcome(total) for age, total in sorted(sums.items()) if total[1] > 0}


def _floats(column: pa.Array) -> np.ndarray:
    """The column as float64, with NaN for null."""
    return np.array(column.cast("float64").to_numpy(zero_copy_only=False))


def _add(sums: dict[int, np.ndarray], ages: np.ndarray, columns: list[np.ndarray]) -> None:
    tokens, clip, mean, var, kl = columns
    # Dropped groups have no outcome (null); empty completions have no tokens to average over.
    valid = np.isfinite(tokens) & (tokens > 0) & np.isfinite(mean)
    square = var + mean**2
    parts = np.stack(
        [np.ones_like(tokens), *(tokens * each for each in (1.0, clip, mean, square, kl))], axis=1
    )
    for age in np.unique(ages[valid]).tolist():
        sums[age] += parts[valid & (ages == age)].sum(axis=0)


def _outcome(total: np.ndarray) -> AgeOutcome:
    uses, tokens, clip, mean, square, kl = total.tolist()
    return AgeOutcome(
        int(uses), int(tokens), clip / tokens, mean / tokens, square / tokens, kl / tokens
    )
