"""What a report says in words: what is compared, what is missing, and what to beware of."""

from grpo_replay.lab.report.report_findings import Findings


def facts_of(findings: Findings) -> list[str]:
    """Baseline, benchmarks, verifier and μ, one fact each."""
    facts = [
        f"baseline {findings.baseline}",
        f"benchmarks {', '.join(findings.titles[name] for name in findings.benchmarks)}",
        f"graded by {findings.graded_by}",
    ]
    if findings.measured_mu is not None:
        facts.append(f"μ = {findings.measured_mu:.3g} measured (median over all runs)")
    return facts


def warnings_of(findings: Findings) -> list[str]:
    """Missing seeds with their reasons, arms without a common seed, and other differences."""
    found = [
        f"missing: {arm.name}, seed {seed}: {reason}"
        for arm in findings.arms
        for seed, reason in arm.missing.items()
    ]
    return [*found, *_unpaired(findings), *findings.notes]


def _unpaired(findings: Findings) -> list[str]:
    baseline = findings.arm(findings.baseline)
    found = []
    for arm in findings.arms:
        if arm is baseline or not arm.scores:
            continue
        if arm.scores["final"].difference is None:
            found.append(
                f"{arm.name} has no seed in common with {baseline.name}: no paired difference"
            )
        elif lone := [seed for seed in arm.seeds if seed not in baseline.seeds]:
            found.append(
                f"{arm.name}: seeds {', '.join(map(str, lone))} are not paired, because "
                f"{baseline.name} does not have them"
            )
    return found
