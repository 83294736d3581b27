"""Measures the planner's assumptions in a finished run.

μ comes from the cost metrics: seconds of generation and training per rollout. The survival share
comes from the rollout log. The growth of variance comes from the log-ratios by age: if a token's
log-ratio has mean square v, its importance weight has a second moment of about e^v (exactly, if the
log-ratio is normal and the weights have mean 1), and the variance of its gradient is multiplied by
that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from grpo_replay.errors import SnapshotError
from grpo_replay.lab.inspection.buffer_summary import AgeOutcome
from grpo_replay.lab.inspection.compute import outcomes_by_age
from grpo_replay.lab.inspection.source import Source
from grpo_replay.lab.planning.theory import RatioGrowth
from grpo_replay.storage.rollout_log import read_rollout_table
from grpo_replay.terminal.console import tracked

MIN_AGES, MIN_DRAWS = 3, 200
"""Ages with draws, and draws in all, that a fit of the growth needs to be trusted."""

GrowthPoint = tuple[int, float, float]
"""(age, excess of the log-ratio's mean square over that of fresh rollouts in nats², tokens)"""


@dataclass(frozen=True, slots=True)
class RunEstimates:
    """The planner's assumptions as measured in a run; None for one that the run does not tell."""

    mu: float | None = None
    survival: float | None = None
    rollouts_per_step: int | None = None
    growth_points: tuple[GrowthPoint, ...] = ()
    growth_draws: int = 0  # rollouts drawn at the ages of the points

    @property
    def growth_known(self) -> bool:
        """Whether the growth was measured well enough for a verdict."""
        return len(self.growth_points) >= MIN_AGES and self.growth_draws >= MIN_DRAWS


def estimate_from_run(source: Source) -> RunEstimates:
    """Returns estimates over all steps of a run. Raises SnapshotError if it kept no rollouts."""
    generated = kept = 0
    for _, path in tracked(source.rollout_files, "reading rollouts"):
        table = read_rollout_table(path, ("kept",))
        generated += len(table)
        kept += pc.sum(table["kept"]).as_py() or 0
    if kept == 0:
        where = "" if source.recipe else "; a checkpoint has none: name its run"
        raise SnapshotError(
            f"{source.path}: {generated} rollouts in rollouts/, {kept} of them kept: nothing to "
            f"estimate from{where}, or give --mu, --rho and --growth instead"
        )
    outcomes = outcomes_by_age(source)
    points = growth_points(outcomes)
    return RunEstimates(
        mu=measured_mu(source.metrics),
        survival=kept / generated,
        rollouts_per_step=round(generated / len(source.rollout_files)),
        growth_points=points,
        growth_draws=sum(outcomes[age].uses for age, _, _ in points),
    )


def measured_mu(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns μ of a run: (generation seconds / rollouts generated) / (training seconds / rollouts
    trained on). None if the run trained on nothing or did not log these."""
    names = ("cost/generation_seconds", "cost/generated_rollouts", "cost/training_seconds",
             "cost/trained_rollouts")  # fmt: skip
    lines = [line for line in metrics if all(line.get(name) is not None for name in names)]
    generation, generated, training, _ = (sum(line[name] for line in lines) for name in names)
    trained = sum(map(_updated_rows, lines))
    if min(generation, generated, training, trained) <= 0:
        return None
    return (generation / generated) / (training / trained)


def _updated_rows(line: Mapping[str, Any]) -> int:
    """Returns the rows of a step's updates, recovered from `cost/mu`. They differ from
    `cost/trained_rollouts` in shadow: the host also trains on rollouts that replay drops."""
    mu, generation = line.get("cost/mu"), line["cost/generation_seconds"]
    if mu is None or not generation:
        return line["cost/trained_rollouts"]
    return round(mu * line["cost/training_seconds"] * line["cost/generated_rollouts"] / generation)


def growth_points(outcomes: Mapping[int, AgeOutcome]) -> tuple[GrowthPoint, ...]:
    """Returns a point for every age above 0 at which tokens were trained on."""
    base = outcomes[0].log_ratio_square if 0 in outcomes else 0.0
    return tuple(
        (age, outcome.log_ratio_square - base, float(outcome.tokens))
        for age, outcome in sorted(outcomes.items())
        if age > 0 and outcome.tokens > 0
    )


def alternative_growths(points: Sequence[GrowthPoint]) -> tuple[RatioGrowth, ...]:
    """Returns further fits, to see how uncertain the growth is: without one age in turn, and with
    b = 1 (the policy diffuses) and b = 2 (it drifts), which differ most far beyond the last age."""
    one_left_out = ([*points[:at], *points[at + 1 :]] for at in range(len(points)))
    fits = [*map(fit_growth, one_left_out), fit_growth(points, 1.0), fit_growth(points, 2.0)]
    return tuple(fit or RatioGrowth(0.0, 1.0) for fit in fits)


def fit_growth(points: Sequence[GrowthPoint], exponent: float | None = None) -> RatioGrowth | None:
    """Fits k·s^b to the points by least squares of the logarithms, weighted by tokens.

    b is `exponent` if given. Else it is limited to 0.25 to 2 (the policy drifts straight on), and 1
    (it diffuses) with a single age. None if no age has a mean square above that of fresh rollouts.
    """
    usable = [point for point in points if point[1] > 0]
    if not usable:
        return None
    ages, values, tokens = np.array(usable, dtype=float).T
    log_age, log_value = np.log(ages), np.log(values)
    if exponent is None and len(usable) > 1:  # polyfit squares its weights
        exponent = float(np.clip(np.polyfit(log_age, log_value, 1, w=np.sqrt(tokens))[0], 0.25, 2))
    exponent = 1.0 if exponent is None else exponent
    scale = math.exp(np.average(log_value - exponent * log_age, weights=tokens))
    return RatioGrowth(scale, exponent)
