"""Write the parts of README.md and pages of docs/ that quote docs/results.yaml and docs/records/.
docs/draw_results.py draws their pictures.

    python docs/make_results.py
    python docs/make_results.py --record runs/tiny-long     # first, docs/records/tiny-long.csv

A part stands between `<!-- results: NAME -->` and `<!-- end -->`. A test fails when a page is not
what this writes.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from grpo_replay.lab.planning.expected import expected_of
from grpo_replay.lab.planning.plan import DEFAULT_GROWTH, DEFAULT_RHO
from grpo_replay.lab.planning.theory import (
    CostVerdict,
    Growth,
    PlanInputs,
    PowerGrowth,
    RatioGrowth,
    objective,
    recipe_design,
)
from grpo_replay.lab.report.collect import collect
from grpo_replay.lab.report.costs import (
    GENERATED,
    OWN_BEST,
    SECONDS,
    TRAINED,
    break_even,
    first_crossing,
)
from grpo_replay.lab.report.finished_run import Outcome
from grpo_replay.lab.report.measure import GAIN_SHARES, equal_cost
from grpo_replay.lab.report.report_files import pays_at
from grpo_replay.lab.report.two_level import FEWEST_SEEDS
from grpo_replay.lab.sweep.sweep_file import read_sweep_file
from grpo_replay.recipe import load_recipe
from grpo_replay.shipped_recipes import shipped_sweeps

DOCS = Path(__file__).resolve().parent
PAGES = (
    DOCS.parent / "README.md", DOCS / "report.md", DOCS / "results.md",
    DOCS / "records" / "settings.md",
)  # fmt: skip
PAPERS = DOCS.parent / "tests" / "recipe" / "papers.yaml"
"""What the papers print."""
_PART = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def results() -> dict[str, Any]:
    return yaml.safe_load((DOCS / "results.yaml").read_text())


def with_results(page: str) -> str:
    """The text of a page with its marked parts written anew."""
    parts = {"does-replay-pay": does_replay_pay, "tiny-long": tiny_long, "verdicts": verdicts,
             "tiny-buffers": tiny_buffers, "tiny-updates": tiny_updates, "paper-a": main_table,
             "ablations": ablations, "tiny-robustness": tiny_robustness,
             "tiny-switches": switches, "smollm2": real_model, "smollm2-bold": bold_rate,
             "tiny-rare": rare_successes, "rare-rates": rare_rates,
             "rare-outcomes": rare_outcomes,
             **{sweep: partial(beside_a_server, sweep) for sweep in BESIDE_A_SERVER},
             "break-even": break_evens, "pays-above": pays_above}  # fmt: skip
    return _PART.sub(lambda found: found[1] + parts[found[2]]() + found[3], page)


def interval(each: dict[str, Any]) -> str:
    """For example `+0.8 [-0.0, +1.5]`."""
    return f"{each['mean']:+.1f} [{each['low']:+.1f}, {each['high']:+.1f}]"


def difference(each: dict[str, Any]) -> str:
    """For example `+0.8 [-0.0, +1.5], 7/8`: ahead at seven of eight seeds."""
    return f"{interval(each)}, {each['ahead']}/{each['seeds']}"


EVIDENCE = [
    ("tiny-long-async", "ours", "tiny, long answers, beside a server", "to_afterwards",
     "equal seconds"),
    ("tiny-long", "ours", "tiny, long answers", None, ""),
    ("smollm2-async", "ours", "SmolLM2-135M, step sums, one H200", "equal_compute",
     "equal compute"),
    ("tiny-main", "ours", "tiny", None, ""),
    ("tiny-rare", "ours", "tiny, rare successes", "equal_compute_1", "equal compute, were μ 1"),
    ("tiny-rare", "successes", "the same, only successes stored", "equal_compute_1",
     "equal compute, were μ 1"),
    ("smollm2-steps", "ours", "SmolLM2-135M, step sums", "equal_seconds", "equal seconds"),
    ("smollm2", "ours", "SmolLM2-135M, additions", "equal_seconds", "equal seconds"),
]  # fmt: skip
"""Comparisons with a tuned `grpo`, from the highest μ to the lowest: sweep, arm, the task, and the
comparison by compute or clock."""


def does_replay_pay() -> str:
    heads = ["task", "μ", "at equal rollouts", "by compute or clock", "seeds"]
    rows = []
    for sweep, arm, task, kind, what in EVIDENCE:
        found = results()[sweep]
        cost = "–"
        if kind is not None:
            cost = f"{interval(found[kind][arm])} at {what}"
        elif "compute" in found:  # at the measured μ, which is the first
            ratio = next(iter(found["compute"].values()))[arm]
            cost = f"{ratio} × the compute to {found['reach']} %"
        ahead = found["difference"][arm]
        rows.append([task, f"{found['mu']:.2g}", interval(ahead), cost, f"{ahead['seeds']}"])
    return table(heads, rows)


def tiny_long() -> str:
    found = results()["tiny-long"]
    lines = ["| relative to GRPO | ours | fifo |", "|---|---|---|"]
    rows = {"final accuracy, points": found["difference"]}
    lines += [f"| {name} | {difference(row['ours'])} | {difference(row['fifo'])} |"
              for name, row in rows.items()]  # fmt: skip
    costs = {f"steps to {found['reach']} %": found["steps"]}
    mu, row = next(iter(found["compute"].items()))  # the measured one
    costs[f"compute to {found['reach']} %, μ = {mu}"] = row
    lines += [f"| {name} | {row['ours']} × | {row['fifo']} × |" for name, row in costs.items()]
    return "\n".join(lines) + "\n"


BUFFERS = {
    "no-buffer": "none",
    **{f"fifo,capacity_rollouts={n}": f"{n:,}" for n in (64, 320, 1600)},
}
"""The arms of `tiny-buffers`, and what N is called."""


def courses(record: str, arm: str, cost: str) -> tuple[np.ndarray, np.ndarray]:
    """float64 [seeds, evaluations] each: cost and accuracy in % of an arm in records/."""
    with (DOCS / "records" / f"{record}.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["arm"] == arm]
    seeds = len({row["seed"] for row in rows})
    table = np.array([[float(row[cost]), 100 * float(row["accuracy"])] for row in rows])
    cost_SE, accuracy_SE = table.reshape(seeds, -1, 2).transpose(2, 0, 1)
    return cost_SE, accuracy_SE


def tiny_buffers() -> str:
    """Medians over seeds; compute in thousands of rollouts."""
    found = results()["tiny-buffers"]
    level = found["reach"]
    heads = [
        "N", "rate", "after 20 % of the run", "final", "− none",
        "spread", "peak", f"compute to {level} %", "to 98 % of own best",
    ]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm, name in BUFFERS.items():
        costs, accuracies = courses("tiny-buffers", arm, "compute")
        final = accuracies[:, -1]
        spread = np.subtract(*np.percentile(final, [75, 25]))

        def reached(targets: Sequence[float], costs=costs, accuracies=accuracies) -> str:
            each = map(first_crossing, costs.tolist(), accuracies.tolist(), targets)
            return f"{np.median(list(each)) / 1000:.2f}"

        own_best = (OWN_BEST * accuracies.max(axis=1)).tolist()
        cells = [
            name, f"{found['rate'][arm]:.0e}", f"{np.median(accuracies[:, 2]):.1f}",
            f"{final.mean():.1f}",
            difference(found["difference"][arm]) if arm in found["difference"] else "",
            f"{spread:.1f}", f"{np.median(accuracies, axis=0).max():.1f}",
            reached([level] * len(final)), reached(own_best),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def compared(found: dict[str, Any], arm: str, kind: str = "difference") -> str:
    """The difference of an arm, "" where it is not compared."""
    return difference(found[kind][arm]) if arm in found[kind] else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]]) + "\n"


REAL_MODEL = {"smollm2": "additions", "smollm2-steps": "step sums"}
"""The sweeps of SmolLM2, and what their task is called."""


def real_model() -> str:
    heads = ["task", "arm", "final, mean and every seed", "− `grpo`",
             "at equal seconds", "seconds"]  # fmt: skip
    rows = []
    for sweep, task in REAL_MODEL.items():
        found = results()[sweep]
        for arm in found["rate"]:
            seconds, _ = courses(sweep, arm, "seconds")
            ahead = [compared(found, arm, kind) for kind in ("difference", "equal_seconds")]
            name = task if arm == "grpo" else ""
            rows.append([name, f"`{arm}`", final_of(sweep, arm), *ahead,
                         f"{seconds[:, -1].mean():.0f}"])  # fmt: skip
    return table(heads, rows)


SLOW_BASELINES = ("grpo-1", "grpo-2", "grpo-4")
BESIDE_A_SERVER = {
    "tiny-long-async": {"− `grpo` at equal seconds": "equal_seconds",
                        "− `grpo-2e-4`": "to_afterwards"},
    "tiny-slow": {f"− `{arm}`": f"to_{arm}" for arm in SLOW_BASELINES[1:]},
}  # fmt: skip
"""Sweeps beside a server, and their comparisons: by column, the name in results.yaml."""


def beside_a_server(sweep: str) -> str:
    """The arms of a sweep; seconds and rollouts are means over seeds."""
    found, kinds = results()[sweep], BESIDE_A_SERVER[sweep]
    heads = ["arm", "rate", "final, mean and every seed", *kinds,
             "seconds", "generated", "trained on"]  # fmt: skip
    rows = []
    for arm, rate in found["rate"].items():
        spent = [courses(sweep, arm, cost)[0][:, -1].mean()
                 for cost in ("seconds", "generated", "trained")]  # fmt: skip
        ahead = [compared(found, arm, kind) for kind in kinds.values()]
        rows.append([f"`{arm}`", f"{rate:.0e}", final_of(sweep, arm), *ahead,
                     *(f"{each:,.0f}" for each in spent)])  # fmt: skip
    return table(heads, rows)


def rare_successes() -> str:
    """The arms of `tiny-rare`, the one that learned most first."""
    found = results()["tiny-rare"]
    heads = ["arm", "rate", "on the way", f"− `{found['baseline']}`",
             "− `grpo` at equal compute, were μ 5", "`rare`, at the end", "`hard`",
             "trained on"]  # fmt: skip
    return table(heads, (
        [f"`{arm}`", f"{row['rate']:.0e}", f"{row['area']}", compared(found, arm, "on_the_way"),
         compared(found, arm, "equal_compute_5"), f"{row['rare']}", f"{row['hard']}",
         f"{row['trained']:,}"]
        for arm, row in found["arms"].items()
    ))  # fmt: skip


def rare_outcomes() -> str:
    found = results()["tiny-rare"]
    heads = [f"outcome, `ours` − `{found['baseline']}`", "points", "p", "p by Holm"]
    return table(heads, (
        [name, difference(row), f"{row['p']:.4f}", f"{row['holm']:.4f}" if "holm" in row else ""]
        for name, row in found["outcomes"].items()
    ))  # fmt: skip


def rare_runs() -> tuple[Any, list[Any]]:
    """The module benchmarks/rare_numbers.py, and its runs of records/tiny-rare.csv."""
    sys.path.append(str(DOCS.parent / "benchmarks"))
    import rare_numbers
    import rare_study

    return rare_numbers, rare_study.courses(rare_study.RECORD)


def rare_rates() -> str:
    """Final accuracy of `tiny-rare` on the tuning seeds, in %; the chosen rates are bold."""
    numbers, runs = rare_runs()
    tuned = numbers.rates(runs)
    rates = sorted({rate for by_rate in tuned.values() for rate in by_rate})
    lines = []
    for arm, by_rate in sorted(tuned.items()):
        cells = {rate: f"{100 * fmean(run.mean_E[-1] for run in members):.1f}"
                 for rate, members in by_rate.items()}  # fmt: skip
        best = numbers.chosen_rate(by_rate)
        cells[best] = f"**{cells[best]}**"
        lines.append([f"`{arm}`", *(cells.get(rate, "") for rate in rates)])
    return table(["arm", *(f"{rate:g}" for rate in rates)], lines)


def final_of(sweep: str, arm: str) -> str:
    """The mean of the last evaluation, and that of every seed."""
    _, accuracies = courses(sweep, arm, "step")
    final = accuracies[:, -1]
    return f"{final.mean():.1f} ({', '.join(f'{each:.1f}' for each in final)})"


def bold_rate() -> str:
    found = results()["smollm2-bold"]
    heads = ["arm", "final, mean and every seed", "− `grpo`",
             "clipped, %"]  # fmt: skip
    return table(heads, ([f"`{arm}`", final_of("smollm2-bold", arm),
                          compared(found, arm), clipped_share(found, arm)]
                         for arm in found["final"]))  # fmt: skip


def write_record(sweep: Path) -> None:
    """docs/records/NAME.csv of a finished sweep: what every run had spent at each evaluation."""
    rows = [["arm", "seed", "step", "accuracy", "trained", "generated", "seconds"]]
    for arm in collect([str(sweep)]).arms:
        for seed, run in sorted(arm.runs.items()):
            trained, generated = (axis.total(run) for axis in (TRAINED, GENERATED))
            seconds = run.running_total("step_time")
            rows += [
                [arm.name, seed, step, f"{accuracy:.6f}", int(trained[step]), int(generated[step]),
                 f"{seconds[step]:.2f}"]
                for step, accuracy in zip(*run.curve(Outcome()), strict=True)
            ]  # fmt: skip
    with (DOCS / "records" / f"{sweep.name}.csv").open("w", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def equal_seconds(sweep: Path, baseline: str) -> dict[str, dict[str, Any]]:
    """The difference of every arm to the baseline, in points, when both runs of a seed have taken
    the seconds of the faster one; as in results.yaml."""
    arms = {arm.name: arm.runs for arm in collect([str(sweep)]).arms}
    points = {}
    for name in (arm for arm in arms if arm != baseline):
        pairs = [(run, arms[baseline][seed]) for seed, run in sorted(arms[name].items())]
        found = equal_cost(pairs, SECONDS, "avg_at_k")["difference"]["mean"]
        mean, low, high = (round(100 * each, 1) for each in (found["mean"], *found["interval"]))
        points[name] = {"mean": mean, "low": low, "high": high,
                        "ahead": found["seeds_better"], "seeds": len(pairs)}  # fmt: skip
    return points


THREE = ("grpo", "ours", "fifo")
TASKS = {"tiny-long": THREE, "tiny-buffers": tuple(BUFFERS), "smollm2": THREE,
         "smollm2-steps": THREE}  # fmt: skip
"""The arms of sweeps whose records have courses, the baseline first."""
ROLLOUTS, KEPT = 128, {"smollm2": 0.6, "smollm2-steps": 0.76}
"""Of a step of SmolLM2, generated, and the share that was kept. Its records do not count those, but
with these shares `ours` needs 1.30 and 1.43 times the compute to 52 %, as the runs' report said."""


