"""Costs of a run up to a training step and to an accuracy, and the μ above which an arm reaches an
accuracy for less than the baseline.

Compute follows paper B's deterministic form: a step that trains on B rollouts and generates R costs
c = B + μR, in units of training on one rollout once; μ is the cost of generating one rollout over
that. Two arms are compared at one μ. If recipes name workers and trainers, compute is also charged
as in the paper: γ(W, T) for each rollout trained on, 1 without a buffer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy.special import stdtrit

from grpo_replay.evaluation.statistics import CONFIDENCE, EQUAL
from grpo_replay.lab.planning.estimate import measured_mu
from grpo_replay.lab.report.finished_run import FinishedRun, Outcome
from grpo_replay.lab.report.two_level import FEWEST_SEEDS

Pairs = Sequence[tuple[FinishedRun, FinishedRun]]
"""(the arm's run, the baseline's run) of every common seed."""

MAIN_AXES = ("compute_machines", "compute_measured", "generated_tokens")
OWN_BEST = 0.98
"""Share of a run's best outcome that counts as having reached it (paper B, Figure 14)."""


FEWEST_EVALUATIONS = 4
"""Minimum number of a run's evaluations, with the base's, for interpolation: with fewer, a straight
line lies far below a curve that rises early."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A cost over training. `total` is float64 [T + 1]: the cost up to each step, from step 0."""

    key: str
    label: str
    total: Callable[[FinishedRun], np.ndarray]


def _metric_axis(key: str, label: str, metric: str) -> Axis:
    return Axis(key, label, lambda run: run.running_total(metric))


TRAINED = _metric_axis("trained", "rollouts trained on", "cost/trained_rollouts")
GENERATED = _metric_axis("generated", "rollouts generated", "cost/generated_rollouts")
SECONDS = _metric_axis("seconds", "training time, s", "step_time")


def usable_axes(runs: Sequence[FinishedRun], given_mu: Sequence[float]) -> list[Axis]:
    """List the axes that every run logged: steps, generated tokens, compute at the measured and at
    each given μ and at γ(W, T), and time of the training steps."""
    axes = [
        Axis("steps", "training steps", lambda run: np.arange(len(run.lines) + 1.0)),
        _metric_axis("generated_tokens", "generated tokens", "cost/generated_tokens"),
    ]
    if (measured := measured_mu_of(runs)) is not None:
        axes.append(_compute_axis("compute_measured", measured, "measured"))
    axes += [_compute_axis(f"compute_{mu:g}", mu, "given") for mu in given_mu]
    machines = [run.recipe.replay.machines for run in runs]
    if machine_mu := [ratio.mu for ratio in machines if ratio]:
        mu, label = median(machine_mu), "compute at γ of (W, T), rollouts"
        axes.append(Axis("compute_machines", label, lambda run: _charged(run, mu)))
    axes.append(SECONDS)
    return [axis for axis in axes if all(np.isfinite(axis.total(run)[-1]) for run in runs)]


def measured_mu_of(runs: Sequence[FinishedRun]) -> float | None:
    """Returns the median over all runs of the μ that each measured; None if none did."""
    known = [mu for run in runs if (mu := measured_mu(run.lines)) is not None]
    return median(known) if known else None


def _compute_axis(key: str, mu: float, source: str) -> Axis:
    label = f"compute at μ = {mu:.3g} ({source}), rollouts trained"
    return Axis(key, label, lambda run: compute(run, mu))


def compute(run: FinishedRun, mu: float) -> np.ndarray:
    """float64 [T + 1]: Σ (B + μR) up to each step. NaN if the run did not log B."""
    return TRAINED.total(run) + mu * GENERATED.total(run)


def _charged(run: FinishedRun, mu: float) -> np.ndarray:
    """Computes Σ γB up to each step, float64 [T + 1], with γ of the recipe's (W, T). Without a
    buffer or (W, T) it is Σ (B + μR)/(1 + μ), which charges 1 for a rollout that is generated and
    trained on, and μ/(1 + μ) for a dropped one."""
    replay = run.recipe.replay
    if replay.machines is None or not replay.trains_on_draws:
        return compute(run, mu) / (1 + mu)
    return replay.machines.gamma * TRAINED.total(run)


def cost_to_reach(run: FinishedRun, accuracy: float, axis: Axis, outcome: Outcome) -> float:
    """Returns the cost at which the outcome first reaches `accuracy`; infinite if it never does.

    Between two evaluations, accuracy and cost are interpolated linearly.
    """
    steps, accuracies = run.curve(outcome)
    return first_crossing(axis.total(run)[steps].tolist(), accuracies, accuracy)


def first_crossing(costs: Sequence[float], accuracies: Sequence[float], target: float) -> float:
    """Return the cost at which a piecewise linear curve first reaches `target`; inf if never."""
    for index, accuracy in enumerate(accuracies):
        if accuracy >= target:
            if index == 0:
                return costs[0]
            before, start = accuracies[index - 1], costs[index - 1]
            share = (target - before) / (accuracy - before)
            return start + share * (costs[index] - start)
    return math.inf


def rollouts_to_reach(pairs: Pairs, accuracy: float, outcome: Outcome) -> np.ndarray:
    """Return rollouts trained on and generated up to an accuracy, float64 [S, 2, 2]: seed, (arm,
    baseline), (trained, generated), of the seeds in which both reached it."""
    spent = [
        [
            [cost_to_reach(run, accuracy, axis, outcome) for axis in (TRAINED, GENERATED)]
            for run in pair
        ]
        for pair in pairs
    ]
    spent_S22 = np.array(spent, dtype=float).reshape(-1, 2, 2)
    return spent_S22[np.isfinite(spent_S22).all(axis=(1, 2))]


