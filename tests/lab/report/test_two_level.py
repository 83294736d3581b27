"""Intervals over seeds and problems: by hand, against scipy, and their limits."""

import math

import numpy as np
import pytest
from scipy import stats

from grpo_replay.evaluation.statistics import Component, t_interval
from grpo_replay.lab.report.costs import break_even, cost_ratio, first_crossing
from grpo_replay.lab.report.two_level import (
    sampled_over,
    seeds_to_tell,
    two_level_accuracy_interval,
    two_level_difference_interval,
    two_level_variance,
)


def accuracy_over_seeds(values):
    return two_level_accuracy_interval(values), sampled_over(values)


def difference_over_seeds(values):
    return two_level_difference_interval(values), sampled_over(values)


def test_the_variance_by_hand_without_interaction():
    """Seed means 1/4, 3/4: V = (1/8)/2; problem means the same; nothing is left over.
    V = 1/8, and Satterthwaite's freedom is (1/8)² / ((1/16)²/1 + (1/16)²/1) = 2."""
    found = two_level_variance([np.array([[0.0, 0.5], [0.5, 1.0]])])
    assert (found.variance, found.freedom) == pytest.approx((0.125, 2))
    small = t_interval(0.1, Component(found.variance / 100, found.freedom))
    assert small == pytest.approx((0.1 - 0.4302653 * 0.125**0.5, 0.1 + 0.4302653 * 0.125**0.5))
    assert t_interval(0.5, found) == (-1, 1)  # no difference is beyond these


def test_the_variance_by_hand_with_interaction():
    """First benchmark: seed means 1/2, 1/2; problem means 3/4, 1/4, so V_problems = (1/8)/2 = 1/16;
    left over are ±1/4 (square sum 1/4, one degree of freedom, four values), so V_rest = 1/16. The
    second is constant. Over two benchmarks both are divided by 4: V = 0 + 1/64 - 1/64 = 0, which
    is below V_problems, so that is kept."""
    first = np.array([[1.0, 0.0], [0.5, 0.5]])
    second = np.full((2, 2), 0.5)
    found = two_level_variance([first, second])
    assert (found.variance, found.freedom) == pytest.approx((1 / 64, 1))


def test_what_is_left_over_is_subtracted_once():
    """Seeds ±1/2, problems ±1/2 and ±1/10 left over: V = 1/4 + 1/4 of the means, less 1/400."""
    rest = 0.1 * np.array([[1, -1], [-1, 1]])
    values = np.array([[0.0, 1.0], [1.0, 2.0]]) + rest
    found = two_level_variance([values])
    # var((1/2, 3/2))/2 = 1/4 each; rest: 4·0.01 / 1 / 4 = 0.01.
    assert found.variance == pytest.approx(0.25 + 0.25 - 0.01)
    freedom = 0.49**2 / (0.25**2 + 0.25**2 + 0.01**2)
    assert found.freedom == pytest.approx(freedom)


def test_one_problem_gives_the_t_interval_over_seeds():
    values = np.random.default_rng(0).normal(0, 0.1, size=7)
    bounds, over = difference_over_seeds([values[:, None]])
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert over == "seeds" and bounds == pytest.approx(tuple(expected))


def test_many_problems_leave_the_t_interval_over_seeds():
    """With problems that do not differ, the number of problems does not matter."""
    seeds = np.random.default_rng(3).normal(0, 0.1, size=6)
    expected = stats.ttest_1samp(seeds, 0).confidence_interval(0.95)
    for problems in (2, 500):
        bounds = difference_over_seeds([np.tile(seeds[:, None], (1, problems))])[0]
        assert bounds == pytest.approx(tuple(expected))


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_have_no_interval(seeds):
    values = [np.random.default_rng(0).random((seeds, 30))]
    assert difference_over_seeds(values) == accuracy_over_seeds(values) == (None, None)


