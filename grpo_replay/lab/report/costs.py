"""What a run spent until a training step, and what it spent to reach an accuracy.

Compute follows paper B's deterministic form: a step that trains on B rollouts and generates R costs
c = B + μR, in units of training on one rollout once; μ is the cost of generating one rollout over
that. Two arms are compared at one μ.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_replay.lab.planning.estimate import measured_mu
from grpo_replay.lab.report.finished_run import FinishedRun

PAPER_MU = (5.28, 6.84)
"""μ that paper B measured, for Qwen2.5-7B and Qwen3-0.6B."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A cost over training. `total` is float64 [T + 1]: the cost up to each step, from step 0."""

    key: str
    label: str
    total: Callable[[FinishedRun], np.ndarray]


def axes(measured: float | None, given: Sequence[float]) -> list[Axis]:
    """Steps, generated tokens, compute at each μ, and time of the training steps."""
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


def cost_to_reach(run: FinishedRun, accuracy: float, axis: Axis) -> float:
    """The cost at which the mean accuracy first reaches `accuracy`; infinite if it never does.

    Between two evaluations, accuracy and cost are interpolated linearly.
    """
    steps, accuracies = run.curve()
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
