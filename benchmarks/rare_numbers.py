"""The numbers of the protocol of `tiny-rare` (recipes/sweeps/tiny-rare.yaml), from its record.

    S  seeds     N  problems of a benchmark     E  evaluations of a run

Between evaluations everything is interpolated linearly, over generated rollouts or compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from grpo_replay.lab.report.two_level import two_level_difference_interval

BENCHMARKS = ("rare", "hard")
SAMPLES = 32
BUDGET = 20_480
"""Generated rollouts at which all arms are compared."""
WITHOUT_BUFFER = ("grpo", "epochs-2", "epochs-3", "refills", "groups-32")
OURS = "ours"
COST_RATIOS = (1, 5, 15)
RESAMPLES = 10_000
LETTERS = "0123456789abcdefghijklmnopqrstuvw"
"""0 to 32 correct samples of a problem, a letter each."""

Values = tuple[np.ndarray, ...]
"""Of a run, float64 [N] for each benchmark; of several, [S, N]."""


def letter_of(correct: int) -> str:
    return LETTERS[correct]


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """A recorded run. `generated_E` and `trained_E` are sums up to each evaluation, `means` other
    columns of the record, `accuracy` float64 [E, N] of each benchmark (empty of a tuning run)."""

    stage: str
    arm: str
    rate: float
    seed: int
    generated_E: np.ndarray
    trained_E: np.ndarray
    means: Mapping[str, np.ndarray]
    accuracy: Values

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]]) -> Course:
        """The rows of a run, in any order."""
        ordered = sorted(rows, key=lambda row: int(row["step"]))
        names = (
            *(*BENCHMARKS, "pass", "solved", "mixed", "fresh_success", "replay_success"),
            *("trained_tokens", "seconds"),
        )

        def column(name: str) -> np.ndarray:
            return np.array([float(row[name]) for row in ordered])

        letters = [[row[f"{name}_correct"] for row in ordered] for name in BENCHMARKS]
        accuracy = [
            np.array([[LETTERS.index(each) for each in text] for text in texts]) / SAMPLES
            for texts in letters
        ]
        first = ordered[0]
        return cls(
            first["stage"], first["arm"], float(first["rate"]), int(first["seed"]),
            column("generated"), column("trained"), {name: column(name) for name in names},
            tuple(accuracy),
        )  # fmt: skip

    @property
    def mean_E(self) -> np.ndarray:
        """The accuracy: the mean of the benchmarks."""
        return np.mean([self.means[name] for name in BENCHMARKS], axis=0)

    def compute_E(self, mu: float) -> np.ndarray:
        return self.trained_E + mu * self.generated_E


def at(axis_E: np.ndarray, values_E: np.ndarray, place: float) -> np.ndarray:
    """The values [E, …] at a place of an ascending axis; the last ones beyond its end."""
    position = float(np.interp(place, axis_E, np.arange(len(axis_E))))
    before = min(int(position), len(axis_E) - 2)
    share = position - before
    return (1 - share) * values_E[before] + share * values_E[before + 1]


def area(axis_E: np.ndarray, values_E: np.ndarray, end: float) -> np.ndarray:
    """The mean of the values [E, …] over the axis from 0 to `end`, by trapezoids."""
    inside = axis_E < end
    x = np.append(axis_E[inside], end)
    y = np.concatenate([values_E[inside], at(axis_E, values_E, end)[None]])
    return np.trapezoid(y, x, axis=0) / end


def areas(run: Course) -> Values:
    return tuple(area(run.generated_E, each, BUDGET) for each in run.accuracy)


def finals(run: Course) -> Values:
    return tuple(at(run.generated_E, each, BUDGET) for each in run.accuracy)


def passes(run: Course) -> Values:
    return tuple(at(run.generated_E, (each > 0).astype(float), BUDGET) for each in run.accuracy)


def share_of(name: str) -> Callable[[Course], Values]:
    """A share of the record, as a benchmark of one problem."""
    return lambda run: (np.atleast_1d(at(run.generated_E, run.means[name], BUDGET)),)


def replayed_minus_fresh(run: Course) -> Values:
    (replayed,), (fresh,) = share_of("replay_success")(run), share_of("fresh_success")(run)
    return (replayed - fresh,)


Pairs = Sequence[tuple[Course, Course]]
"""Runs of an arm and of the baseline with the same seed."""


def differences(pairs: Pairs, outcome: Callable[[Course], Values]) -> Values:
    """[S, N] of each benchmark: the arm minus the baseline."""
    found = [[a - b for a, b in zip(outcome(one), outcome(other))] for one, other in pairs]
    return tuple(np.array(each) for each in zip(*found))


def at_equal_compute(pairs: Pairs, mu: float) -> Values:
    """The same of accuracies when both runs of a pair have spent what the cheaper one spent for
    `BUDGET` rollouts."""
    found = []
    for pair in pairs:
        axes = [run.compute_E(mu) for run in pair]
        spent = min(float(at(run.generated_E, axis, BUDGET)) for run, axis in zip(pair, axes))
        one, other = (
            [at(axis, each, spent) for each in run.accuracy] for run, axis in zip(pair, axes)
        )
        found.append([a - b for a, b in zip(one, other)])
    return tuple(np.array(each) for each in zip(*found))


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean over seeds, benchmarks and problems, its 95 % interval and two-sided p value by the
    bootstrap, the t interval of two_level.py, and at how many seeds it is above 0."""

    mean: float
    low: float
    high: float
    p: float
    t_interval: tuple[float, float] | None
    above: int
    seeds: int

    def __str__(self) -> str:
        of_t = "none"
        if self.t_interval is not None:
            of_t = "[{:+.1f}, {:+.1f}]".format(*(100 * each for each in self.t_interval))
        return (
            f"{100 * self.mean:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}], "
            f"{self.above}/{self.seeds} | {of_t} | {self.p:.4f}"
        )