def rollouts(record: str, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """Rollouts trained on and generated, float64 [seeds, 2, evaluations], and accuracy in %."""
    if not record.startswith("smollm2"):
        (trained, accuracy), (generated, _) = (
            courses(record, arm, kind) for kind in ("trained", "generated")
        )
        return np.stack([trained, generated], axis=1), accuracy
    steps, accuracy = courses(record, arm, "step")
    if steps[0, 0] > 0:
        base = results()[record]["base"]
        steps, accuracy = (np.pad(each, ((0, 0), (1, 0)), constant_values=start)
                           for each, start in ((steps, 0.0), (accuracy, base)))  # fmt: skip
    kept = KEPT[record] * steps
    again = KEPT[record] * np.maximum(steps - 2, 0)  # from the third step on
    of_arm = {"grpo": kept, "ours": kept + again, "fifo": steps}
    return ROLLOUTS * np.stack([of_arm[arm], steps], axis=1), accuracy


def compared_arms(record: str) -> list[str]:
    """Those with seeds enough for an interval."""
    arms = TASKS[record][1:]
    return [arm for arm in arms if len(rollouts(record, arm)[0]) >= FEWEST_SEEDS]


def levels(record: str) -> list[float]:
    """The accuracies, in %, of `report` without --reach."""
    _, accuracy = rollouts(record, TASKS[record][0])
    start, end = np.median(accuracy[:, 0]), np.median(accuracy[:, -1])
    return [round(float(start + share * (end - start)), 1) for share in GAIN_SHARES]


def shown_level(record: str) -> float:
    """The highest of `levels` that every run reached."""
    most = min(rollouts(record, arm)[1].max(axis=1).min() for arm in TASKS[record])
    return max(each for each in levels(record) if each <= most)


def spent_to(record: str, arm: str, level: float) -> np.ndarray:
    """float64 [S, 2, 2], as `rollouts_to_reach`."""
    found = [
        [[first_crossing(each, accuracy, level) for each in run] for run, accuracy in
         zip(*(part.tolist() for part in rollouts(record, name)))]
        for name in (arm, TASKS[record][0])
    ]  # fmt: skip
    pairs = zip(*found)  # of an arm that lacks the last seeds too
    spent_S22 = np.array(list(pairs), dtype=float)
    return spent_S22[np.isfinite(spent_S22).all(axis=(1, 2))]


def break_evens() -> str:
    """The μ of each arm and level; (n) where only n seeds of both arms reached it."""
    heads = ["task", "μ", "arm", *(f"{100 * share:g} %" for share in GAIN_SHARES)]
    rows = []
    for record in TASKS:
        first = [f"`{record}`", f"{results()[record].get('mu', '')}"]
        for arm in compared_arms(record):
            cells = [pays(record, arm, level) for level in levels(record)]
            rows.append([*first, f"`{arm_name(arm)}`", *cells])
            first = ["", ""]
    return table(heads, rows)


def arm_name(arm: str) -> str:
    return f"N = {BUFFERS[arm]}" if arm in BUFFERS else arm


def pays(record: str, arm: str, level: float) -> str:
    """For example `above 3.1 (4) [1.2, ∞]`."""
    even, seeds = (
        break_even(spent_to(record, arm, level)),
        len(rollouts(record, TASKS[record][0])[0]),
    )
    if even is None:
        return "–"
    mark = "" if even["seeds"] == seeds else f" ({even['seeds']})"
    return pays_at(even, mark).replace("\n", " ")


def pays_above() -> str:
    """At the accuracies of break-even.svg."""
    real = ("smollm2", "smollm2-steps")
    spent = [spent_to(task, "ours", shown_level(task)) for task in real]
    surely = min(break_even(each)["interval"][0] for each in spent)
    words = [
        pays(task, arm, shown_level(task)).removeprefix("above ")
        for task, arm in (("tiny-long", "ours"), ("tiny-buffers", list(BUFFERS)[1]))
    ]
    return f"""\
The μ above which replay takes less compute than GRPO to the highest accuracy that all runs reach is
estimated at {words[0]} for `ours` on `tiny-long`, and at {words[1]} for a FIFO buffer of two
batches on `tiny-buffers`. On SmolLM2 `ours` takes more below μ {surely:.1f}; above that, four seeds
do not tell.
"""


def tiny_updates() -> str:
    found = results()["tiny-updates"]
    heads = ["arm", "rate", "updates a step", "final", "− `grpo`",
             "− `grpo-literal`"]  # fmt: skip
    return table(heads, ([f"`{arm}`", f"{rate:.0e}", f"{found['updates'][arm]:.2f}",
                          f"{found['final'][arm]}", compared(found, arm),
                          compared(found, arm, "to_literal")]
                         for arm, rate in found["rate"].items()))  # fmt: skip


def printed(*values: tuple[float, float]) -> list[str]:
    """Accuracy and pass % as paper A prints them."""
    return [f"{accuracy:.2f} / {passed:.2f}" for accuracy, passed in values]


def main_table() -> str:
    """Paper A's printed table beside the sweep `tiny-main`."""
    found, papers = results()["tiny-main"], yaml.safe_load(PAPERS.read_text())["paper_a"]["main"]
    heads = ["arm", "printed, 0.6B", "1.7B", "4B", "`tiny`: rate", "final",
             "− `grpo`", "clipped, %"]  # fmt: skip
    rows = []
    for arm in (*papers, "fifo"):
        rate, final = found["rate"].get(arm), found["final"].get(arm, "")
        of_paper = printed(*papers[arm]) if arm in papers else [""] * 3
        rows.append([f"`{arm}`", *of_paper, f"{rate:.0e}" if rate else "", f"{final}",
                     compared(found, arm), clipped_share(found, arm)])  # fmt: skip
    return table(heads, rows)


def ablations() -> str:
    """The arms of `tiny-ablations` with their overrides, beside paper A's printed rows."""
    found = results()["tiny-ablations"]
    papers = yaml.safe_load(PAPERS.read_text())["paper_a"]["ablations"]
    arms = read_sweep_file(shipped_sweeps()["tiny-ablations"]).arms
    heads = ["arm", "`--set replay.…`", "final", "− `grpo`",
             "clipped, %", "printed, 1.7B"]  # fmt: skip
    rows = []
    for arm, final in found["final"].items():
        words = ", ".join(f"`{word.removeprefix('replay.')}`" for word in arms[arm])
        of_paper = printed(papers[arm][1:])[0] if arm in papers else ""
        rows.append([f"`{arm}`", words, f"{final}", compared(found, arm),
                     clipped_share(found, arm), of_paper])  # fmt: skip
    return table(heads, rows)


CONDITIONS = {
    "careful": "rate 2.5e-5", "bold": "rate 4e-4",
    "small": "4 prompts a step", "starved": "64 groups of 2",
    "lag": "weights every 4th step",
}  # fmt: skip
"""The conditions of `tiny-robustness`, and what they change."""


def tiny_robustness() -> str:
    found = results()["tiny-robustness"]
    heads = ["condition", "`grpo`", "arm", "final", "difference",
             "clipped, %"]  # fmt: skip
    rows = []
    for arm in found["difference"]:
        condition, name = arm.split("-", 1)
        grpo = found["final"][f"{condition}-grpo"]
        what = [CONDITIONS[condition], f"{grpo}"] if name == "ours" else ["", ""]
        rows.append([*what, f"`{arm}`", f"{found['final'][arm]}", compared(found, arm),
                     clipped_share(found, arm)])  # fmt: skip
    return table(heads, rows)


def switches() -> str:
    """Every arm of `tiny-switches` against `ours`, with what it overrides."""
    found, rows = results()["tiny-switches"], []
    arms = read_sweep_file(shipped_sweeps()["tiny-switches"]).arms
    for arm, final in found["final"].items():
        words = ", ".join(f"`{word}`" for word in arms[arm])
        ess = f"{found['ess'][arm]:.2f}" if arm in found["ess"] else ""
        rows.append([f"`{arm}`", words, f"{final}", compared(found, arm),
                     clipped_share(found, arm), ess])  # fmt: skip
    return table(["arm", "`--set …`", "final", "− `ours`", "clipped, %", "ESS"], rows)


def clipped_share(found: dict[str, Any], arm: str) -> str:
    """Of replayed tokens, in %; "" for an arm without replay."""
    share = found["clipped"].get(arm)
    return "" if share is None else f"{share:.1f}"


def cases() -> list[
    tuple[str, str, float, tuple[float, ...], dict[str, tuple[CostVerdict, float]]]
]:
    """(sweep, arm, μ, measured ratios, `judged_recipe` by growth) of every measured compute."""
    found = []
    for sweep, part in results().items():
        for mu, arms in part.get("compute", {}).items():
            for arm, measured in arms.items():
                ratios = tuple(measured) if isinstance(measured, list) else (measured,)
                words = tuple(part["overrides"][arm])
                growths = {
                    "assumed": PowerGrowth(DEFAULT_GROWTH),
                    "measured": RatioGrowth(*part["growth"][arm]),
                }
                judged = {name: judged_recipe(part["recipe"], words, mu, each)
                          for name, each in growths.items()}  # fmt: skip
                found.append((sweep, arm, mu, ratios, judged))
    return found


def judged_recipe(
    name: str, overrides: tuple[str, ...], mu: float, growth: Growth
) -> tuple[CostVerdict, float]:
    """The verdict that `plan` gives on a recipe with this μ and growth; and its J(x, y)/J(1, 1), as
    if both were drawn with replacement from uniform ages."""
    recipe = load_recipe(name, overrides)
    expected = expected_of(recipe)
    inputs = PlanInputs(
        mu=mu, rho=DEFAULT_RHO, growth=growth, survival=expected.survival,
        rollouts_per_step=recipe.rollouts_per_step, sources={},
    )  # fmt: skip
    design = recipe_design(inputs, recipe.replay)
    terms = inputs.effective_mu, inputs.rho, growth
    drawn_alike = objective(design.x, design.y, *terms) / objective(1.0, 1.0, *terms)
    return design.verdict, drawn_alike


def verdicts() -> str:
    """At the measured μ, which is the first of each arm."""
    lines = [
        "| sweep | arm | μ | measured | by the theory, a = 0.2 | with the growth of a run |",
        "|---|---|---|---|---|---|",
    ]
    shown: set[tuple[str, str]] = set()
    for sweep, arm, mu, ratios, judged in cases():
        if (sweep, arm) in shown:
            continue
        shown.add((sweep, arm))
        cells = [f"{each.ratio:.2f} ({each.low:.2f} to {each.high:.2f}): {each.answer}"
                 for each, _ in judged.values()]  # fmt: skip
        measured = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| `{sweep}` | {arm} | {mu} | {measured} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="SWEEP", help="a finished sweep")
    if sweep := parser.parse_args().record:
        write_record(sweep)
        if sweep.name == "tiny-slow":  # its part of results.yaml
            found = {f"to_{arm}": equal_seconds(sweep, arm) for arm in SLOW_BASELINES}
            print(yaml.safe_dump(found, sort_keys=False, width=200))
    for path in PAGES:
        path.write_text(with_results(path.read_text()))
