"""The tables of a report: the same cells in the terminal, Markdown, LaTeX and HTML."""

import hashlib
from collections.abc import Collection, Mapping, Sequence

from grpo_replay.evaluation.evaluation_tables import p_value, percent, percent_interval
from grpo_replay.lab.report.ablations import ablation_rows
from grpo_replay.lab.report.cost_tables import (
    aes_table,
    clip_table,
    compute_table,
    cost_table,
    length_table,
    reach_tables,
)
from grpo_replay.lab.report.report_findings import ArmFindings, Difference, Estimate, Findings
from grpo_replay.lab.report.text_table import (
    MISSING,
    TextTable,
    points,
    points_interval,
    seed_values,
    seeds_of,
)

LONGEST_NAME = 100
"""Of a table, in characters: with its ending it is the name of a file."""

FEW_SEEDS = "one or two seeds are too few for an interval and shown themselves"

SCORE_TITLES = {
    "final": "final avg@k",
    "final_pass_at_k": "final pass@k",
    "best": "best avg@k over the run",
    "best_pass_at_k": "pass@k at the best avg@k over the run",
}


def report_tables(findings: Findings) -> list[TextTable]:
    """All tables that have rows, in reading order."""
    tables = []
    for score in SCORE_TITLES:
        brief = score != "best_pass_at_k"
        tables += [_score_table(findings, score, brief), _difference_table(findings, score, brief)]
    tables[4:4] = [_benchmark_table(findings, score) for score in ("final", "final_pass_at_k")]
    tables += [aes_table(findings), length_table(findings), clip_table(findings)]
    tables += [cost_table(findings), compute_table(findings), *reach_tables(findings)]
    tables += [*_ablation_tables(findings), _tuned_table(findings), _detail_table(findings)]
    return [table for table in tables if table.rows]


def _score_table(findings: Findings, score: str, brief: bool) -> TextTable:
    rows = []
    for arm in findings.arms:
        if score not in arm.scores:
            rows += [[arm.name, seeds_of(arm), *[MISSING] * 4]] if arm.missing else []
            continue
        each = arm.scores[score].estimates["mean"]
        quartiles = percent_interval((each.low, each.high))
        rows.append(
            [
                *(arm.name, seeds_of(arm), percent(each.mean), percent(each.median), quartiles),
                _bounds(each),
            ]
        )
    header = ("arm", "seeds", "mean", "median", "quartiles", "95 %")
    legend = (
        "%, mean over benchmarks; mean, median and quartiles over seeds; 95 %: "
        f"{_over([arm.scores[score].estimates for arm in findings.arms if score in arm.scores])}."
    )
    if score == "best":
        legend += " The best of several evaluations is biased upwards."
    return TextTable(score, SCORE_TITLES[score], header, rows, legend, brief)


def _bounds(each: Estimate) -> str:
    """The interval of an accuracy; with one or two seeds, the seeds."""
    return percent_interval(each.interval) if each.interval else seed_values(each.values, percent)


def _difference_bounds(each: Difference) -> str:
    return points_interval(each.interval) if each.interval else seed_values(each.values, points)


def _over(parts: Sequence[Mapping[str, Estimate]]) -> str:
    """What stands in the column of the intervals."""
    found = [part["mean"].interval_over for part in parts]
    over = " or ".join(dict.fromkeys(each for each in found if each))
    words = [f"interval of the mean over {over}"] if over else []
    return "; ".join([*words, *([FEW_SEEDS] if None in found else [])])