def test_accuracies_near_a_bound_have_an_interval_within_it():
    """Mean 99.2 % over five seeds; mean ± t·√V is above 100 %."""
    values = np.ones((5, 30))
    values[0, :6] = values[1, 0] = 0.8
    low, high = accuracy_over_seeds([values])[0]
    assert 0.88 < low < values.mean() < high <= 1
    mean, estimate = values.mean(), two_level_variance([values])
    assert mean + stats.t.ppf(0.975, estimate.freedom) * estimate.variance**0.5 > 1


def test_an_accuracy_over_seeds_has_the_interval_with_two_more_problems():
    values = np.random.default_rng(7).binomial(8, 0.3, (4, 12)) / 8
    added = np.hstack([values, np.zeros((4, 1)), np.ones((4, 1))])
    found = two_level_variance([added])
    half = stats.t.ppf(0.975, found.freedom) * found.variance**0.5
    bounds, over = accuracy_over_seeds([values])
    assert over == "seeds and problems"
    assert bounds == pytest.approx((added.mean() - half, added.mean() + half))


def test_constant_differences_have_the_spread_of_two_more_problems():
    """(1/2 four times, -1, 1) at every seed: the variance 7/15, over six problems."""
    half = stats.t.ppf(0.975, 5) * math.sqrt(7 / 15 / 6)
    bounds = difference_over_seeds([np.full((3, 4), 0.5)])[0]
    assert bounds == pytest.approx((0.5 - half, 1.0))


def test_the_seeds_that_would_tell_by_hand():
    """Two seeds at 0 and 0.2 without other noise: s² = 0.02, and t(n - 1)·√(0.02/n) < 0.1 first at
    n = 11 (2.228·0.0426 = 0.095; at 10: 2.262·0.0447 = 0.101)."""
    values = np.array([[0.0, 0.0], [0.2, 0.2]])
    assert seeds_to_tell([values]) == 11
    assert seeds_to_tell([values[:1]]) is None
    hard = values + np.array([-1.0, 1.0])  # the problems disagree, however many seeds there are
    assert seeds_to_tell([hard]) == math.inf


def test_the_seeds_that_would_tell_are_more_than_those_that_do_not():
    """The variance of a result is at least that of its rest: where seeds' means hardly differ."""
    rng, undecided = np.random.default_rng(0), 0
    for _ in range(300):
        values = rng.choice([-1.0, 0.0, 1.0], size=(3, 20), p=[0.2, 0.5, 0.3])
        low, high = difference_over_seeds([values])[0]
        if low <= 0 <= high:
            undecided += 1
            assert seeds_to_tell([values]) > 3
    assert undecided > 100


def spent(*rows):
    """((trained, generated) of the arm, of the baseline) by seed."""
    return np.array(rows, dtype=float)


@pytest.mark.parametrize(
    ("arm", "base", "pays", "mu"),
    [
        ((30, 10), (20, 15), "above", 2.0),  # 30 + 10μ = 20 + 15μ
        ((20, 15), (30, 10), "below", 2.0),
        ((20, 10), (20, 15), "always", None),
        ((30, 15), (20, 15), "never", None),
        ((30, 16), (20, 15), "never", None),
        ((10, 10), (20, 15), "always", None),
        ((30, 15 - 1e-12), (20, 15), "never", None),  # equal but for rounding
    ],
)
def test_an_arm_pays_where_it_reaches_the_accuracy_for_less(arm, base, pays, mu):
    found = break_even(spent((arm, base)))
    assert (found["pays"], found["mu"]) == (pays, mu)
    assert found["interval"] is None and found["seeds"] == 1
    for tried in (0.5, 8.0):
        cheaper = arm[0] + tried * arm[1] < base[0] + tried * base[1]
        expected = {"above": tried > 2, "below": tried < 2, "always": True, "never": False}
        assert cheaper == expected[pays]