def break_even(spent_S22: np.ndarray) -> dict[str, Any] | None:
    """Compute the μ at which an arm's T + μG equals the baseline's, both means over the seeds of
    `rollouts_to_reach`: μ* = (T_arm - T_base)/(G_base - G_arm). None without a seed, or if the
    costs are equal at every seed.

    `pays` says where the arm costs less: `above` or `below` μ*, `always` or `never`. The interval
    has every μ ≥ 0 at which the 95 % t interval of the paired difference in cost includes 0
    (Fieller 1954). It is unbounded if the seeds do not show that the arm generates less, and None
    if they show that the costs differ at every μ.
    """
    if not len(spent_S22):
        return None
    difference_S2 = spent_S22[:, 0] - spent_S22[:, 1]
    is_equal_S2 = abs(difference_S2) < EQUAL * spent_S22.max()  # interpolation rounds
    difference_S2[is_equal_S2] = 0.0
    if not difference_S2.any():
        return None
    extra_S, saved_S = difference_S2.T * [[1], [-1]]
    extra, saved = float(extra_S.mean()), float(saved_S.mean())
    if extra * saved > 0:
        pays = "above" if saved > 0 else "below"
    else:
        pays = "always" if saved > 0 or (saved == 0 and extra < 0) else "never"
    return {
        "pays": pays,
        "mu": extra / saved if pays in ("above", "below") else None,
        "interval": _fieller(extra_S, saved_S),
        "seeds": len(spent_S22),
    }


def cost_ratio(spent_S22: np.ndarray, mu: float) -> tuple[float, tuple[float, float] | None]:
    """T + μG of an arm over that of the baseline, both means over the seeds of `rollouts_to_reach`,
    and its 95 % interval (Fieller 1954): it holds 1 at the μ of the interval of `break_even`."""
    arm_S, base_S = (spent_S22 @ [1.0, mu]).T
    return float(arm_S.mean() / base_S.mean()), _fieller(arm_S, base_S)


def _fieller(extra_S: np.ndarray, saved_S: np.ndarray) -> tuple[float, float] | None:
    """Computes the interval of x ≥ 0 at which the t interval of the mean of extra - x·saved
    includes 0 (Fieller 1954); None if there is no such x, or for fewer than `FEWEST_SEEDS`."""
    seeds = len(extra_S)
    if seeds < FEWEST_SEEDS:
        return None
    (var_extra, covariance), (_, var_saved) = np.cov(extra_S, saved_S) / seeds
    squared = float(stdtrit(seeds - 1, (1 + CONFIDENCE) / 2)) ** 2
    a = saved_S.mean() ** 2 - squared * var_saved
    half_b = extra_S.mean() * saved_S.mean() - squared * covariance
    c = extra_S.mean() ** 2 - squared * var_extra
    root = math.sqrt(max(half_b**2 - a * c, 0.0))
    if a == half_b == 0 < c:
        return None
    if a <= 0:  # all x outside the two roots, one of which is negative if c > 0
        return (float((half_b - root) / a) if a < 0 < c else 0.0, math.inf)
    low, high = (half_b - root) / a, (half_b + root) / a
    return None if high < 0 else (max(0.0, float(low)), float(high))


def main_axis(costs: Sequence[Axis]) -> Axis:
    """Returns the axis of tables that show a single cost."""
    by_key = {axis.key: axis for axis in costs}
    return next(by_key[key] for key in (*MAIN_AXES, *by_key) if key in by_key)


def course(
    runs: Sequence[FinishedRun], axis: Axis, outcome: Outcome
) -> dict[str, Sequence[float | None]]:
    """Compute paper B's summaries of whole curves, a value per run: the cost to `OWN_BEST` of its
    best outcome, and the maximum of the median curve over seeds, which all runs share. Empty if the
    runs were evaluated at different or too few steps."""
    curves = [run.curve(outcome) for run in runs]
    if not curves or any(steps != curves[0][0] for steps, _ in curves):
        return {}
    if len(curves[0][0]) < FEWEST_EVALUATIONS:
        return {}
    values_SE = np.array([values for _, values in curves])
    return {
        "cost_to_98": [
            first_crossing(axis.total(run)[steps].tolist(), values, OWN_BEST * max(values))
            for run, (steps, values) in zip(runs, curves, strict=True)
        ],
        "peak_of_median": [float(np.median(values_SE, axis=0).max())] * len(runs),
    }


def frontier(
    arms: Mapping[str, Sequence[FinishedRun]], axis: Axis, outcome: Outcome
) -> list[dict[str, Any]]:
    """Compute the Pareto frontier of paper B over all arms: cost, accuracy, arm and step of the
    evaluations, as medians over seeds, that are better than every cheaper one."""
    points = []
    for name, runs in arms.items():
        common = set.intersection(*(set(run.evaluations) for run in runs)) if runs else set()
        for step in common:
            values = [outcome.of(run.evaluations[step]) for run in runs]
            cost = np.median([axis.total(run)[step] for run in runs])
            points.append((float(cost), float(np.median(values)), name, step))
    points.sort(key=lambda point: (point[0], -point[1]))
    highest = np.maximum.accumulate([-np.inf, *(value for _, value, _, _ in points)])
    best = [point for point, previous in zip(points, highest) if point[1] > previous]
    return [dict(zip(("cost", "accuracy", "arm", "step"), point)) for point in best]
