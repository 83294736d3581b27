"""How often do evaluation's intervals hold the truth, and its p-values call equal models different?

    python benchmarks/interval_coverage.py          # about a minute

Simulates benchmarks of n problems with k samples each. A problem's chance of a right sample is
drawn from the beta distribution with parameters m and 1 - m, m the mean accuracy: most problems are
hopeless or easy, as in competition sets. The truth is m.
"""

import argparse

import numpy as np

from grpo_replay.evaluation.statistics import (
    bootstrap_draws,
    interval,
    resampled_mean,
    sign_flip_p_value,
)

RESAMPLES = 1000
SETTINGS = [  # problems, samples, mean accuracy
    (30, 16, 0.01), (30, 16, 0.02), (30, 16, 0.10), (30, 16, 0.25), (30, 16, 0.50),
    (5, 8, 0.25), (200, 4, 0.25), (500, 8, 0.25),
]  # fmt: skip


def draw(mean: float, problems: int, rng: np.random.Generator) -> np.ndarray:
    """The chance of a right sample of each problem."""
    return rng.beta(mean, 1 - mean, size=problems)


def simulate(problems: int, samples: int, mean: float, repeats: int) -> tuple[float, float]:
    """(share of intervals that hold the mean, share of p-values below 0.05 between equals)."""
    rng = np.random.default_rng([problems, samples, int(1000 * mean)])
    held = small = 0
    for _ in range(repeats):
        chances = draw(mean, problems, rng)
        a, b = (rng.binomial(samples, chances) / samples for _ in range(2))
        low, high = interval(resampled_mean(bootstrap_draws(problems, RESAMPLES, rng), a))
        held += low <= mean <= high
        small += sign_flip_p_value([b - a], RESAMPLES, rng) < 0.05
    return held / repeats, small / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1000)
    options = parser.parse_args()
    print("problems  samples  mean %  95 % interval holds it, %  p < 0.05 between equals, %")
    for problems, samples, mean in SETTINGS:
        held, small = simulate(problems, samples, mean, options.repeats)
        print(f"{problems:8} {samples:8} {100 * mean:7.0f} {100 * held:27.1f} {100 * small:26.1f}")


if __name__ == "__main__":
    main()
