"""Tables of lengths, clipping, tokens, time, compute and AES."""

from collections.abc import Callable, Sequence

from grpo_replay.evaluation.aes import GAIN, LOSS
from grpo_replay.evaluation.evaluation_tables import percent, tokens
from grpo_replay.lab.report.report_findings import ArmFindings, Findings, Reach, Spread
from grpo_replay.lab.report.text_table import MISSING, TextTable, amount, points

Cell = Callable[[Spread], str]


def _quantity_table(
    findings: Findings, name: str, title: str, legend: str, columns: Sequence[tuple[str, str, Cell]]
) -> TextTable:
    """One row per arm; `columns` are (header, quantity, cell). Without a value: no row."""
    rows = []
    for arm in findings.arms:
        known = [arm.quantities.get(quantity) for _, quantity, _ in columns]
        if any(known):
            cells = [
                MISSING if each is None else cell(each) + _of_runs(each, arm)
                for each, (_, _, cell) in zip(known, columns, strict=True)
            ]
            rows.append([arm.name, *cells])
    return TextTable(name, title, ("arm", *(header for header, _, _ in columns)), rows, legend)


def _of_runs(spread: Spread, arm: ArmFindings) -> str:
    """A mark if not all runs have the quantity."""
    return "" if spread.runs == arm.runs else f" ({spread.runs})"


def aes_table(findings: Findings) -> TextTable:
    columns: list[tuple[str, str, Cell]] = []
    for against, key in (("base", "aes_base"), (findings.baseline, "aes_baseline")):
        columns += [
            (against, key, lambda each: f"{each.mean:+.3f}"),
            ("median", key, lambda each: f"{each.median:+.3f}"),
            ("quartiles", key, lambda each: f"[{each.low:+.3f}, {each.high:+.3f}]"),
        ]
    legend = (
        f"AES = ΔL + β·ΔAcc of every seed, β = {GAIN:g} if ΔAcc ≥ 0, else {LOSS:g}; mean, median "
        "and quartiles over seeds. (n): of n runs."
    )
    return _quantity_table(
        findings, "aes", f"AES against base, and against {findings.baseline}", legend, columns
    )


def length_table(findings: Findings) -> TextTable:
    columns: list[tuple[str, str, Cell]] = []
    for header, key in (("all", "tokens"), ("right", "tokens_correct"),
                        ("wrong", "tokens_incorrect")):  # fmt: skip
        columns += [
            (header, key, lambda each: tokens(each.mean)),
            ("Δ %", f"{key}_change", lambda each: points(each.mean)),
        ]
    columns.append(("cut", "truncation_rate", lambda each: percent(each.mean)))
    legend = (
        "mean tokens of final completions, of right and of wrong ones; means over seeds; Δ: "
        f"relative to {findings.baseline} at the same seed; cut: % that reached the length limit. "
        "(n): of n runs."
    )
    return _quantity_table(findings, "lengths", "completion lengths", legend, columns)


def clip_table(findings: Findings) -> TextTable:
    def rate(each: Spread) -> str:
        return f"{100 * each.mean:.2f}"

    def quartiles(each: Spread) -> str:
        return f"[{100 * each.low:.2f}, {100 * each.high:.2f}]"

    columns: list[tuple[str, str, Cell]] = [
        ("fresh %", "clip_fraction_fresh", rate),
        ("quartiles", "clip_fraction_fresh", quartiles),
        ("replayed %", "clip_fraction_replayed", rate),
        ("quartiles", "clip_fraction_replayed", quartiles),
        ("age", "age_mean", lambda each: f"{each.mean:.1f}"),
        ("ratio", "replay_ratio", lambda each: f"{each.mean:.2f}"),
    ]
    legend = (
        "share of tokens whose gradient the clip removed, mean over steps; age of replayed "
        "rollouts in steps; replayed per fresh. Means and quartiles over seeds; (n): of n runs."
    )
    return _quantity_table(findings, "clipping", "clip fraction and replay", legend, columns)