def test_the_interval_of_the_break_even_has_every_mu_whose_difference_in_cost_may_be_zero():
    rows = [((30, 10), (20, 15)), ((33, 10), (20, 14)), ((29, 9), (20, 15)), ((31, 10), (19, 16))]
    found = break_even(spent(*rows))
    low, high = found["interval"]
    assert low < found["mu"] < high

    def holds_zero(mu):
        costs = [a[0] + mu * a[1] - b[0] - mu * b[1] for a, b in rows]
        bounds = stats.ttest_1samp(costs, 0).confidence_interval(0.95)
        return bounds.low <= 0 <= bounds.high

    assert holds_zero(low + 1e-6) and holds_zero(high - 1e-6)
    assert not holds_zero(low - 1e-6) and not holds_zero(high + 1e-6)
    rows = [((30, 10), (20, 15)), ((31, 15), (20, 10)), ((32, 10), (20, 12))]  # may save none
    low, high = break_even(spent(*rows))["interval"]
    assert high == math.inf and low > 0.1
    assert all(holds_zero(mu) for mu in (low + 1e-6, 10, 1e6)) and not holds_zero(low - 1e-6)
    rows[0] = ((10, 10), (30, 15))  # nor is it sure that it trains on more
    assert break_even(spent(*rows))["interval"] == (0.0, math.inf) and holds_zero(0)
    assert break_even(spent()[:0].reshape(0, 2, 2)) is None
    assert break_even(spent(*[((20, 10), (20, 10))] * 3)) is None, "neither is dearer"
    equal = [((extra, 10), (20, 10)) for extra in (29, 30, 31)]  # that save nothing at all
    assert break_even(spent(*equal))["interval"] is None


def test_the_cost_ratio_is_one_at_the_break_even_and_its_interval_holds_one_at_those_of_the_other():
    rows = [((30, 10), (20, 15)), ((33, 10), (20, 14)), ((29, 9), (20, 15)), ((31, 10), (19, 16))]
    assert cost_ratio(spent(rows[0]), 2.0) == (1.0, None)  # (30 + 20) / (20 + 30)
    assert cost_ratio(spent(*rows[:2]), 1.0) == (pytest.approx(83 / 69), None)
    even = break_even(spent(*rows))
    assert cost_ratio(spent(*rows), even["mu"])[0] == pytest.approx(1)
    ratio, (low, high) = cost_ratio(spent(*rows), 0.0)
    assert low < ratio < high and ratio == pytest.approx(123 / 79)
    for end, inside in zip(even["interval"], (1e-6, -1e-6), strict=True):
        ends = [cost_ratio(spent(*rows), end + sign * inside)[1] for sign in (1, -1)]
        assert [low <= 1 <= high for low, high in ends] == [True, False]


def test_the_cost_of_an_accuracy_is_interpolated():
    assert first_crossing([0, 10, 20], [0.2, 0.4, 0.5], 0.3) == pytest.approx(5)
    assert first_crossing([0, 10, 20], [0.2, 0.4, 0.3], 0.4) == 10
    assert first_crossing([0, 10], [0.2, 0.4], 0.1) == 0
    assert first_crossing([0, 10], [0.2, 0.4], 0.5) == math.inf


@pytest.mark.parametrize(("of_seeds", "of_problems"), [(0.3, 0.3), (0.0, 1.0)])
def test_the_interval_holds_the_truth_in_about_95_percent(of_seeds, of_problems):
    """Five seeds and two benchmarks of 20 problems, each with effects of its own. 1,000 repeats
    have a standard error of 0.7 %."""
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(1000):
        seed_S1 = rng.normal(0, of_seeds, (5, 1))
        values = [
            0.1 * (seed_S1 + rng.normal(0, of_problems, 20) + rng.normal(0, 0.2, (5, 20)))
            for _ in range(2)
        ]
        (low, high), _ = difference_over_seeds(values)
        held += low <= 0 <= high
    assert 925 <= held <= 985
