"""A report as one JSON document: `report --json`."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from grpo_replay.lab.report.report_findings import ArmFindings, Estimate, Findings

FORMAT = 1


def document(findings: Findings) -> dict[str, Any]:
    """Accuracies are fractions. `low` and `high` are quartiles over seeds; `interval` is a 95 %
    interval. A cost that was not reached is null."""
    return {
        "format": FORMAT,
        "name": findings.name,
        "baseline": findings.baseline,
        "benchmarks": list(findings.benchmarks),
        "graded_by": findings.graded_by,
        "mu": {"measured": findings.measured_mu, "given": list(findings.given_mu)},
        "arms": [_arm(arm) for arm in findings.arms],
        "notes": list(findings.notes),
        "tuned": findings.tuned,
    }


def _arm(arm: ArmFindings) -> dict[str, Any]:
    """`difference` is that of the final avg@k; the other scores have their own."""
    found: dict[str, Any] = {
        "name": arm.name,
        "seeds": list(arm.seeds),
        "missing": [{"seed": seed, "reason": why} for seed, why in arm.missing.items()],
        "settings": arm.settings,
        "final": None,
        "difference": None,
    }
    for name, score in arm.scores.items():
        suffix = "" if name == "final" else f"_{name.removeprefix('final_')}"
        found[name] = _plain(score.estimates)
        found[f"difference{suffix}"] = score.difference and _plain(score.difference)
    found["quantities"] = _plain(arm.quantities)
    found["reach"] = [finite(asdict(target)) for target in arm.targets]
    return found


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: asdict(value) for name, value in values.items()}


def finite(value: Any) -> Any:
    """The value with null for every number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def long_rows(findings: Findings) -> list[dict[str, Any]]:
    """Every number as one row: arm, group, item, benchmark, statistic, value."""
    rows = []
    for arm in findings.arms:
        for score, each in arm.scores.items():
            for kind, parts in (("score", each.estimates), ("difference", each.difference or {})):
                for benchmark, part in parts.items():
                    rows += _rows(arm.name, kind, score, benchmark, _numbers(part))
        for name, spread in arm.quantities.items():
            rows += _rows(arm.name, "quantity", name, None, asdict(spread))
        for target in arm.targets:
            for axis, reach in target.costs.items():
                numbers = {"reached": target.reached, "runs": target.runs, **_numbers(reach)}
                rows += _rows(arm.name, f"reach {target.accuracy:g}", axis, None, numbers)
    return rows


def _rows(
    arm: str, group: str, item: str, benchmark: str | None, numbers: Mapping[str, Any]
) -> list[dict[str, Any]]:
    return [
        {
            "arm": arm,
            "group": group,
            "item": item,
            "benchmark": benchmark,
            "statistic": name,
            "value": None if value is None else float(value),
        }
        for name, value in numbers.items()
    ]


def _numbers(part: Estimate | Any) -> dict[str, Any]:
    """The numbers of a dataclass; intervals as two of them."""
    found: dict[str, Any] = {}
    for name, value in asdict(part).items():
        if name == "interval":
            found["interval_low"], found["interval_high"] = value or (None, None)
        elif isinstance(value, int | float) or value is None:
            found[name] = value
    return found
