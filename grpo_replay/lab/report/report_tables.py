"""The tables of a report, and what it says in words.

The cells are the same in the terminal, Markdown, LaTeX and HTML.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_replay.evaluation.aes import GAIN, LOSS
from grpo_replay.evaluation.evaluation_tables import p_value, percent, percent_interval, tokens
from grpo_replay.evaluation.statistics import Interval
from grpo_replay.lab.report.report_findings import ArmFindings, Estimate, Findings, Spread
from grpo_replay.lab.report.two_level import FEWEST_SEEDS, smallest_p_value

MISSING = "–"

FEW_SEEDS = "one or two seeds are too few for an interval and shown themselves"

SCORE_TITLES = {
    "final": "final avg@k",
    "final_pass_at_k": "final pass@k",
}


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text, and the name of its file."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str


def amount(value: float | None) -> str:
    """A count or a cost in at most six characters."""
    if value is None:
        return MISSING
    if math.isinf(value):
        return "∞"
    rounded = abs(float(f"{value:.3g}"))
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rounded >= size:
            return f"{_three_digits(value / size)}{unit}"
    if abs(value) >= 1e4:
        return f"{_three_digits(value / 1e3)}k"
    return f"{value:,.0f}" if abs(value) >= 100 else _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{value:#.3g}".removesuffix(".")


def seeds_of(arm: ArmFindings) -> str:
    """`8`, or `7 of 8` if seeds are missing; empty for evaluation files."""
    if not arm.seeds and not arm.missing:
        return ""
    known = len(arm.seeds)
    return f"{known} of {known + len(arm.missing)}" if arm.missing else str(known)


def points(value: float) -> str:
    return f"{100 * value:+.1f}"


def points_interval(bounds: Interval) -> str:
    return f"[{points(bounds[0])}, {points(bounds[1])}]"


def report_tables(findings: Findings) -> list[TextTable]:
    """All tables that have rows, in reading order."""
    tables = []
    for score in SCORE_TITLES:
        tables += [_score_table(findings, score), _difference_table(findings, score)]
    tables += [_benchmark_table(findings, score) for score in SCORE_TITLES]
    others = (
        *(aes_table, length_table, clip_table, cost_table, compute_table, equal_cost_table),
        *(reach_table, course_table, frontier_table, settings_table),
    )
    tables += [table(findings) for table in others]
    return [table for table in tables if table.rows]


def _score_table(findings: Findings, score: str) -> TextTable:
    rows = []
    for arm in findings.arms:
        if score not in arm.scores:
            rows += [[arm.name, seeds_of(arm), *[MISSING] * 4]] if arm.missing else []
            continue
        each = arm.scores[score].estimates[findings.shown]
        quartiles = percent_interval((each.low, each.high))
        rows.append(
            [
                *(arm.name, seeds_of(arm), percent(each.mean), percent(each.median), quartiles),
                _bounds(each, percent_interval, percent),
            ]
        )
    header = ("arm", "seeds", "mean", "median", "quartiles", "95 %")
    legend = (
        f"%, {findings.shown_title}; mean, median and quartiles over seeds; 95 %: "
        f"{_over([arm.scores[score].estimates for arm in findings.arms if score in arm.scores])}."
    )
    return TextTable(score, SCORE_TITLES[score], header, rows, legend)


def _bounds(
    each: Estimate, interval_form: Callable[[Interval], str], form: Callable[[float], str]
) -> str:
    """The interval; of one or two seeds, which have none, the values."""
    if each.interval is not None:
        return interval_form(each.interval)
    return ", ".join(map(form, each.values)) if len(each.values) < FEWEST_SEEDS else MISSING


def _over(parts: Sequence[Mapping[str, Estimate]]) -> str:
    """What stands in the column of the intervals."""
    found = [part["mean"].interval_over for part in parts]
    over = " or ".join(dict.fromkeys(each for each in found if each))
    words = [f"interval of the mean over {over}"] if over else []
    return "; ".join([*words, *([FEW_SEEDS] if None in found else [])])


def _difference_table(findings: Findings, score: str) -> TextTable:
    rows, few = [], []
    for arm in findings.arms:
        difference = arm.scores[score].difference if score in arm.scores else None
        if difference is None:
            continue
        each = difference[findings.shown]
        seeds = len(each.seeds) or 1
        rows.append(
            [
                *(arm.name, str(seeds), points(each.mean), points(each.median)),
                points_interval((each.low, each.high)),
                *(_bounds(each, points_interval, points), f"{each.seeds_better} of {seeds}"),
                MISSING if each.p_value is None else p_value(each.p_value),
            ]
        )
        if each.p_value is not None and each.smallest_p_value > 0.05:
            few.append(seeds)
    header = ("arm", "seeds", "mean", "median", "quartiles", "95 %", "better", "p")
    legend = (
        "points, paired by seed and problem; better: seeds in which the arm is ahead; p: "
        "two-sided, from sign flips over seeds, on these problems."
    )
    shown = [arm.scores[score].difference for arm in findings.arms if score in arm.scores]
    if any(each[findings.shown].interval_over is None for each in shown if each):
        legend += f" 95 %: {FEW_SEEDS}."
    if few:
        least = p_value(smallest_p_value(max(few)))
        legend += f" Seeds are too few for p below 0.05: {max(few)} can reach {least} at best."
    title = f"{SCORE_TITLES[score]}: difference to {findings.baseline}"
    return TextTable(f"{score}_difference", title, header, rows, legend)


def _benchmark_table(findings: Findings, score: str) -> TextTable:
    names = [*findings.benchmarks, "mean"]
    rows = [
        [arm.name, *(percent(arm.scores[score].estimates[name].mean) for name in names)]
        for arm in findings.arms
        if score in arm.scores
    ]
    header = ("arm", *(findings.titles.get(name, name) for name in names))
    title = f"{SCORE_TITLES[score]} by benchmark"
    return TextTable(f"{score}_benchmarks", title, header, rows, "%, mean over seeds.")


def settings_table(findings: Findings) -> TextTable:
    """What each arm changes: one row for each key, and what tuning chose."""
    baseline = findings.arm(findings.baseline)
    rows = [
        [arm.name, key, str(value)]
        for arm in findings.arms
        for key, value in arm.settings.items()
        if arm is not baseline and (key, value) not in baseline.settings.items()
    ]
    rows += [[arm, "chosen by tuning", chosen] for arm, chosen in findings.tuned.items()]
    title = f"settings: difference to {findings.baseline}"
    legend = "Keys that only follow from the preset are left out; tuning was on other seeds."
    return TextTable("settings", title, ("arm", "setting", "value"), rows, legend)


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
        "rollouts in training steps; replayed per fresh. Means and quartiles over seeds; "
        "(n): of n runs."
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
        (_short_axis(findings, key), key, lambda each: amount(each.mean))
        for key in findings.axes
        if key.startswith("compute")
    ]
    legend = "Σ (B + μR) in rollouts trained on, mean over seeds."
    return _quantity_table(findings, "compute", "compute of a run", legend, columns)


def _short_axis(findings: Findings, key: str) -> str:
    if not key.startswith("compute"):
        return key.replace("_", " ")
    if key == "compute_machines":
        return "γ of (W, T)"
    if key == "compute_measured":
        return f"μ = {findings.measured_mu:.3g} (measured)"
    return f"μ = {key.removeprefix('compute_')}"


def equal_cost_table(findings: Findings) -> TextTable:
    rows = []
    for arm in findings.arms:
        for key, at in arm.equal_cost.items():
            each = at.difference[findings.shown]
            rows.append(
                [
                    *(arm.name, _short_axis(findings, key), amount(at.spent.median)),
                    points(each.mean),
                    _bounds(each, points_interval, points),
                    f"{each.seeds_better} of {len(each.seeds)}",
                    MISSING if each.p_value is None else p_value(each.p_value),
                ]
            )
    header = ("arm", "cost", "spent", "mean", "95 %", "better", "p")
    legend = (
        f"avg@k, {findings.shown_title}, in points, paired by seed and problem, when both runs of "
        "a seed have spent what the cheaper one spent in all (median over seeds), interpolated "
        "between evaluations."
    )
    title = f"at equal cost: difference to {findings.baseline}"
    return TextTable("equal_cost", title, header, rows, legend)


def reach_table(findings: Findings) -> TextTable:
    """Steps, tokens and compute at the measured μ; report.json has every axis."""
    main = findings.main or ""
    rows = []
    for index in range(max((len(arm.targets) for arm in findings.arms), default=0)):
        for arm in findings.arms:
            if not arm.targets:
                continue
            target = arm.targets[index]
            costs = [target.costs.get(key) for key in ("steps", "generated_tokens", main)]
            interval, ratio = target.costs[main].interval, target.costs[main].ratio
            rows.append(
                [
                    *(percent(target.accuracy), arm.name, f"{target.reached} of {target.runs}"),
                    *(MISSING if each is None else amount(each.median) for each in costs),
                    MISSING
                    if interval is None
                    else f"[{amount(interval[0])}, {amount(interval[1])}]",
                    MISSING if ratio is None else f"{ratio:.2f} ({target.costs[main].ratio_seeds})",
                ]
            )
    unit = "compute" if main.startswith("compute") else "tokens"
    header = ("accuracy", "arm", "reached", "steps", "tokens", unit, "95 %", "ratio")
    legend = (
        f"the cost at which {findings.outcome_title} first reaches the accuracy, "
        "interpolated between evaluations: median over seeds, and 95 % interval of the median (six "
        f"seeds or more); ∞: not reached; ratio: to {findings.baseline} at the same seed, median "
        f"of the seeds in which both reached it. Cost: {findings.cost_title}."
    )
    return TextTable("reach", "cost to reach an accuracy", header, rows, legend)


def course_table(findings: Findings) -> TextTable:
    """Paper B's numbers of a whole curve."""
    columns: list[tuple[str, str, Cell]] = [
        ("peak", "peak_of_median", lambda each: percent(each.mean)),
        ("to 98 %", "cost_to_98", lambda each: amount(each.median)),
        ("quartiles", "cost_to_98", lambda each: f"[{amount(each.low)}, {amount(each.high)}]"),
        ("collapsed", "collapsed", lambda each: f"{each.mean * each.runs:.0f} of {each.runs}"),
    ]
    legend = (
        f"{findings.outcome_title}. Peak: maximum of the median curve over seeds, %; to 98 %: "
        f"{findings.cost_title}, to 98 % of a run's own best, median over seeds; collapsed: runs "
        "that lost over half of their best gain by the end."
    )
    return _quantity_table(findings, "course", "courses", legend, columns)


def frontier_table(findings: Findings) -> TextTable:
    rows = [
        [amount(cost), percent(value), arm, str(step)]
        for cost, value, arm, step in findings.frontier
    ]
    legend = (
        f"evaluations with a higher {findings.outcome_title} than every cheaper one of any arm; "
        f"medians over seeds. Cost: {findings.cost_title}."
    )
    return TextTable(
        "frontier", "Pareto frontier", ("cost", "accuracy", "arm", "step"), rows, legend
    )


def facts_of(findings: Findings) -> list[str]:
    """Baseline, benchmarks, verifier and μ, one fact each."""
    facts = [
        f"baseline {findings.baseline}",
        f"benchmarks {', '.join(findings.titles[name] for name in findings.benchmarks)}",
        f"graded by {findings.graded_by}",
    ]
    if findings.shown != "mean" or findings.metric != "avg_at_k":
        facts.append(f"curves and targets: {findings.outcome_title}")
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
