"""What a run spent until a training step, what it spent to reach an accuracy, and what else is
compared between arms: lengths, clipping, tokens, time, compute and AES.

Compute follows paper B's deterministic form: a step that trains on B rollouts and generates R costs
c = B + μR, in units of training on one rollout once; μ is the cost of generating one rollout over
that. Two arms are compared at one μ. Where recipes name workers and trainers, it is also charged as
the paper does: γ(W, T) for each rollout trained on, 1 without a buffer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_replay.evaluation.aes import accuracy_efficiency_score
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.lab.planning.estimate import measured_mu
from grpo_replay.lab.report.finished_run import AGE_STEPS, FinishedRun, Outcome
from grpo_replay.lab.report.report_findings import Spread
from grpo_replay.storage.rollout_log import mean_over_steps

Pairs = Sequence[tuple[FinishedRun, FinishedRun]]
"""(the arm's run, the baseline's run) of every common seed."""

STEP_MEANS = {
    "clip_fraction_fresh": "fresh/clip_fraction",
    "clip_fraction_replayed": "replay/clip_fraction",
    "age_mean": AGE_STEPS,
    "replay_ratio": "replay/ratio",
}
STEP_SUMS = {
    "generated_tokens": "cost/generated_tokens",
    "trained_tokens": "cost/trained_tokens",
    "training_seconds": "step_time",
}
LENGTHS = {
    "tokens": "mean_tokens",
    "tokens_correct": "mean_tokens_correct",
    "tokens_incorrect": "mean_tokens_incorrect",
    "truncation_rate": "truncation_rate",
}

MAIN_AXES = ("compute_machines", "compute_measured", "generated_tokens")
OWN_BEST = 0.98
"""Share of a run's best outcome that counts as having reached it (paper B, Figure 14)."""

Columns = dict[str, Sequence[float | None]]
"""Values by name, one per run; None where a run does not have it."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A cost over training. `total` is float64 [T + 1]: the cost up to each step, from step 0."""

    key: str
    label: str
    total: Callable[[FinishedRun], np.ndarray]


def axes(
    measured: float | None, given: Sequence[float], of_machines: float | None = None
) -> list[Axis]:
    """Steps, generated tokens, compute at each μ and at γ(W, T), and time of the training steps.
    `of_machines` is the μ of the recipes that name workers and trainers."""
    found = [
        Axis("steps", "training steps", lambda run: np.arange(len(run.log) + 1.0)),
        Axis(
            "generated_tokens",
            "generated tokens",
            lambda run: run.log.running_total("cost/generated_tokens"),
        ),
    ]
    if measured is not None:
        found.append(_compute_axis("compute_measured", measured, "measured"))
    found += [_compute_axis(f"compute_{mu:g}", mu, "given") for mu in given]
    if of_machines is not None:
        label = "compute at γ of (W, T), rollouts"
        found.append(Axis("compute_machines", label, lambda run: _charged(run, of_machines)))
    found.append(
        Axis("seconds", "training time, s", lambda run: run.log.running_total("step_time"))
    )
    return found


def _compute_axis(key: str, mu: float, source: str) -> Axis:
    label = f"compute at μ = {mu:.3g} ({source}), rollouts trained"
    return Axis(key, label, lambda run: compute(run, mu))


def compute(run: FinishedRun, mu: float) -> np.ndarray:
    """float64 [T + 1]: Σ (B + μR) up to each step. NaN if the run did not log B."""
    return run.log.running_total("cost/trained_rollouts") + mu * _generated_rollouts(run)


def _charged(run: FinishedRun, mu: float) -> np.ndarray:
    """float64 [T + 1]: Σ γB up to each step, with γ of the recipe's (W, T); NaN with a buffer and
    no (W, T). Without a buffer Σ (B + μR)/(1 + μ): 1 for a rollout that is generated and trained
    on, μ/(1 + μ) for one that is dropped."""
    assert run.recipe is not None
    replay = run.recipe.replay
    if not replay.replays:
        return compute(run, mu) / (1 + mu)
    gamma = math.nan if replay.machines is None else replay.machines.gamma
    return gamma * run.log.running_total("cost/trained_rollouts")


def _generated_rollouts(run: FinishedRun) -> np.ndarray:
    """float64 [T + 1]: ΣR up to each step. For steps older than the metric, R is the recipe's."""
    assert run.recipe is not None
    planned = run.recipe.rollouts_per_step
    generated = [line.get("cost/generated_rollouts", planned) for line in run.log.lines]
    return np.concatenate([[0.0], np.cumsum(generated)])


def mu_of(run: FinishedRun) -> float | None:
    """The μ that a run measured; None for an evaluation file, or without the costs."""
    if run.recipe is None:
        return None
    return measured_mu(run.log.lines, run.recipe.rollouts_per_step)


def cost_to_reach(run: FinishedRun, accuracy: float, axis: Axis, outcome: Outcome) -> float:
    """The cost at which the outcome first reaches `accuracy`; infinite if it never does.

    Between two evaluations, accuracy and cost are interpolated linearly.
    """
    steps, accuracies = run.curve(outcome)
    return first_crossing(axis.total(run)[steps].tolist(), accuracies, accuracy)


def first_crossing(costs: Sequence[float], accuracies: Sequence[float], target: float) -> float:
    """The cost at which a piecewise linear curve first reaches `target`; infinite if never."""
    for index, accuracy in enumerate(accuracies):
        if accuracy >= target:
            if index == 0:
                return costs[0]
            before, start = accuracies[index - 1], costs[index - 1]
            share = (target - before) / (accuracy - before)
            return start + share * (costs[index] - start)
    return math.inf


