"""What an arm spent to reach an accuracy. "Not reached" is a result: an infinite cost."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from grpo_replay.lab.report.costs import Axis, cost_to_reach
from grpo_replay.lab.report.finished_run import FinishedRun
from grpo_replay.lab.report.report_findings import Reach, Target, quantile
from grpo_replay.lab.report.scores import Pairs
from grpo_replay.lab.report.two_level import median_interval


def reach_target(
    accuracy: float, runs: Sequence[FinishedRun], pairs: Pairs, costs: Sequence[Axis]
) -> Target:
    """The cost at which each run's mean accuracy first reaches `accuracy`, summarised."""
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
