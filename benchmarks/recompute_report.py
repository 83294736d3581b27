"""Recomputes every number of `grpo-replay report --json` from the raw files of the runs.

    grpo-replay report SWEEP --json > report.json
    python benchmarks/recompute_report.py report.json SWEEP
    python benchmarks/recompute_report.py report.json --run ours=runs/a --run ours=runs/b …

It imports nothing of grpo_replay: it reads the per-sample rows, metrics, summaries and recipes, and
computes in plain Python, with the quantiles of scipy's distributions. It compares every number in
report.json, counts them, and ends with exit status 1 if one differs or could not be recomputed.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from statistics import fmean, median, variance

import numpy as np
import pyarrow.parquet as pq
import yaml
from scipy import stats

CONFIDENCE = 0.95
RELATIVE = 1e-9


def read_run(folder: Path) -> dict:
    """Recipe, metrics, summary and evaluations (by step) of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = {
        int(re.fullmatch(r"step_(\d+)", file.stem).group(1)): file
        for file in (folder / "eval").glob("step_*.parquet")
    }
    return {
        "folder": folder,
        "recipe": yaml.safe_load((folder / "recipe.yaml").read_text()),
        "lines": [json.loads(line) for line in lines],
        "summary": json.loads((folder / "summary.json").read_text()),
        "evaluations": {step: read_rows(steps[step]) for step in sorted(steps)},
    }


def read_rows(file: Path) -> dict:
    """By benchmark: accuracy and pass@k of every problem."""
    rows = pq.read_table(file).to_pandas()
    rows = rows[~rows["greedy"]]
    problems = rows.groupby(["benchmark", "problem_index"])
    names = rows["benchmark"].unique()
    return {
        "avg": {name: problems["correct"].mean()[name].tolist() for name in names},
        "pass": {name: problems["correct"].max()[name].astype(float).tolist() for name in names},
    }


def means(values: dict[str, list[float]]) -> dict[str, float]:
    """Of every benchmark over its problems, and of all benchmarks."""
    each = {name: fmean(of_problems) for name, of_problems in values.items()}
    return {**each, "mean": fmean(each.values())}


def accuracy(evaluation: dict) -> float:
    return means(evaluation["avg"])["mean"]


def last_step(run: dict) -> int:
    return run["summary"]["steps"]


def spread(values: list[float]) -> dict:
    return {
        "mean": fmean(values),
        "median": median(values),
        "low": float(np.quantile(values, 0.25)),
        "high": float(np.quantile(values, 0.75)),
    }


def t_quantile(freedom: float) -> float:
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))


def mean_of_tables(tables: list[list[list[float]]]) -> float:
    return fmean(fmean(fmean(row) for row in table) for table in tables)


def of_difference(tables: list[list[list[float]]]) -> tuple[list[float] | None, str | None]:
    """mean ± t·√V of [seed][problem] tables, one per benchmark; from three seeds on. If nothing
    varies, V is that with one problem lost and one gained."""
    if len(tables[0]) < 3:
        return None, None
    of_variance, freedom, over = two_level(tables)
    if of_variance < 1e-18 and over == "seeds and problems":
        of_variance, freedom, _ = two_level([[[*row, -1.0, 1.0] for row in t] for t in tables])
    half, mean = t_quantile(freedom) * math.sqrt(of_variance), mean_of_tables(tables)
    return [max(-1.0, mean - half), min(1.0, mean + half)], over


def of_accuracy(tables: list[list[list[float]]]) -> tuple[list[float] | None, str | None]:
    """The same with one problem never and one always solved added, within 0 and 1."""
    if len(tables[0]) < 3:
        return None, None
    widened = [[[*row, 0.0, 1.0] for row in table] for table in tables]
    of_variance, freedom, over = two_level(widened)
    half, center = t_quantile(freedom) * math.sqrt(of_variance), mean_of_tables(widened)
    return [max(0.0, center - half), min(1.0, center + half)], over


def two_level(tables: list[list[list[float]]]) -> tuple[float, float, str]:
    """The variance of the mean, its degrees of freedom, and what it is over."""
    count, seeds = len(tables), len(tables[0])
    by_seed = [fmean(fmean(table[s]) for table in tables) for s in range(seeds)]
    seed_part = (variance(by_seed) / seeds, seeds - 1)
    if any(len(table[0]) == 1 for table in tables):
        return *seed_part, "seeds"
    over_problems, over_both = [], []
    for values in map(np.array, tables):
        problems, by_problem = values.shape[1], values.mean(axis=0)
        over_problems.append((by_problem.var(ddof=1) / problems, problems - 1))
        rest = values - by_problem - values.mean(axis=1, keepdims=True) + values.mean()
        free = (seeds - 1) * (problems - 1)
        over_both.append(((rest**2).sum() / free / (seeds * problems), free))
    problem_part, rest_part = summed(over_problems, count), summed(over_both, count)
    total = seed_part[0] + problem_part[0] - rest_part[0]
    free = min(seed_part[1], problem_part[1])
    total = max(total, seed_part[0], problem_part[0])
    if total > 0:
        shares = sum(v**2 / f for v, f in (seed_part, problem_part, rest_part))
        free = max(free, total**2 / shares)
    return total, free, "seeds and problems"