def estimate(values: Values, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Of [S, N] for each benchmark. Every resample draws the seeds, and of each benchmark the
    problems, with replacement; a benchmark of one problem keeps it."""
    rng, seeds = np.random.default_rng(seed), len(values[0])
    drawn_RS = rng.multinomial(seeds, np.full(seeds, 1 / seeds), resamples) / seeds
    means_R = np.zeros(resamples)
    for each in values:
        count = each.shape[1]
        drawn_RN = rng.multinomial(count, np.full(count, 1 / count), resamples) / count
        means_R += np.einsum("rn,rn->r", drawn_RS @ each, drawn_RN) / len(values)
    low, high = np.quantile(means_R, [0.025, 0.975]).tolist()
    tails = [(1 + int((sign * means_R <= 0).sum())) / (resamples + 1) for sign in (1, -1)]
    interval = two_level_difference_interval(values)
    by_seed_S = np.mean([each.mean(axis=1) for each in values], axis=0)
    return Estimate(
        float(by_seed_S.mean()), low, high, min(1.0, 2 * min(tails)),
        None if interval is None else (float(interval[0]), float(interval[1])),
        int((by_seed_S > 0).sum()), seeds,
    )  # fmt: skip


def holm(p_values: Sequence[float]) -> list[float]:
    """The adjusted p values of Holm (1979): p_(i) times the number of those not below it, never
    falling."""
    found, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        found[place] = highest
    return found


def secondary(pairs: Pairs) -> dict[str, Estimate]:
    """The eight outcomes of the protocol, in its order."""
    own = [run for run, _ in pairs]
    return {
        "final accuracy": estimate(differences(pairs, finals)),
        **{f"accuracy at equal compute, μ = {mu}": estimate(at_equal_compute(pairs, mu))
           for mu in COST_RATIOS},
        "pass@32": estimate(differences(pairs, passes)),
        "training problems ever solved": estimate(differences(pairs, share_of("solved"))),
        "groups with mixed rewards": estimate(differences(pairs, share_of("mixed"))),
        "successes, replayed minus fresh": estimate(
            (np.array([replayed_minus_fresh(run)[0] for run in own]),)
        ),
    }  # fmt: skip


def rates(runs: Sequence[Course]) -> dict[str, dict[float, list[Course]]]:
    """The tuning runs by arm and rate."""
    found: dict[str, dict[float, list[Course]]] = {}
    for run in sorted(runs, key=lambda run: (run.rate, run.seed)):
        if run.stage == "tune":
            found.setdefault(run.arm, {}).setdefault(run.rate, []).append(run)
    return found


def chosen_rate(by_rate: Mapping[float, Sequence[Course]]) -> float:
    """The rate with the best mean accuracy after the last step, the first of equal ones."""
    return max(by_rate, key=lambda rate: fmean(run.mean_E[-1] for run in by_rate[rate]))


def mean_area(runs: Sequence[Course]) -> float:
    return fmean(float(area(run.generated_E, run.mean_E, BUDGET)) for run in runs)


def best_without_buffer(runs: Sequence[Course]) -> str:
    """The arm of `WITHOUT_BUFFER` with the largest area on the tuning seeds, at its rate."""
    tuned = rates(runs)
    return max(
        (arm for arm in WITHOUT_BUFFER if arm in tuned),
        key=lambda arm: mean_area(tuned[arm][chosen_rate(tuned[arm])]),
    )


def pairs_of(runs: Sequence[Course], arm: str, baseline: str) -> Pairs:
    """Of the comparison, by seed."""
    by_arm = {
        name: {run.seed: run for run in runs if run.stage == "compare" and run.arm == name}
        for name in (arm, baseline)
    }
    common = sorted({*by_arm[arm]} & {*by_arm[baseline]})
    return [(by_arm[arm][seed], by_arm[baseline][seed]) for seed in common]


def compare(runs: Sequence[Course]) -> str:
    """All numbers as Markdown: the grid of the tuning, and what the comparison has so far."""
    parts = [_tuning(runs)]
    baseline = best_without_buffer(runs)
    if pairs := pairs_of(runs, OURS, baseline):
        parts += [_primary(pairs, baseline), _described(runs, baseline), _beside_grpo(runs)]
    return "\n".join(parts)


def _tuning(runs: Sequence[Course]) -> str:
    lines = ["| arm | rate | seeds | final, % | area, % | |", "|---|---|---|---|---|---|"]
    for arm, by_rate in rates(runs).items():
        best = chosen_rate(by_rate)
        for rate, members in by_rate.items():
            edge = " at the edge" if best in (min(by_rate), max(by_rate)) else ""
            final = 100 * fmean(run.mean_E[-1] for run in members)
            lines.append(
                f"| `{arm}` | {rate:g} | {len(members)} | {final:.1f} | "
                f"{100 * mean_area(members):.1f} | {f'chosen{edge}' if rate == best else ''} |"
            )
    return "\n".join([*lines, "", f"Best without a buffer: `{best_without_buffer(runs)}`.", ""])


def _primary(pairs: Pairs, baseline: str) -> str:
    found = secondary(pairs)
    adjusted = holm([each.p for each in found.values()])
    lines = [
        f"`{OURS}` minus `{baseline}`, points, 95 % bootstrap over seeds and problems:", "",
        "| outcome | difference, seeds ahead | t interval | p | Holm |", "|---|---|---|---|---|",
        f"| **area under accuracy** | {estimate(differences(pairs, areas))} | |",
        *(f"| {name} | {each} | {p:.4f} |" for (name, each), p in zip(found.items(), adjusted)),
    ]  # fmt: skip
    return "\n".join([*lines, ""])


def _described(runs: Sequence[Course], baseline: str) -> str:
    lines = [
        f"| arm | area | − `{baseline}` | `{OURS}` − it | final, rare | hard | "
        "rollouts trained on | tokens | seconds | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(run.arm for run in runs if run.stage == "compare"):
        own = [run for run in runs if run.stage == "compare" and run.arm == arm]
        final = [f"{100 * mean_at_budget(own, run_means(name)):.1f}" for name in BENCHMARKS]
        spent = [
            f"{mean_at_budget(own, of_run):,.0f}"
            for of_run in (lambda run: run.trained_E, run_means("trained_tokens"),
                           run_means("seconds"))
        ]  # fmt: skip
        cells = [
            f"`{arm}`", f"{100 * mean_area(own):.1f}", _ahead(runs, arm, baseline),
            _ahead(runs, OURS, arm), *final, *spent, str(len(own)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _beside_grpo(runs: Sequence[Course]) -> str:
    """The comparison with plain GRPO, which the protocol does not have."""
    mus = (1, 2, 5, 15)
    heads = [
        "arm − `grpo`",
        "area",
        "final",
        "pass@32",
        *(f"equal compute, μ = {mu}" for mu in mus),
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm in dict.fromkeys(run.arm for run in runs if run.stage == "compare"):
        if arm != "grpo" and (pairs := pairs_of(runs, arm, "grpo")):
            found = [*(differences(pairs, outcome) for outcome in (areas, finals, passes)),
                     *(at_equal_compute(pairs, mu) for mu in mus)]  # fmt: skip
            cells = [str(estimate(each)).split(" | ")[0] for each in found]
            lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def run_means(name: str) -> Callable[[Course], np.ndarray]:
    return lambda run: run.means[name]


def mean_at_budget(runs: Sequence[Course], of_run: Callable[[Course], np.ndarray]) -> float:
    return fmean(float(at(run.generated_E, of_run(run), BUDGET)) for run in runs)


def _ahead(runs: Sequence[Course], arm: str, baseline: str) -> str:
    """The difference of areas; empty without common seeds, and of an arm to itself."""
    pairs = pairs_of(runs, arm, baseline)
    if arm == baseline or not pairs:
        return ""
    return str(estimate(differences(pairs, areas))).split(" | ")[0]
