"""No replay and every way to make batches: J against our own buffer; and what a verdict says."""

import math
from functools import partial

import numpy as np
import pytest
from buffer_makers import make_rollout

from grpo_replay.lab.planning.theory import (
    PowerGrowth,
    RatioGrowth,
    break_even_mu,
    fresh_anchored_objective,
    judge,
    no_replay_objective,
    objective,
    power_law_optimum,
    relative_cost,
    without_replacement_objective,
)
from grpo_replay.recipe import ReplaySection
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.compose import buffer_step

R, STEPS = 25, 300
FLAT, GROWING = PowerGrowth(0.0), PowerGrowth(0.2)


def cell_variance(growth, age):
    """The mean variance over ages from `age` to `age` + 1: rollouts that are `age` steps old."""
    return (age + 1) * growth.mean_variance(age + 1.0) - age * (
        growth.mean_variance(float(age)) if age else 0.0
    )


def simulated_bracket(growth, rho, **settings):
    """R times the variance of a batch's mean, averaged over batches of our own buffer.

    A rollout drawn twice is one sample, two of one step are independent, and two of different steps
    have covariance rho/R.
    """
    section = ReplaySection(
        preset="ours", unit="rollout", priority="uniform", warmup_steps=0, **settings
    )
    buffer, rng, found, next_id = ReplayBuffer(section, 1), np.random.default_rng(0), [], 0
    for step in range(STEPS):
        fresh = [make_rollout(next_id + i, birth_step=step) for i in range(R)]
        next_id += R
        batch = buffer_step(buffer, fresh, step, R, rng)
        if step >= 20:
            ages = np.array([step - each.birth_step for each in batch.rollouts])
            ids = [each.rollout_id for each in batch.rollouts]
            _, first, times = np.unique(ids, return_index=True, return_counts=True)
            variances = np.array([cell_variance(growth, age) for age in ages[first]])
            of_step = np.bincount(ages)
            pairs = len(batch.rollouts) ** 2 - (of_step**2).sum()
            total = (times**2 * variances).sum() + pairs * rho / R
            found.append(R * total / len(batch.rollouts) ** 2)
    return np.mean(found)


def bracket(j, y):
    """J without the compute of a step, at μ = 1."""
    return j / (1 + y)


FIFO = dict(composition="buffer_only", max_age_steps=None, drop_zero_variance=False)
ANCHORED = dict(composition="fresh_anchored", capacity_rollouts=10_000)


def test_drawing_as_many_as_there_are_with_replacement_is_not_the_algorithm_without_replay():
    """N = R = B = 25: with replacement 2 - 1/25 = 1.96, once each 1."""
    own = dict(FIFO, capacity_rollouts=R, ratio=1.0)
    assert simulated_bracket(FLAT, 0.0, **own, with_replacement=True) == pytest.approx(
        1.96, rel=0.02
    )
    assert simulated_bracket(FLAT, 0.0, **own, with_replacement=False) == pytest.approx(1.0)
    assert bracket(objective(1.0, 1.0, 1.0, 0.0, FLAT), 1.0) == 2.0
    assert bracket(no_replay_objective(1.0, FLAT), 1.0) == 1.0


@pytest.mark.parametrize(("growth", "rho"), [(GROWING, 0.0), (FLAT, 0.4)])
def test_draws_without_replacement_have_the_bracket_of_our_buffer(growth, rho):
    found = simulated_bracket(
        growth, rho, **FIFO, capacity_rollouts=4 * R, ratio=2.0, with_replacement=False
    )
    expected = bracket(without_replacement_objective(4.0, 2.0, 1.0, rho, growth), 2.0)
    assert found == pytest.approx(expected, rel=0.02)


def test_draws_with_replacement_have_the_bracket_of_our_buffer():
    """The paper's 1/y + 1/x leaves out 1/(B·N), which is 0.005 for B = 50 and N = 100."""
    found = simulated_bracket(
        GROWING, 0.0, **FIFO, capacity_rollouts=4 * R, ratio=2.0, with_replacement=True
    )
    expected = bracket(objective(4.0, 2.0, 1.0, 0.0, GROWING), 2.0)
    assert found == pytest.approx(expected * (1 - R / 5000 / 0.75), rel=0.02)


