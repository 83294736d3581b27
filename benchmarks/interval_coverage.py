"""How often do intervals of accuracies hold the truth, and p-values call equal models different?

    python benchmarks/interval_coverage.py          # minutes
    python benchmarks/interval_coverage.py --seeds  # the same over seeds that differ

Simulates benchmarks of n problems with k samples each. A problem's chance of a right sample is
drawn from the beta distribution with parameters m and 1 - m, m the mean accuracy: most problems are
hopeless or easy, as in competition sets. The truth is m. Ours are compared with the percentile
bootstrap over problems. With seeds, a fifth of every chance is the seed's own, from the beta
distribution with parameters 8·m and 8·(1 - m), so that the truth is still m: seeds have a standard
deviation of 3 points at 50 % and 0.7 at 2 %. There ours are compared with mean ± t·√V (for one
seed over problems alone).
"""

import argparse

import numpy as np

from grpo_replay.evaluation.statistics import (
    CONFIDENCE,
    accuracy_interval,
    bootstrap_draws,
    difference_interval,
    interval,
    resampled_mean,
    sign_flip_p_value,
)
from grpo_replay.lab.report.two_level import (
    accuracy_over_seeds,
    difference_over_problems,
    t_interval,
    two_level_variance,
)

RESAMPLES = 1000
SETTINGS = [  # problems, samples, mean accuracy
    (30, 16, 0.01), (30, 16, 0.02), (30, 16, 0.10), (30, 16, 0.25), (30, 16, 0.50),
    (30, 16, 0.90), (30, 16, 0.98), (30, 16, 0.99),
    (30, 1, 0.02), (30, 1, 0.50), (5, 8, 0.25), (200, 4, 0.02), (200, 4, 0.25), (500, 8, 0.25),
]  # fmt: skip
SEEDS = (1, 2, 3, 5)
SEED_MEANS = (0.02, 0.10, 0.50, 0.90, 0.98)
SEED_SHARE, SEED_CONCENTRATION = 0.2, 8


def simulate(problems: int, samples: int, mean: float, repeats: int) -> tuple[float, ...]:
    """Of one model: shares of bootstrap and our intervals that hold the mean, mean width of both.
    Of two equal ones: the shares of p-values below 0.05 and of our intervals that hold 0."""
    rng = np.random.default_rng([problems, samples, int(1000 * mean)])
    found = []
    for _ in range(repeats):
        chances = rng.beta(mean, 1 - mean, size=problems)
        a, b = (rng.binomial(samples, chances) / samples for _ in range(2))
        each = [
            interval(resampled_mean(bootstrap_draws(problems, RESAMPLES, rng), a)),
            accuracy_interval([a]),
        ]
        held = [low <= mean <= high for low, high in each]
        widths = [high - low for low, high in each]
        low, high = difference_interval([b - a])
        equal = sign_flip_p_value([b - a], RESAMPLES, rng) < 0.05, low <= 0 <= high
        found.append([*held, *widths, *equal])
    return tuple(np.mean(found, axis=0))


def simulate_seeds(seeds: int, mean: float, repeats: int) -> tuple[float, float, float]:
    """Over seeds, 30 problems of 16 samples: shares of t intervals and of ours that hold the mean
    (NaN without an interval), and of t intervals that leave [0, 1]."""
    rng = np.random.default_rng([seeds, int(1000 * mean)])
    found = []
    for _ in range(repeats):
        chances_N = rng.beta(mean, 1 - mean, size=30)
        own_S1 = rng.beta(
            SEED_CONCENTRATION * mean, SEED_CONCENTRATION * (1 - mean), size=(seeds, 1)
        )
        chances_SN = (1 - SEED_SHARE) * chances_N + SEED_SHARE * own_S1
        values = [rng.binomial(16, chances_SN) / 16]
        if seeds == 1:
            low, high = difference_over_problems(values)[0]
        else:
            low, high = t_interval(values[0].mean(), two_level_variance(values))
        ours = accuracy_over_seeds(values)[0]
        held = np.nan if ours is None else ours[0] <= mean <= ours[1]
        found.append([low <= mean <= high, held, low <= 0 or high >= 1])
    return tuple(np.mean(found, axis=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--seeds", action="store_true")
    options = parser.parse_args()
    print(f"share of {CONFIDENCE:.0%} intervals that hold the accuracy, in %")
    if options.seeds:
        print("| seeds | accuracy, % | t | t leaves 0 to 100 % | ours |\n|---|---|---|---|---|")
        for seeds in SEEDS:
            for mean in SEED_MEANS:
                t, ours, beyond = simulate_seeds(seeds, mean, options.repeats)
                shown = "the seeds" if np.isnan(ours) else f"{100 * ours:.1f}"
                cells = (f"{100 * each:.1f}" for each in (mean, t, beyond))
                print(f"| {seeds} | {' | '.join(cells)} | {shown} |", flush=True)
        return
    heads = ("problems, samples", "accuracy, %", "bootstrap", "ours", "width", "width",
             "p < 0.05", "difference")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for problems, samples, mean in SETTINGS:
        numbers = simulate(problems, samples, mean, options.repeats)
        cells = " | ".join(f"{100 * number:.1f}" for number in numbers)
        print(f"| {problems}, {samples} | {100 * mean:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
