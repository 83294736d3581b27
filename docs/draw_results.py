"""Draw docs/images/does-replay-pay.svg, break-even.svg, tiny-rare.svg, tiny-buffers.svg,
smollm2.svg and tiny-long-async.svg from docs/results.yaml and docs/records/.

    python docs/draw_results.py
"""

from typing import Any

import numpy as np
from make_results import (
    BUFFERS,
    DOCS,
    TASKS,
    arm_name,
    compared_arms,
    courses,
    rare_runs,
    results,
    shown_level,
    spent_to,
)

from grpo_replay.lab.report.report_figures import COLOURS, draw_cost_ratios


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


def draw_break_even() -> None:
    """docs/images/break-even.svg: a panel for each task."""
    figure, panels = new_figure("break-even", (7, 4.6), nrows=2, ncols=2, sharex=True, sharey=True)
    for axes, record in zip(panels.flat, TASKS):
        arms = compared_arms(record)
        level, mu = shown_level(record), results()[record].get("mu")
        spent = {arm_name(arm): spent_to(record, arm, level) for arm in arms}
        looks = {name: (colour, "-") for name, colour in zip(spent, COLOURS)}
        draw_cost_ratios(axes, spent, looks, [mu] if mu else [])
        axes.axhline(1, color="0.35", linewidth=1)
        axes.set_title(f"{record}, to {level} %", fontsize="medium", loc="left")
        axes.set(ylim=(0, 3))
        axes.legend(frameon=False, loc="upper right")
        axes.label_outer()
    figure.supylabel("compute, relative to GRPO", fontsize="medium")
    save_figure(figure, "break-even")


def draw_rare_successes() -> None:
    """docs/images/tiny-rare.svg: accuracy over generated rollouts, and its difference to `grpo` at
    equal compute over μ; means over seeds, with 95 % of their standard error."""
    figure, (over_rollouts, over_mu) = new_figure("tiny-rare", (8, 3.4), ncols=2)
    mus = np.geomspace(0.3, 20, 40)
    numbers, runs = rare_runs()
    for arm, colour in {"grpo": "0.35", "epochs-2": "C1", "ours": "C0", "successes": "C2"}.items():
        own = [run for run in runs if (run.stage, run.arm) == ("compare", arm)]
        mean_E = 100 * np.mean([run.mean_E for run in own], axis=0)
        over_rollouts.plot(own[0].generated_E / 1000, mean_E, color=colour, label=arm)
        if arm == "grpo":
            continue
        pairs = numbers.pairs_of(runs, arm, "grpo")
        ahead_MS = 100 * np.array([
            np.mean([each.mean(axis=1) for each in numbers.at_equal_compute(pairs, mu)], axis=0)
            for mu in mus
        ])  # fmt: skip
        mean_M = ahead_MS.mean(axis=1)
        error_M = 1.96 * ahead_MS.std(axis=1, ddof=1) / np.sqrt(len(pairs))
        over_mu.plot(mus, mean_M, color=colour)
        over_mu.fill_between(mus, mean_M - error_M, mean_M + error_M, color=colour, alpha=0.15)
    over_rollouts.set(xlabel="thousand generated rollouts", ylabel="held-out accuracy, %")
    over_rollouts.legend(frameon=False)
    over_mu.axhline(0, color="0.35", linewidth=1)
    over_mu.axvline(results()["tiny-rare"]["mu"], color="0.35", linestyle=":")
    over_mu.set(xscale="log", xlabel="μ", ylabel="points ahead of grpo at equal compute")
    over_mu.set_xticks(ticks := [0.5, 1, 2, 5, 10, 20], [f"{tick:g}" for tick in ticks])
    save_figure(figure, "tiny-rare")


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


def new_figure(name: str, size: tuple[float, float], **panels: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = name
    return plt.subplots(figsize=size, layout="constrained", **panels)


def save_figure(figure: Any, name: str) -> None:
    figure.savefig(DOCS / "images" / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw_does_replay_pay()
    draw_break_even()
    draw_rare_successes()
    draw_courses(
        "tiny-buffers", BUFFERS, "compute", 1000, "stored rollouts, N", ylim=(35, 100),
        xlabel="compute at γ of (W, T) = (3, 1), thousand rollouts",
    )  # fmt: skip
    draw_courses(
        "smollm2", {arm: arm for arm in results()["smollm2"]["rate"]}, "seconds", 60,
        "SmolLM2-135M, additions", xlabel="minutes of training on two cores", ylim=(10, 80),
    )  # fmt: skip
    draw_courses(
        "tiny-long-async", {arm: arm for arm in results()["tiny-long-async"]["rate"]}, "seconds", 1,
        "tiny-long, beside a server",
        xlabel="seconds of training, without evaluations", ylim=(35, 100),
    )  # fmt: skip
