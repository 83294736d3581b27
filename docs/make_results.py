"""Write the parts of README.md and pages of docs/ that quote docs/results.yaml and docs/records/,
and draw docs/images/does-replay-pay.svg, tiny-buffers.svg and smollm2.svg.

    python docs/make_results.py

A part stands between `<!-- results: NAME -->` and `<!-- end -->`. A test fails when a page is not
what this writes.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from grpo_replay.cli.plan_command import DEFAULT_GROWTH, DEFAULT_RHO
from grpo_replay.lab.dry_run.estimates import expected_of
from grpo_replay.lab.planning.theory import (
    Growth,
    PlanInputs,
    PowerGrowth,
    RatioGrowth,
    Verdict,
    design_of,
    objective,
)
from grpo_replay.lab.report.costs import OWN_BEST, first_crossing
from grpo_replay.lab.sweep.sweep_file import read_sweep_file
from grpo_replay.recipe import load_recipe
from grpo_replay.shipped_recipes import shipped_sweeps

DOCS = Path(__file__).resolve().parent
PAGES = (DOCS.parent / "README.md", DOCS / "report.md", DOCS / "results.md")
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
             "smollm2": real_model, "smollm2-bold": bold_rate}  # fmt: skip
    return _PART.sub(lambda found: found[1] + parts[found[2]]() + found[3], page)


def difference(each: dict[str, Any]) -> str:
    """For example `+0.8 [-0.0, +1.5], 7/8`: ahead at seven of eight seeds."""
    bounds = f"[{each['low']:+.1f}, {each['high']:+.1f}]"
    return f"{each['mean']:+.1f} {bounds}, {each['ahead']}/{each['seeds']}"


def does_replay_pay() -> str:
    found = results()
    long, tiny, real = found["tiny-long"], found["tiny-main"], found["smollm2"]
    seeds = [each["difference"]["ours"]["seeds"] for each in (long, tiny)]
    return f"""\
On a tiny model whose rollouts cost {long["mu"]} times as much to generate as to train on (μ),
`ours` ends {points(long)} points of held-out accuracy ahead of GRPO at equal generated
rollouts, and {points(tiny)} where μ is {tiny["mu"]:.1f} ({seeds[0]} and {seeds[1]} seeds, 95 %).
On a real model with answers of a few tokens (SmolLM2-135M, μ {real["mu"]}), four seeds leave it
undecided, and by the clock it gained nothing.
"""


def points(found: dict[str, Any], arm: str = "ours") -> str:
    """The difference of an arm to GRPO with its interval: `+0.8 [-0.0, +1.5]`."""
    return difference(found["difference"][arm]).rpartition(",")[0]


def draw_does_replay_pay() -> None:
    """docs/images/does-replay-pay.svg: differences to GRPO, the tasks ordered by μ."""
    found = results()
    names = {"tiny-long": "tiny, long answers", "tiny-main": "tiny", "smollm2": "SmolLM2-135M"}
    figure, axes = new_figure("does-replay-pay", (7, 2.6))
    for row, task in enumerate(reversed(names)):
        for arm, colour, shift in (("ours", "C0", 0.13), ("fifo", "C1", -0.13)):
            each = found[task]["difference"][arm]
            bars = [[each["mean"] - each["low"]], [each["high"] - each["mean"]]]
            axes.errorbar(each["mean"], row + shift, xerr=bars, fmt="o", color=colour, capsize=3,
                          label=arm if row == 0 else None)  # fmt: skip
    labels = [f"{name}\nμ {found[task]['mu']:.2g}" for task, name in reversed(names.items())]
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(-0.45, len(names) - 0.55)
    axes.axvline(0, color="0.35", linewidth=1)
    axes.set(xlabel="points of held-out accuracy ahead of GRPO, at equal generated rollouts, 95 %")
    axes.legend(frameon=False, loc="upper right")
    save_figure(figure, "does-replay-pay")


def tiny_long() -> str:
    found = results()["tiny-long"]
    lines = ["| relative to GRPO | ours | fifo |", "|---|---|---|"]
    rows = {"final accuracy, points": found["difference"]}
    lines += [f"| {name} | {difference(row['ours'])} | {difference(row['fifo'])} |"
              for name, row in rows.items()]  # fmt: skip
    costs = {f"steps to {found['reach']} %": found["steps"]}
    costs |= {f"compute to {found['reach']} %, μ = {mu}": row
              for mu, row in found["compute"].items()}  # fmt: skip
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


def clipped_share(found: dict[str, Any], arm: str) -> str:
    """Of replayed tokens, in %; "" for an arm without replay."""
    share = found["clipped"].get(arm)
    return "" if share is None else f"{share:.1f}"


def draw_courses(
    record: str, names: dict[str, str], cost: str, scale: float, legend: str, **labels: Any
) -> None:
    """docs/images/RECORD.svg: every seed, and the median."""
    figure, axes = new_figure(record, (7, 3.8))
    colors = ("0.35", "C0", "C1", "C3")[: len(names)]
    for color, (arm, name) in zip(colors, names.items(), strict=True):
        costs, accuracies = courses(record, arm, cost)
        axes.plot(costs.T / scale, accuracies.T, color=color, linewidth=0.5, alpha=0.5)
        median = np.median(costs, axis=0) / scale, np.median(accuracies, axis=0)
        axes.plot(*median, color=color, linewidth=2, label=name)
    axes.set(ylabel="held-out accuracy, %", **labels)
    axes.legend(title=legend, frameon=False, loc="lower right")
    save_figure(figure, record)


def new_figure(name: str, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = name
    return plt.subplots(figsize=size, layout="constrained")


def save_figure(figure: Any, name: str) -> None:
    figure.savefig(DOCS / "images" / f"{name}.svg", metadata={"Date": None})


def cases() -> list[tuple[str, str, float, tuple[float, ...], dict[str, tuple[Verdict, float]]]]:
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
) -> tuple[Verdict, float]:
    """The verdict that `plan` gives on a recipe with this μ and growth; and its J(x, y)/J(1, 1), as
    if both were drawn with replacement from uniform ages."""
    recipe = load_recipe(name, overrides)
    expected = expected_of(recipe)
    inputs = PlanInputs(
        mu=mu, rho=DEFAULT_RHO, growth=growth, survival=expected.survival,
        rollouts_per_step=recipe.rollouts_per_step, sources={},
    )  # fmt: skip
    design = design_of(inputs, recipe.replay)
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
    draw_does_replay_pay()
    draw_courses(
        "tiny-buffers", BUFFERS, "compute", 1000, "stored rollouts, N", ylim=(35, 100),
        xlabel="compute at γ of (W, T) = (3, 1), thousand rollouts",
    )  # fmt: skip
    draw_courses(
        "smollm2", {arm: arm for arm in results()["smollm2"]["rate"]}, "seconds", 60,
        "SmolLM2-135M, additions", xlabel="minutes of training on two cores", ylim=(10, 80),
    )  # fmt: skip
    for path in PAGES:
        path.write_text(with_results(path.read_text()))