def summed(parts: list[tuple[float, float]], count: int) -> tuple[float, float]:
    total = sum(v for v, _ in parts) / count**2
    if total == 0:
        return 0.0, sum(f for _, f in parts)
    return total, total**2 / (sum(v**2 / f for v, f in parts) / count**4)


def recompute(report: dict, runs: dict[str, dict[int, dict]]) -> dict:
    """The document of these runs; the choice of baseline, μ and targets is the report's."""
    baseline = report["baseline"]
    every = [run for by_seed in runs.values() for run in by_seed.values()]
    mu = median(measured_mu(run) for run in every)
    targets = [target["accuracy"] for target in report["arms"][0]["reach"]]
    arms = []
    for name, own in runs.items():
        shared = [seed for seed in own if seed in runs[baseline]]
        pairs = [(own[seed], runs[baseline][seed]) for seed in shared]
        arm: dict = {"name": name, "seeds": list(own)}
        arm["final"] = estimates([final(run)["avg"] for run in own.values()])
        arm["difference"] = None
        if name != baseline and pairs:
            parts = [mixed(1, final(a)["avg"], -1, final(b)["avg"]) for a, b in pairs]
            arm["difference"] = paired(parts, shared)
        others = [] if name == baseline else pairs
        arm["quantities"] = quantities(list(own.values()), mu, report["mu"]["given"])
        costs = costs_of(mu, report["mu"]["given"])
        arm["equal_cost"] = equal_cost(others, shared, {k: costs[k] for k in costs if k != "steps"})
        arm["reach"] = [
            {**reach(t, own, pairs, costs), "break_even": break_even(t, others)} for t in targets
        ]
        arms.append(arm)
    return {"mu": {"measured": mu, "given": report["mu"]["given"]}, "arms": arms}


def estimates(parts: list[dict], bounds_of=of_accuracy) -> dict:
    """Per benchmark, and of the mean: spread over seeds and two-level interval."""
    found = {}
    of_seeds = [means(values) for values in parts]
    for name in of_seeds[0]:
        names = list(parts[0]) if name == "mean" else [name]
        bounds, over = bounds_of([[values[b] for values in parts] for b in names])
        own = [each[name] for each in of_seeds]
        found[name] = {**spread(own), "values": own, "interval": bounds, "interval_over": over}
    return found


def mixed(weight: float, ours: dict, other_weight: float, theirs: dict) -> dict:
    """The weighted sum on every problem of every benchmark."""
    return {
        name: [weight * x + other_weight * y for x, y in zip(ours[name], theirs[name], strict=True)]
        for name in ours
    }


def paired(parts: list[dict], shared: list[int]) -> dict:
    found = estimates(parts, of_difference)
    for name, each in found.items():
        of_seeds = each["values"]
        each |= {
            "seeds": shared,
            "seeds_better": sum(value > 1e-9 for value in of_seeds),
            "seeds_to_tell": seeds_to_tell(parts, list(parts[0]) if name == "mean" else [name]),
        }
    return found


def seeds_to_tell(parts: list[dict], names: list[str]) -> int | None:
    """The first number of seeds whose t interval leaves out 0: the variance between seeds, at least
    that of the rest, and that of problems without the rest."""
    if len(parts) < 2:
        return None
    tables = [np.array([values[name] for values in parts]) for name in names]
    means_S = np.mean([table.mean(axis=1) for table in tables], axis=0)
    staying = rest = 0.0
    for table in tables if all(table.shape[1] > 1 for table in tables) else []:
        seeds, problems = table.shape
        own = table - table.mean(axis=1, keepdims=True)
        between = problems / (problems - 1) * own.mean(axis=0).var()
        within = ((own - own.mean(axis=0)) ** 2).sum() / (seeds - 1) / (problems - 1) / seeds
        staying += (between - within) / problems / len(tables) ** 2
        rest += within * seeds / problems / len(tables) ** 2
    for count in range(3, 1001):
        error = math.sqrt(max(means_S.var(ddof=1), rest) / count + max(0.0, staying))
        if t_quantile(count - 1) * error < abs(means_S.mean()):
            return count
    return None  # more than 1,000


