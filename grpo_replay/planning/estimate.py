"""The planner's assumptions, measured in a finished run or taken from a recipe.

μ comes from the ledger (seconds of generation and training over the rollouts that went through
each), the survival share from the rollout log, token lengths likewise. The growth of variance
comes from the log-ratios by age: a token whose log-ratio has mean square v has an importance
weight of second moment about e^v (exactly so if it is normal and the weights have mean 1), and
that is what multiplies the variance of its gradient.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_replay.errors import SnapshotError
from grpo_replay.inspection.ageing import AgeOutcome, outcomes_by_age
from grpo_replay.inspection.column_reader import iter_columns, list_lengths
from grpo_replay.inspection.source import Source
from grpo_replay.planning.theory import RatioGrowth
from grpo_replay.terminal.progress import tracked


@dataclass(frozen=True, slots=True)
class RunEstimates:
    """What a run says about the planner's assumptions; None where it cannot tell."""

    mu: float | None = None
    survival: float | None = None
    rollouts_per_step: int | None = None
    completion_tokens: float | None = None
    prompt_tokens: float | None = None
    growth: RatioGrowth | None = None
    growth_points: tuple[tuple[int, float], ...] = ()  # (age, excess mean square, nats²)


def estimate_from_run(source: Source) -> RunEstimates:
    """Estimates over all steps of a run. Raises SnapshotError if it logged no rollouts."""
    if not source.rollout_files:
        raise SnapshotError(
            f"{source.path}: no rollouts/ to estimate from (tracking.log_rollouts was off, or "
            "this is a snapshot alone); give --mu, --rho and --growth instead"
        )
    generated = kept = completion_tokens = prompt_tokens = 0
    for _, path in tracked(source.rollout_files, "reading rollouts"):
        names = ("kept", "completion_token_ids", "prompt_token_ids")
        for batch in iter_columns(path, "rollouts", names):
            generated += batch.num_rows
            kept += batch.column(0).true_count
            completion_tokens += _total(batch.column(1))
            prompt_tokens += _total(batch.column(2))
    if generated == 0 or kept == 0:
        raise SnapshotError(
            f"{source.path}: {generated} rollouts generated, {kept} of them kept: nothing to "
            "estimate a survival share from"
        )
    points = growth_points(outcomes_by_age(source))
    return RunEstimates(
        mu=measured_mu(source.metrics, generated / len(source.rollout_files)),
        survival=kept / generated,
        rollouts_per_step=round(generated / len(source.rollout_files)),
        completion_tokens=completion_tokens / generated,
        prompt_tokens=prompt_tokens / generated,
        growth=fit_growth(points),
        growth_points=tuple((age, value) for age, value, _ in points),
    )


def _total(column: Any) -> int:
    return int(list_lengths(column).sum().as_py() or 0) if len(column) else 0


def measured_mu(metrics: Sequence[Mapping[str, Any]], rollouts_per_step: float) -> float | None:
    """(generation seconds / rollouts generated) / (training seconds / rollouts trained on).

    None if the run trained on nothing or its ledger has no times.
    """
    generation = training = trained = 0.0
    steps = 0
    for line in metrics:
        seconds = line.get("cost/generation_seconds"), line.get("cost/training_seconds")
        if None in seconds:
            continue
        count = _trained_rollouts(line, rollouts_per_step)
        if count is None:
            continue
        steps += 1
        generation += seconds[0]
        training += seconds[1]
        trained += count
    if not steps or training <= 0 or trained <= 0 or generation <= 0:
        return None
    return (generation / (steps * rollouts_per_step)) / (training / trained)


def _trained_rollouts(line: Mapping[str, Any], rollouts_per_step: float) -> float | None:
    """Rollouts trained on in a step. Runs from before `cost/trained_rollouts` have it in their
    `cost/mu`, null if there were none; survivors and draws do not tell, as FIFO and the pool
    leave survivors untrained. None if the line has neither."""
    if "cost/trained_rollouts" in line:
        return line["cost/trained_rollouts"]
    if "cost/mu" not in line or not line["cost/generation_seconds"]:
        return None
    mu = line["cost/mu"] or 0.0
    return mu * line["cost/training_seconds"] * rollouts_per_step / line["cost/generation_seconds"]


def growth_points(outcomes: Mapping[int, AgeOutcome]) -> list[tuple[int, float, float]]:
    """(age, excess of the log-ratio's mean square over that of fresh rollouts, tokens)."""
    fresh = outcomes.get(0)
    base = fresh.log_ratio_square if fresh else 0.0
    return [
        (age, outcome.log_ratio_square - base, float(outcome.tokens))
        for age, outcome in sorted(outcomes.items())
        if age > 0 and outcome.tokens > 0
    ]


def fit_growth(points: Sequence[tuple[int, float, float]]) -> RatioGrowth | None:
    """k and b of k·s^b through the points, least squares in logs weighted by tokens.

    b is held to 0.25 to 4; with a single age b = 1 (a policy that diffuses). None if no age has a
    mean square above that of fresh rollouts: then no growth was seen.
    """
    usable = [(math.log(age), math.log(value), w) for age, value, w in points if value > 0]
    if not usable:
        return None
    total = sum(w for *_, w in usable)
    mean_x = sum(x * w for x, _, w in usable) / total
    mean_y = sum(y * w for _, y, w in usable) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in usable)
    exponent = 1.0
    if spread > 0:
        exponent = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in usable) / spread
        exponent = min(4.0, max(0.25, exponent))
    return RatioGrowth(math.exp(mean_y - exponent * mean_x), exponent)