def cost_table(findings: Findings) -> TextTable:
    columns: list[tuple[str, str, Cell]] = [
        ("generated", "generated_tokens", lambda each: amount(each.mean)),
        ("trained", "trained_tokens", lambda each: amount(each.mean)),
        ("steps, s", "training_seconds", lambda each: amount(each.mean)),
        ("wall, s", "wall_seconds", lambda each: amount(each.mean)),
        ("quartiles", "wall_seconds", lambda each: f"[{amount(each.low)}, {amount(each.high)}]"),
        ("μ", "mu", lambda each: f"{each.median:.2f}"),
    ]
    legend = (
        "tokens generated and trained on; seconds of the training steps, and of the whole run; "
        "means over seeds; μ: median over seeds. (n): of n runs."
    )
    return _quantity_table(findings, "costs", "tokens and time", legend, columns)


def compute_table(findings: Findings) -> TextTable:
    columns: list[tuple[str, str, Cell]] = [
        (_mu_title(findings, key), key, lambda each: amount(each.mean))
        for key in findings.axes
        if key.startswith("compute")
    ]
    if not columns:
        return TextTable("compute", "", (), [], "")
    legend = "Σ (B + μR) in rollouts trained on, mean over seeds."
    return _quantity_table(findings, "compute", "compute of a run", legend, columns)


def _mu_title(findings: Findings, key: str) -> str:
    if key == "compute_measured":
        return f"μ = {findings.measured_mu:.3g} (measured)"
    return f"μ = {key.removeprefix('compute_')}"


def reach_tables(findings: Findings) -> list[TextTable]:
    """Brief: steps, tokens and compute at the measured μ. In full: every axis."""
    main = "compute_measured" if "compute_measured" in findings.axes else "generated_tokens"
    brief, full = [], []
    for index in range(max((len(arm.targets) for arm in findings.arms), default=0)):
        for arm in findings.arms:
            if not arm.targets:
                continue
            target = arm.targets[index]
            start = [percent(target.accuracy), arm.name, f"{target.reached} of {target.runs}"]
            costs = target.costs
            shown = [_median(costs.get(key)) for key in ("steps", "generated_tokens")]
            brief.append([*start, *shown, *_reach_cells(costs[main])])
            full += [[*start, label, *_reach_cells(costs[key], quartiles=True)]
                     for key, label in findings.axes.items()]  # fmt: skip
    unit = "compute" if main == "compute_measured" else "tokens"
    header = ("accuracy", "arm", "reached", "steps", "tokens", unit, "95 %", "ratio")
    legend = (
        "the cost at which the mean avg@k first reaches the accuracy, interpolated between "
        "evaluations: median over seeds, and 95 % interval of the median (six seeds or more); ∞: "
        f"not reached; ratio: to {findings.baseline} at the same seed, median of the seeds in "
        "which both reached it. Compute: Σ (B + μR)"
        + (f", μ = {findings.measured_mu:.3g} as measured." if findings.measured_mu else ".")
    )
    every = ("accuracy", "arm", "reached", "cost", "median", "quartiles", "95 %", "ratio")
    return [
        TextTable("reach", "cost to reach an accuracy", header, brief, legend),
        TextTable("reach_all", "cost to reach an accuracy, by every axis", every, full, legend,
                  brief=False),
    ]  # fmt: skip


def _median(reach: Reach | None) -> str:
    return MISSING if reach is None else amount(reach.median)


def _reach_cells(reach: Reach, quartiles: bool = False) -> list[str]:
    interval, ratio = reach.interval, reach.ratio
    return [
        amount(reach.median),
        *([f"[{amount(reach.low)}, {amount(reach.high)}]"] if quartiles else []),
        MISSING if interval is None else f"[{amount(interval[0])}, {amount(interval[1])}]",
        MISSING if ratio is None else f"{ratio:.2f} ({reach.ratio_seeds})",
    ]