def equal_cost(pairs: list, shared: list[int], costs: dict) -> dict:
    """Both runs of a pair at the cost of the cheaper one, between two evaluations on a line."""
    dense = all(len(run["evaluations"]) >= 4 for pair in pairs for run in pair)
    found = {}
    for name, cost in costs.items() if pairs and dense else ():
        spent, parts = [], []
        for pair in pairs:
            budget = min(cost(run, last_step(run)) for run in pair)
            spent.append(budget)
            ours, theirs = (at_cost(run, cost, budget) for run in pair)
            parts.append(mixed(1, ours, -1, theirs))
        found[name] = {
            "spent": {**spread(spent), "runs": len(spent)}, "difference": paired(parts, shared)
        }  # fmt: skip
    return found


def at_cost(run: dict, cost, budget: float) -> dict:
    steps = list(run["evaluations"])
    place = next(i for i, step in enumerate(steps) if i and cost(run, step) >= budget)
    low, high = (cost(run, steps[i]) for i in (place - 1, place))
    share = (budget - low) / (high - low)
    before, after = (run["evaluations"][steps[i]]["avg"] for i in (place - 1, place))
    return mixed(1 - share, before, share, after)


def quantities(runs: list[dict], mu: float, given: list[float]) -> dict:
    found: dict[str, list] = {}
    for name, metric in {
        "generated_tokens": "cost/generated_tokens",
        "trained_tokens": "cost/trained_tokens",
        "training_seconds": "step_time",
    }.items():
        found[name] = [sum(line[metric] for line in run["lines"]) for run in runs]
    for key, value in {"measured": mu, **{f"{each:g}": each for each in given}}.items():
        found[f"compute_{key}"] = [compute(run, last_step(run), value) for run in runs]
    found["wall_seconds"] = [run["summary"]["wall_seconds"] for run in runs]
    found["mu"] = [measured_mu(run) for run in runs]
    found["base"] = [accuracy(run["evaluations"][0]) for run in runs]
    curves = [[accuracy(each) for each in run["evaluations"].values()] for run in runs]
    found["cost_to_98"] = [
        crossing(run, 0.98 * max(curve), lambda run, step: compute(run, step, mu))
        for run, curve in zip(runs, curves)
    ]
    found["peak_of_median"] = [max(median(values) for values in zip(*curves))] * len(runs)
    known = {name: [v for v in values if v is not None] for name, values in found.items()}
    return {n: {**spread(values), "runs": len(values)} for n, values in known.items() if values}


def final(run: dict) -> dict:
    return run["evaluations"][last_step(run)]


def measured_mu(run: dict) -> float:
    """Seconds per generated rollout over seconds per rollout trained on."""
    lines = [line for line in run["lines"] if line["cost/generation_seconds"] is not None]
    generation = sum(line["cost/generation_seconds"] for line in lines)
    training = sum(line["cost/training_seconds"] for line in lines)
    trained = sum(line["cost/trained_rollouts"] for line in lines)
    generated = sum(line["cost/generated_rollouts"] for line in lines)
    return generation / generated / (training / trained)


def compute(run: dict, step: int, mu: float) -> float:
    lines = run["lines"][:step]
    return sum(
        line["cost/trained_rollouts"] + mu * line["cost/generated_rollouts"] for line in lines
    )


def costs_of(mu: float, given: list[float]) -> dict:
    return {
        "steps": lambda run, step: step,
        "generated_tokens": lambda run, step: total(run, step, "cost/generated_tokens"),
        "compute_measured": lambda run, step: compute(run, step, mu),
        **{
            f"compute_{each:g}": lambda run, step, each=each: compute(run, step, each)
            for each in given
        },
        "seconds": lambda run, step: total(run, step, "step_time"),
    }


def reach(target: float, own: dict, pairs: list, costs: dict) -> dict:
    found = {}
    for name, cost in costs.items():
        values = [crossing(run, target, cost) for run in own.values()]
        both = [(crossing(a, target, cost), crossing(b, target, cost)) for a, b in pairs]
        ratios = [a / b for a, b in both if math.isfinite(a) and math.isfinite(b) and b > 0]
        found[name] = {
            "median": finite(median(values)),
            "ratio": median(ratios) if ratios else None,
            "ratio_seeds": len(ratios),
        }
    reached = sum(any(accuracy(e) >= target for e in run["evaluations"].values())
                  for run in own.values())  # fmt: skip
    return {"accuracy": target, "reached": reached, "runs": len(own), "costs": found}