@pytest.mark.parametrize(("growth", "rho"), [(GROWING, 0.0), (FLAT, 0.4)])
def test_fresh_anchored_batches_have_the_bracket_of_our_buffer(growth, rho):
    replacement = rho > 0
    found = simulated_bracket(
        growth, rho, **ANCHORED, max_age_steps=4, ratio=0.5, with_replacement=replacement
    )
    j = fresh_anchored_objective(0.5, 4.0, 1.0, rho, growth, replacement)
    assert found == pytest.approx(bracket(j, 1.5), rel=0.02)


def test_every_way_to_draw_ends_at_no_replay():
    for growth in (GROWING, RatioGrowth(0.01, 1.2)):
        none = no_replay_objective(5.0, growth)
        assert without_replacement_objective(1.0, 1.0, 5.0, 0.1, growth) == pytest.approx(none)
        assert fresh_anchored_objective(1e-12, 10.0, 5.0, 0.1, growth) == pytest.approx(none)
        fifo = objective(1.0, 1.0, 5.0, 0.1, growth)
        assert fifo / none == pytest.approx(2.1)


def test_the_best_buffer_at_the_papers_check_value_is_dearer_than_none():
    best = power_law_optimum(5.28, 0.1, 0.2)
    verdict = judge(partial(objective, *best), 5.28, 0.1, PowerGrowth(0.2))
    assert 1 / verdict.ratio == pytest.approx(0.65, abs=0.005)
    assert verdict.answer == "dearer" and 1 < verdict.low < verdict.ratio < verdict.high


def test_a_verdict_that_one_changed_assumption_turns_round_is_undecided():
    """x = 4, y = 2, no aging: (0.75 + ρ)·(1 + 2/μ)/(1 + 1/μ) = 0.85·1.4/1.2 = 0.99 at μ = 5."""
    cost = partial(objective, 4.0, 2.0)
    verdict = judge(cost, 5.0, 0.1, FLAT)
    assert verdict.ratio == pytest.approx(0.85 * 1.4 / 1.2)
    assert verdict.high == pytest.approx(1.15 * 1.4 / 1.2)
    assert verdict.answer == "undecided"
    # 1/8 + 1/8 is cheap under every change: at most 0.65·(1 + 8/10)/(1 + 1/10).
    cheap = partial(judge, partial(objective, 8.0, 8.0), 20.0, 0.1, FLAT)
    assert cheap().answer == "cheaper"
    assert cheap(cost_without_aging=partial(objective, 8.0, 8.0)).answer == "undecided"


def test_a_design_is_dearer_without_a_known_growth_only_if_it_is_even_where_nothing_ages():
    """x = 4, y = 2, μ = 5: without aging 0.99 (above); that of x = y = 1 is (2 + ρ) times."""
    dear = partial(judge, partial(objective, 4.0, 2.0), 5.0, 0.1, PowerGrowth(0.4))
    assert dear().answer == "dearer" and dear().low > 1
    kind = dear(cost_without_aging=partial(objective, 4.0, 2.0))
    assert kind.answer == "undecided" and kind.low == pytest.approx(0.85 * 1.4 / 1.2)
    assert dear(cost_without_aging=partial(objective, 1.0, 1.0)) == dear()


def test_the_mu_at_which_a_design_breaks_even():
    """x = 4, y = 2, ρ = 0.1, no aging: 0.85·(μ + 2)/(μ + 1) = 1 at μ = 0.7/0.15."""
    cost = partial(objective, 4.0, 2.0)
    even = break_even_mu(cost, 2.0, 0.1, FLAT)
    assert even == pytest.approx(0.7 / 0.15)
    for mu in (even - 0.01, even + 0.01):
        assert (relative_cost(cost, mu, 0.1, FLAT) < 1) == (mu > even)
    assert break_even_mu(partial(objective, 1.0, 2.0), 2.0, 0.1, FLAT) == math.inf
    assert break_even_mu(partial(objective, 100.0, 2.0), 2.0, 0.0, PowerGrowth(0.0)) > 0
    always = partial(fresh_anchored_objective, 1.0, 100.0)
    assert break_even_mu(always, 2.0, 0.0, FLAT) == pytest.approx(0.0, abs=0.05)