def main_axis(costs: Sequence[Axis]) -> Axis | None:
    """The cost of tables with one cost; None without a cost."""
    by_key = {axis.key: axis for axis in costs}
    return next((by_key[key] for key in (*MAIN_AXES, *by_key) if key in by_key), None)


def course(runs: Sequence[FinishedRun], axis: Axis, outcome: Outcome) -> Columns:
    """Paper B's numbers of whole curves: the cost to `OWN_BEST` of a run's best outcome; whether it
    collapsed, its last evaluation having lost over half of what it had gained at best (1 or 0; 0 if
    the interval of its best evaluation does not lie above that of its first: nothing was gained);
    and the maximum of the median curve over seeds, the same for every run."""
    curves = [run.curve(outcome) for run in runs]
    if any(len(steps) < 2 or steps != curves[0][0] for steps, _ in curves) or not curves:
        return {}
    values_SE = np.array([values for _, values in curves])
    best_S, first_S = values_SE.max(axis=1), values_SE[:, 0]
    lost_S = values_SE[:, -1] < (best_S + first_S) / 2
    gained_S = np.array([_has_gained(run, outcome) for run in runs])
    to_best = [
        first_crossing(axis.total(run)[steps].tolist(), values, OWN_BEST * max(values))
        for run, (steps, values) in zip(runs, curves, strict=True)
    ]
    return {
        "cost_to_98": to_best,
        "collapsed": (gained_S & lost_S).astype(float).tolist(),
        "peak_of_median": [float(np.median(values_SE, axis=0).max())] * len(runs),
    }


def _has_gained(run: FinishedRun, outcome: Outcome) -> bool:
    """Whether the 95 % interval of the best evaluation lies above that of the first."""
    reports = list(run.evaluations.values())
    return outcome.bounds(max(reports, key=outcome.of))[0] > outcome.bounds(reports[0])[1]


def frontier(
    arms: Mapping[str, Sequence[FinishedRun]], axis: Axis, outcome: Outcome
) -> list[tuple[float, float, str, int]]:
    """(cost, outcome, arm, step) of the evaluations that no cheaper one equals, over all arms:
    medians over seeds. With arms at several learning rates, paper B's Pareto frontier."""
    points = []
    for name, runs in arms.items():
        common = set.intersection(*(set(run.evaluations) for run in runs)) if runs else set()
        for step in common:
            values = [outcome.of(run.evaluations[step]) for run in runs]
            cost = np.median([axis.total(run)[step] for run in runs])
            points.append((float(cost), float(np.median(values)), name, step))
    points.sort(key=lambda point: (point[0], -point[1]))
    highest = np.maximum.accumulate([-np.inf, *(value for _, value, _, _ in points)])
    return [point for point, before in zip(points, highest, strict=False) if point[1] > before]


def measure_quantities(
    runs: Sequence[FinishedRun], pairs: Pairs, costs: Sequence[Axis], outcome: Outcome
) -> dict[str, Spread]:
    """Spreads over the runs that have a quantity; one that no run has is left out.

    `pairs` are with the baseline, and empty for the baseline itself.
    """
    trained = [run for run in runs if run.recipe is not None]
    found = _lengths(runs, pairs) | _means_and_sums(trained)
    for axis in costs:
        if axis.key.startswith("compute"):
            found[axis.key] = [float(axis.total(run)[-1]) for run in trained]
    main = main_axis(costs)
    if main is not None:
        found |= course(trained, main, outcome)
    found["wall_seconds"] = [run.wall_seconds for run in trained]
    found["mu"] = [mu_of(run) for run in trained]
    found["base"] = [outcome.of(run.base) if run.base else None for run in trained]
    found["aes_base"] = [_aes(run.final, run.base) for run in trained]
    found["aes_baseline"] = [_aes(a.final, b.final) for a, b in pairs]
    return {
        name: Spread.of(known)
        for name, values in found.items()
        if (known := [value for value in values if value is not None])
    }


def _lengths(runs: Sequence[FinishedRun], pairs: Pairs) -> Columns:
    found: Columns = {}
    for name, key in LENGTHS.items():
        found[name] = [getattr(run.final.sampled.mean, key) for run in runs]
        if name != "truncation_rate":
            found[f"{name}_change"] = [_change(a, b, key) for a, b in pairs]
    return found


def _means_and_sums(trained: Sequence[FinishedRun]) -> Columns:
    found: Columns = {}
    for name, metric in STEP_MEANS.items():
        found[name] = [mean_over_steps(metric, run.log.lines) for run in trained]
    for name, metric in STEP_SUMS.items():
        totals = [float(run.log.running_total(metric)[-1]) for run in trained]
        found[name] = [None if np.isnan(total) else total for total in totals]
    return found


def _change(a: FinishedRun, b: FinishedRun, key: str) -> float | None:
    """The relative change of a length from the baseline's to the arm's."""
    ours, theirs = (getattr(run.final.sampled.mean, key) for run in (a, b))
    return (ours - theirs) / theirs if theirs and ours is not None else None


def _aes(report: EvaluationReport, reference: EvaluationReport | None) -> float | None:
    """AES of a run against a reference; None if the reference has accuracy or length 0."""
    if reference is None:
        return None
    ours, theirs = report.sampled.mean, reference.sampled.mean
    if not (theirs.avg_at_k and theirs.mean_tokens):
        return None
    return accuracy_efficiency_score(
        ours.avg_at_k, ours.mean_tokens, theirs.avg_at_k, theirs.mean_tokens
    )[2]
