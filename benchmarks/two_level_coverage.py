"""How often do a report's intervals over seeds and problems hold the truth?

    python benchmarks/two_level_coverage.py [--repeats 2000]

Simulates two arms that share seeds and problems. A problem's effect on the difference, a seed's
effect, and their interaction are drawn anew in every repeat; the truth is the mean difference over
all seeds and problems there could be. Four intervals are compared: ours
(`difference_over_seeds`), the t interval over seeds alone, the bootstrap over problems alone (as
`eval --compare` has it for one pair of models), and the crossed bootstrap that resamples seeds and
problems.

Accuracies are fractions of k right samples, so that small benchmarks have ties and bounds as real
ones do.
"""

import argparse

import numpy as np
from scipy import stats

from grpo_replay.evaluation.statistics import bootstrap_draws, interval
from grpo_replay.lab.report.two_level import difference_over_seeds, sign_flip_over_seeds

RESAMPLES = 1000
TRUTH = 0.02
SETTINGS = [
    # seeds, benchmarks, problems each, samples, sd of seeds, of problems, of both
    (3, 5, 200, 4, 0.02, 0.10, 0.05),
    (5, 5, 200, 4, 0.02, 0.10, 0.05),
    (8, 5, 200, 4, 0.02, 0.10, 0.05),
    (8, 5, 200, 4, 0.00, 0.10, 0.05),
    (8, 5, 200, 4, 0.02, 0.00, 0.00),
    (3, 5, 30, 8, 0.02, 0.15, 0.05),
    (5, 5, 30, 8, 0.02, 0.15, 0.05),
    (5, 1, 30, 16, 0.01, 0.20, 0.05),
    (8, 1, 30, 16, 0.00, 0.20, 0.05),
]


def draw(setting: tuple, rng: np.random.Generator) -> list[np.ndarray]:
    """One experiment: the difference of every seed and problem, [S, N] for each benchmark."""
    seeds, benchmarks, problems, samples, of_seeds, of_problems, of_both = setting
    seed_S1 = rng.normal(0, of_seeds, (seeds, 1))
    found = []
    for _ in range(benchmarks):
        # Far enough from 0 and 1 that effects are not cut off, which would move the truth.
        base_N = rng.uniform(0.35, 0.65, problems)
        effect_N = np.clip(rng.normal(0, of_problems, problems), -0.25, 0.25)
        rest_SN = np.clip(rng.normal(0, of_both, (seeds, problems)), -0.1, 0.1)
        half_SN = (TRUTH + seed_S1 + effect_N + rest_SN) / 2
        a, b = (
            rng.binomial(samples, np.clip(base_N + sign * half_SN, 0, 1)) / samples
            for sign in (1, -1)
        )
        found.append(a - b)
    return found


def over_seeds(values_SN: list[np.ndarray]) -> tuple[float, float]:
    mean_S = np.mean([each.mean(axis=1) for each in values_SN], axis=0)
    return tuple(stats.ttest_1samp(mean_S, 0).confidence_interval(0.95))


def over_problems(values_SN: list[np.ndarray], rng: np.random.Generator) -> tuple[float, float]:
    means_B = [
        bootstrap_draws(each.shape[1], RESAMPLES, rng) @ each.mean(axis=0) / each.shape[1]
        for each in values_SN
    ]
    return interval(np.mean(means_B, axis=0))


def crossed(values_SN: list[np.ndarray], rng: np.random.Generator) -> tuple[float, float]:
    seeds = len(values_SN[0])
    seeds_BS = bootstrap_draws(seeds, RESAMPLES, rng) / seeds
    means_B = [
        np.einsum(
            "bs,sn,bn->b", seeds_BS, each,
            bootstrap_draws(each.shape[1], RESAMPLES, rng) / each.shape[1], optimize=True,
        )
        for each in values_SN
    ]  # fmt: skip
    return interval(np.mean(means_B, axis=0))


def simulate(setting: tuple, repeats: int, boots: int) -> list[float]:
    """Coverage in % of ours, seeds alone, problems alone and crossed; p < 0.05 between equals."""
    rng = np.random.default_rng([round(1000 * each) for each in setting])
    held = np.zeros(4)
    small = 0
    for repeat in range(repeats):
        values = draw(setting, rng)
        bounds = [difference_over_seeds(values)[0], over_seeds(values)]
        if repeat < boots:
            bounds += [over_problems(values, rng), crossed(values, rng)]
        held[: len(bounds)] += [low <= TRUTH <= high for low, high in bounds]
        equal_S = np.mean([each.mean(axis=1) for each in values], axis=0) - TRUTH
        small += sign_flip_over_seeds(equal_S) < 0.05
    return [*(100 * held / [repeats, repeats, boots, boots]), 100 * small / repeats]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--boots", type=int, default=300, help="repeats with the two bootstraps")
    options = parser.parse_args()
    print("| seeds | problems | k | sd: seeds, problems, both | seeds and problems | seeds alone | "
          "problems alone | crossed bootstrap | p < .05 |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for setting in SETTINGS:
        seeds, benchmarks, problems, samples, *effects = setting
        shares = simulate(setting, options.repeats, options.boots)
        cells = " | ".join(f"{share:.1f}" for share in shares)
        words = ", ".join(f"{100 * each:g}" for each in effects)
        print(
            f"| {seeds} | {benchmarks} × {problems} | {samples} | {words} | {cells} |", flush=True
        )


if __name__ == "__main__":
    main()