def break_even(target: float, pairs: list) -> dict | None:
    """Where T + μG of the arm is below that of the baseline, from their costs at three μ: the
    difference is a line, and the bound of its t interval squared a parabola."""
    costs = [lambda run, step, mu=mu: compute(run, step, mu) for mu in (0, 1, 2)]
    found = [[[crossing(run, target, cost) for cost in costs] for run in pair] for pair in pairs]
    known = [each for each in found if np.isfinite(each).all()]
    if not known:
        return None
    ours, theirs = np.array(known).transpose(1, 0, 2)
    dearer = ours - theirs  # by seed, at μ = 0, 1, 2
    if (abs(dearer) < 1e-9 * theirs.max()).all():
        return None
    mean, seeds = dearer.mean(axis=0), len(dearer)
    slope = mean[1] - mean[0] if abs(mean[1] - mean[0]) > 1e-9 * theirs.max() else 0.0
    zero = -mean[0] / slope if slope else math.inf
    pays = ["always", "never"][int(slope > 0 or (slope == 0 and mean[0] >= 0))]
    inside = 0 < zero < math.inf
    if inside:
        pays = "above" if slope < 0 else "below"
    interval = None
    if seeds > 2:
        squares = mean**2 - t_quantile(seeds - 1) ** 2 * dearer.var(axis=0, ddof=1) / seeds
        parabola = np.polyfit([0, 1, 2], squares, 2)
        if parabola[0] <= 0:
            interval = [max(np.roots(parabola).real) if squares[0] > 0 else 0.0, None]
        else:
            low, high = sorted(np.roots(parabola).real)
            interval = None if high < 0 else [max(0.0, low), high]
    mu = float(zero) if inside else None
    return {"pays": pays, "mu": mu, "interval": interval, "seeds": seeds}


def total(run: dict, step: int, metric: str) -> float:
    return sum(line[metric] for line in run["lines"][:step])


def crossing(run: dict, target: float, cost) -> float:
    before = None
    for step, evaluation in run["evaluations"].items():
        here = (cost(run, step), accuracy(evaluation))
        if here[1] >= target:
            if before is None:
                return here[0]
            share = (target - before[1]) / (here[1] - before[1])
            return before[0] + share * (here[0] - before[0])
        before = here
    return math.inf


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def compare(place: str, found, expected, problems: list[str]) -> int:
    """Compare every leaf of `found` with `expected`; returns the number of numbers compared."""
    if isinstance(found, dict):
        if not isinstance(expected, dict) or set(found) != set(expected):
            keys = sorted(set(found) ^ set(expected or {}))
            problems.append(f"{place}: keys differ: {keys}")
            return 0
        return sum(compare(f"{place}.{k}", found[k], expected[k], problems) for k in found)
    if isinstance(found, list):
        if not isinstance(expected, list) or len(found) != len(expected):
            problems.append(f"{place}: {found} in the report, {expected} recomputed")
            return 0
        each = enumerate(zip(found, expected, strict=True))
        return sum(compare(f"{place}[{i}]", a, b, problems) for i, (a, b) in each)
    numbers = [isinstance(v, int | float) and not isinstance(v, bool) for v in (found, expected)]
    same = (
        math.isclose(found, expected, rel_tol=RELATIVE, abs_tol=1e-9)
        if all(numbers)
        else found == expected
    )
    if not same:
        problems.append(f"{place}: {found} in the report, {expected} recomputed")
    return int(numbers[0])


def find_runs(report: dict, sweeps: list[Path], given: list[str]) -> dict[str, dict[int, dict]]:
    """The runs of every arm by seed: the finished cells of sweeps, and `--run ARM=DIR`."""
    folders: dict[str, list[Path]] = {}
    for sweep in sweeps:
        outline = yaml.safe_load((sweep / "sweep.yaml").read_text())
        for arm in outline["arms"]:
            cells = [sweep / arm / f"seed-{seed}" for seed in outline["seeds"]]
            finished = [cell for cell in cells if (cell / "summary.json").exists()]
            folders.setdefault(arm, []).extend(finished)
    for word in given:
        arm, _, folder = word.rpartition("=")
        folders.setdefault(arm, []).append(Path(folder))
    found = {}
    for arm in report["arms"]:
        runs = [read_run(folder) for folder in folders.get(arm["name"], [])]
        found[arm["name"]] = {run["recipe"]["run"]["seed"]: run for run in runs}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="output of grpo-replay report --json")
    parser.add_argument("sweeps", type=Path, nargs="*", help="folders of sweeps")
    parser.add_argument("--run", action="append", default=[], metavar="ARM=DIR")
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    runs = find_runs(report, options.sweeps, options.run)
    expected = recompute(report, {name: own for name, own in runs.items() if own})
    problems: list[str] = []
    numbers = compare("mu", report["mu"], expected["mu"], problems)
    shown = [arm for arm in report["arms"] if arm["seeds"]]
    for arm, own in zip(shown, expected["arms"], strict=True):
        del arm["missing"], arm["tuned"]
        numbers += compare(arm["name"], arm, own, problems)
    for problem in problems:
        print(problem)
    count = sum(len(own) for own in runs.values())
    print(f"{numbers:,} numbers of {count} runs compared, {len(problems)} differ")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
