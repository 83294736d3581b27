"""Ablations: arms that differ from the baseline in the same recipe keys, as one table."""

from collections.abc import Sequence
from functools import partial

from grpo_replay.lab.report.report_findings import ArmFindings, Findings


def ablation_rows(findings: Findings) -> list[tuple[tuple[str, ...], list[ArmFindings]]]:
    """(keys, arms) of every table, the baseline among the arms, ordered by the values of the keys.

    Arms belong together if they differ from the baseline in the same keys, or in some of them: r,
    α, and both at once make one table of (r, α).
    """
    baseline = findings.arm(findings.baseline)
    every = dict.fromkeys(key for arm in findings.arms for key in arm.settings)
    changed = {
        arm.name: keys
        for arm in findings.arms
        if arm is not baseline and arm.scores and (keys := _changed(arm, baseline))
    }
    found = []
    for keys in _largest(list(changed.values())):
        arms = [arm for arm in findings.arms if arm.name in changed and changed[arm.name] <= keys]
        ordered = tuple(key for key in every if key in keys)
        found.append((ordered, sorted([baseline, *arms], key=partial(_order, ordered))))
    return found


def _changed(arm: ArmFindings, baseline: ArmFindings) -> frozenset[str]:
    """The keys of an arm with another value than the baseline's, or without effect there."""
    return frozenset(
        key
        for key, value in arm.settings.items()
        if key not in baseline.settings or value != baseline.settings[key]
    )


def _largest(sets: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """The distinct sets that are not part of another."""
    distinct = list(dict.fromkeys(sets))
    return [keys for keys in distinct if not any(keys < other for other in distinct)]


def _order(keys: Sequence[str], arm: ArmFindings) -> list[tuple[bool, float, str]]:
    """Numbers by size, then text."""
    values = [arm.settings.get(key) for key in keys]
    return [
        (False, float(value), "") if isinstance(value, int | float) else (True, 0.0, str(value))
        for value in values
    ]
