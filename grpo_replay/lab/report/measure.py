"""Computes the `Findings` of an experiment: every number of a report."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from grpo_replay.lab.report.arms import Arm, chosen_keys, settings_of
from grpo_replay.lab.report.collect import Experiment
from grpo_replay.lab.report.costs import Axis, axes, cost_to_reach, mu_of
from grpo_replay.lab.report.finished_run import FinishedRun
from grpo_replay.lab.report.quantities import measure_quantities
from grpo_replay.lab.report.report_findings import ArmFindings, Findings, Reach, Target, quantile
from grpo_replay.lab.report.scores import Pairs, score_arm
from grpo_replay.lab.report.two_level import median_interval

GAIN_SHARES = (0.5, 0.75, 0.9)
"""Default targets: shares of the way from the base to the baseline's median final accuracy."""


def measure(
    experiment: Experiment, targets: Sequence[float] = (), given_mu: Sequence[float] = ()
) -> Findings:
    """The findings. `targets` are accuracies as fractions; default: `GAIN_SHARES`."""
    first = experiment.runs[0].final
    mu = measured_mu_of(experiment)
    costs = usable_axes(experiment, given_mu)
    targets = targets or default_targets(experiment.baseline)
    keys = chosen_keys(experiment.arms)
    benchmarks = tuple(first.sampled.benchmarks)
    described = first.settings["benchmarks"]
    return Findings(
        name=experiment.name,
        baseline=experiment.baseline.name,
        benchmarks=benchmarks,
        titles={name: described.get(name, {}).get("title", name) for name in benchmarks},
        graded_by=first.verifier,
        measured_mu=mu,
        given_mu=tuple(given_mu),
        axes={axis.key: axis.label for axis in costs},
        arms=tuple(_arm(arm, experiment.baseline, keys, costs, targets) for arm in experiment.arms),
        notes=experiment.notes,
        tuned=experiment.tuned,
    )


def measured_mu_of(experiment: Experiment) -> float | None:
    """The median over all runs of the μ that each measured; None if none did."""
    known = [mu for run in experiment.runs if (mu := mu_of(run)) is not None]
    return median(known) if known else None


def usable_axes(experiment: Experiment, given_mu: Sequence[float]) -> list[Axis]:
    """The costs that every run logged."""
    trained = [run for run in experiment.runs if run.recipe is not None]
    return [
        axis
        for axis in axes(measured_mu_of(experiment), given_mu)
        if trained and all(np.isfinite(axis.total(run)[-1]) for run in trained)
    ]


def default_targets(baseline: Arm) -> list[float]:
    """Accuracies on the way from the base to the baseline; none if it did not learn or has no
    evaluation of the base."""
    runs = list(baseline.runs.values())
    bases = [run.base.sampled.mean.avg_at_k for run in runs if run.base is not None]
    if not bases:
        return []
    start = median(bases)
    gain = median(run.final.sampled.mean.avg_at_k for run in runs) - start
    return [round(start + share * gain, 3) for share in GAIN_SHARES] if gain > 0 else []


def _arm(
    arm: Arm, baseline: Arm, keys: Sequence[str], costs: Sequence[Axis], targets: Sequence[float]
) -> ArmFindings:
    runs = list(arm.runs.values())
    trained = [run for run in runs if run.recipe is not None]
    own = settings_of(arm.recipe)
    pairs = [(run, baseline.runs[s]) for s, run in arm.runs.items() if s in baseline.runs]
    others = [] if arm is baseline else pairs
    return ArmFindings(
        name=arm.name,
        seeds=tuple(arm.seeds),
        runs=len(runs),
        missing=arm.missing,
        settings={key: own[key] for key in keys if key in own and _has_effect(arm, key)},
        scores=score_arm(runs, others) if runs else {},
        quantities=measure_quantities(runs, others, costs),
        targets=tuple(reach_target(each, trained, pairs, costs) for each in targets if trained),
    )


def _has_effect(arm: Arm, key: str) -> bool:
    """False for the replay keys of an arm that does not replay, except the preset."""
    if arm.recipe is None or arm.recipe.replays:
        return True
    return key == "replay.preset" or not key.startswith("replay.")


def reach_target(
    accuracy: float, runs: Sequence[FinishedRun], pairs: Pairs, costs: Sequence[Axis]
) -> Target:
    """The cost at which each run's mean accuracy first reaches `accuracy`, summarised. "Not
    reached" is a result: an infinite cost."""
    reached = sum(max(run.curve()[1]) >= accuracy for run in runs)
    both = [(a, b) for a, b in pairs if b.recipe is not None]
    return Target(
        accuracy,
        reached,
        len(runs),
        {axis.key: _reach(accuracy, runs, both, axis) for axis in costs},
    )


def _reach(accuracy: float, runs: Sequence[FinishedRun], pairs: Pairs, axis: Axis) -> Reach:
    ordered = sorted(cost_to_reach(run, accuracy, axis) for run in runs)
    ratios = [
        ours / theirs
        for a, b in pairs
        if np.isfinite(ours := cost_to_reach(a, accuracy, axis))
        and np.isfinite(theirs := cost_to_reach(b, accuracy, axis))
        and theirs > 0
    ]
    return Reach(
        median=quantile(ordered, 0.5),
        low=quantile(ordered, 0.25),
        high=quantile(ordered, 0.75),
        interval=median_interval(ordered),
        ratio=median(ratios) if ratios else None,
        ratio_seeds=len(ratios),
    )