def _difference_table(findings: Findings, score: str, brief: bool) -> TextTable:
    rows, few = [], []
    for arm in findings.arms:
        difference = arm.scores[score].difference if score in arm.scores else None
        if difference is None:
            continue
        each = difference["mean"]
        seeds = len(each.seeds) or 1
        rows.append(
            [
                *(arm.name, str(seeds), points(each.mean), points(each.median)),
                points_interval((each.low, each.high)),
                *(_difference_bounds(each), f"{each.seeds_better} of {seeds}"),
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
    if few:
        least = p_value(2.0 ** (1 - max(few)))
        legend += f" Seeds are too few for p below 0.05: {max(few)} can reach {least} at best."
    title = f"{SCORE_TITLES[score]}: difference to {findings.baseline}"
    return TextTable(f"{score}_difference", title, header, rows, legend, brief)


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


def _ablation_tables(findings: Findings) -> list[TextTable]:
    """One table for each set of recipe keys in which arms differ from the baseline."""
    tables: list[TextTable] = []
    for keys, arms in ablation_rows(findings):
        rows = [[*(_text(arm.settings.get(key)) for key in keys), *_ablation_cells(arm)]
                for arm in arms]  # fmt: skip
        header = (*(key.split(".")[-1] for key in keys), "avg@k", "pass@k", "clip fresh",
                  "clip replayed", "seeds")  # fmt: skip
        title = f"by {', '.join(keys)}"
        legend = "final accuracy and clip fractions in %, means over seeds."
        name = _ablation_name(keys, {table.name for table in tables})
        tables.append(TextTable(name, title, header, rows, legend))
    return tables


def _ablation_name(keys: Sequence[str], taken: Collection[str]) -> str:
    """The keys without their sections. If that is too long for a file, or another table has the
    name, their number and a digest."""
    name = "ablation_" + "_".join(key.split(".")[-1] for key in keys)
    if len(name) <= LONGEST_NAME and name not in taken:
        return name
    return f"ablation_{len(keys)}_keys_{hashlib.sha256(' '.join(keys).encode()).hexdigest()[:8]}"


def _ablation_cells(arm: ArmFindings) -> list[str]:
    def rate(name: str) -> str:
        each = arm.quantities.get(name)
        return MISSING if each is None else f"{100 * each.mean:.2f}"

    scores = [
        percent(arm.scores[name].estimates["mean"].mean) if name in arm.scores else MISSING
        for name in ("final", "final_pass_at_k")
    ]
    clips = [rate(f"clip_fraction_{which}") for which in ("fresh", "replayed")]
    return [*scores, *clips, seeds_of(arm)]


def _text(value: object) -> str:
    return MISSING if value is None else str(value)


def _tuned_table(findings: Findings) -> TextTable:
    rows = [[name, _text(chosen)] for name, chosen in findings.tuned.items()]
    return TextTable("tuned", "chosen by tuning, on other seeds", ("arm", "setting"), rows, "")


def _detail_table(findings: Findings) -> TextTable:
    """Every score of every benchmark with all its statistics."""
    rows = []
    for score, title in SCORE_TITLES.items():
        for name in (*findings.benchmarks, "mean"):
            for arm in findings.arms:
                if score in arm.scores:
                    rows.append(
                        [title, findings.titles.get(name, name), *_detail(arm, score, name)]
                    )
    header = ("score", "benchmark", "arm", "mean", "median", "quartiles", "95 %",
              "Δ", "median", "quartiles", "95 %", "p")  # fmt: skip
    legend = f"%, over seeds; Δ: points, paired with {findings.baseline} by seed and problem."
    return TextTable("details", "every benchmark", header, rows, legend, brief=False)


def _detail(arm: ArmFindings, score: str, benchmark: str) -> list[str]:
    each = arm.scores[score].estimates[benchmark]
    difference = arm.scores[score].difference
    cells = [
        *(arm.name, percent(each.mean), percent(each.median)),
        *(percent_interval((each.low, each.high)), _bounds(each)),
    ]
    if difference is None:
        return [*cells, *[MISSING] * 5]
    delta = difference[benchmark]
    return [
        *(*cells, points(delta.mean), points(delta.median)),
        *(points_interval((delta.low, delta.high)), _difference_bounds(delta)),
        MISSING if delta.p_value is None else p_value(delta.p_value),
    ]
