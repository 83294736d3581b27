"""Paper B's design theory: closed form against numbers, and what the edges mean."""

import math

import pytest
from scipy import integrate, optimize

from grpo_replay.lab.planning.theory import (
    PowerGrowth,
    RatioGrowth,
    best_objective,
    best_replay_ratio,
    numeric_optimum,
    objective,
    power_law_optimum,
    recommended_design,
)
from grpo_replay.recipe import Machines
from grpo_replay.replay.compose import relative_compute

MUS = (0.3, 1.0, 2.5, 5.28, 6.84, 20.0, 100.0)
RHOS = (0.0, 0.01, 0.1, 0.3, 0.7, 1.0)
EXPONENTS = (0.02, 0.1, 0.2, 0.3, 0.4, 0.48)


def test_the_check_value_of_the_paper_comes_out():
    best = power_law_optimum(5.28, 0.1, 0.2)
    assert best == pytest.approx((4.265, 3.973), abs=5e-4)


def test_closed_form_and_numerical_optimum_agree_over_a_grid():
    checked = 0
    for mu in MUS:
        for rho in RHOS:
            for exponent in EXPONENTS:
                closed = power_law_optimum(mu, rho, exponent)
                numeric = numeric_optimum(mu, rho, PowerGrowth(exponent))
                assert numeric == pytest.approx(closed, rel=1e-5), (mu, rho, exponent)
                checked += 1
    assert checked == len(MUS) * len(RHOS) * len(EXPONENTS) == 252


@pytest.mark.parametrize("mu, rho, exponent", [(5.28, 0.1, 0.2), (1.0, 0.0, 0.4), (20.0, 1.0, 0.1)])
def test_a_joint_optimiser_of_both_variables_finds_the_same_optimum(mu, rho, exponent):
    # J written out from the paper, not taken from the planner.
    def log_j(point):
        x, y = math.exp(point[0]), math.exp(point[1])
        variance = x ** (2 * exponent) / (2 * exponent + 1)
        return math.log(variance * (1 + y / mu) * (1 / y + 1 / x + rho))

    found = optimize.minimize(
        log_j, [0.5, 0.5], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-14}
    )
    best = power_law_optimum(mu, rho, exponent)
    assert tuple(map(math.exp, found.x)) == pytest.approx(best, rel=1e-4)


def test_best_y_for_a_horizon_beats_its_neighbours():
    growth, mu, rho, x = PowerGrowth(0.2), 5.28, 0.1, 7.0
    y = best_replay_ratio(x, mu, rho)
    here = objective(x, y, mu, rho, growth)
    assert here == pytest.approx(best_objective(x, mu, rho, growth), rel=1e-12)
    assert all(objective(x, y * factor, mu, rho, growth) > here for factor in (0.97, 1.03))


def test_rollouts_that_never_age_are_never_evicted():
    x, y = power_law_optimum(5.28, 0.1, 0.0)
    assert math.isinf(x) and y == pytest.approx(math.sqrt(5.28 / 0.1))
    assert math.isinf(numeric_optimum(5.28, 0.1, PowerGrowth(0.0))[0])
    # a → 0 gets there without a jump in y, and x grows without bound.
    small = power_law_optimum(5.28, 0.1, 1e-9)
    assert small[1] == pytest.approx(y, rel=1e-6) and small[0] > 1e8


def test_the_recommendation_for_rollouts_that_never_age_is_within_five_percent_of_the_limit():
    for rho in (0.0, 0.1, 1.0):
        x, _ = recommended_design(5.28, rho, PowerGrowth(0.0))
        limit = (math.sqrt(1 / 5.28) + math.sqrt(rho)) ** 2
        assert best_objective(x, 5.28, rho, PowerGrowth(0.0)) == pytest.approx(1.05 * limit)


@pytest.mark.parametrize("exponent", [0.5, 0.7, 2.0])
def test_variance_that_grows_too_fast_has_no_optimum(exponent):
    assert power_law_optimum(5.28, 0.1, exponent) == (0.0, 0.0)
    growth = PowerGrowth(exponent)
    values = [best_objective(x, 5.28, 0.1, growth) for x in (1e-3, 1e-2, 1e-1, 1.0, 10.0)]
    if exponent > 0.5:
        assert numeric_optimum(5.28, 0.1, growth) == (0.0, 0.0)
        assert values == sorted(values)  # J rises with x everywhere
    assert recommended_design(5.28, 0.1, growth) == (1.0, pytest.approx(math.sqrt(5.28 / 1.1)))


def test_cheap_generation_recommends_training_on_less_than_is_generated():
    x, y = recommended_design(0.3, 0.5, PowerGrowth(0.2))
    assert x == 1.0
    assert y == pytest.approx(math.sqrt(0.3 / 1.5))
    assert y < 1


def test_ratio_growth_has_the_mean_that_quadrature_gives():
    growth = RatioGrowth(0.02, 1.4)
    for x in (0.5, 3.0, 20.0):
        exact, _ = integrate.quad(lambda s: math.exp(0.02 * s**1.4), 0, x)
        assert growth.mean_variance(x) == pytest.approx(exact / x, rel=1e-4)
    assert math.isinf(growth.mean_variance(1e9))


BY_HAND = {  # (1 + W/T)/(1 + μ)
    (7.0, 7, 1): 1.0, (7.0, 6, 2): 0.5, (7.0, 4, 4): 0.25, (3.0, 5, 3): 2 / 3,
    (5.28, 5, 3): 0.42463, (6.84, 6, 2): 0.51020,
}  # fmt: skip


@pytest.mark.parametrize(("mu", "workers", "trainers"), BY_HAND)
def test_gamma_and_replay_ratio_by_hand(mu, workers, trainers):
    machines = Machines(workers=workers, trainers=trainers, mu=mu)
    assert machines.gamma == pytest.approx(BY_HAND[mu, workers, trainers], abs=1e-5)
    assert machines.ratio == pytest.approx(mu * trainers / workers)
    assert relative_compute(machines.ratio, mu) == pytest.approx(machines.gamma)


def test_relative_compute_is_the_same_in_both_of_the_papers_forms():
    mu, y = 5.28, 3.0
    workers_per_trainer = mu / y
    assert relative_compute(y, mu) == pytest.approx((1 + workers_per_trainer) / (1 + mu))
    batch, generated = 3.0, 1.0
    assert relative_compute(y, mu) == pytest.approx((batch + mu * generated) / (batch + mu * batch))
    assert relative_compute(1.0, mu) == 1.0
