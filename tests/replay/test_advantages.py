import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_replay.errors import NonFiniteError, RecipeError
from grpo_replay.recipe import AdvantageSection
from grpo_replay.replay.advantages import estimate_advantages, group_advantages

GROUP_SIZES = (2, 3, 4, 5, 8, 16)
CASES = [(G, k) for G in GROUP_SIZES for k in range(1, G)]


@pytest.mark.parametrize(("G", "k"), CASES)
def test_closed_forms_hold_up_to_epsilon(G, k):
    group = group_advantages([1.0] * k + [-1.0] * (G - k))  # ε_σ is 1e-6
    sigma = 2 * math.sqrt(k * (G - k)) / G
    shrink = sigma / (sigma + 1e-6)  # what ε_σ costs
    expected = [math.sqrt((G - k) / k) * shrink] * k + [-math.sqrt(k / (G - k)) * shrink] * (G - k)
    np.testing.assert_array_equal(group.advantages_G, np.array(expected, dtype=np.float32))
    assert group.std == pytest.approx(sigma, rel=1e-7)
    assert group.mean == pytest.approx((2 * k - G) / G, abs=1e-7)


def test_sample_std_shrinks_by_the_known_factor():
    # The issue of ddof: ×√((G-1)/G) = 0.9354 at G = 8.
    rewards = [1, -1, -1, -1, -1, -1, -1, -1]
    population = group_advantages(rewards, "population", 0.0).advantages_G
    sample = group_advantages(rewards, "sample", 0.0).advantages_G
    np.testing.assert_allclose(sample / population, math.sqrt(7 / 8), rtol=1e-6)
    assert population[0] == pytest.approx(math.sqrt(7))
    assert population[1] == pytest.approx(-math.sqrt(1 / 7))


def test_worked_by_hand_with_partial_rewards():
    # Mean 2, deviations -2 -1 0 3, variance (4 + 1 + 0 + 9) / 4 = 3.5.
    group = group_advantages([0.0, 1.0, 2.0, 5.0], epsilon=0.0)
    assert group.mean == 2.0
    assert group.std == pytest.approx(math.sqrt(3.5), rel=1e-7)
    np.testing.assert_allclose(
        group.advantages_G, np.array([-2, -1, 0, 3]) / math.sqrt(3.5), rtol=1e-6
    )


@pytest.mark.parametrize("reward", [1.0, 0.1, 1e-30, 3e38])
def test_equal_rewards_carry_no_signal(reward):
    group = group_advantages([reward] * 8)
    assert group.advantages_G is None
    assert group.std == 0.0
    assert group.mean == float(np.float32(reward))


def test_signal_is_decided_by_equality_and_not_by_the_size_of_the_difference():
    barely = float(np.nextafter(np.float32(0.5), np.float32(1)))
    group = group_advantages([0.5, 0.5, 0.5, barely], epsilon=0.0)
    assert group.advantages_G is not None
    assert group.advantages_G[3] == pytest.approx(math.sqrt(3), rel=1e-6)


def test_every_number_is_exact_in_float32():
    group = group_advantages([0.1, 0.7, 0.3, 0.2, 0.9])
    assert group.advantages_G.dtype == np.float32
    assert group.mean == float(np.float32(group.mean))
    assert group.std == float(np.float32(group.std))


def test_permuting_a_group_permutes_its_advantages_to_the_bit():
    rng = np.random.default_rng(3)
    for _ in range(50):
        rewards = rng.normal(size=7)
        order = rng.permutation(7)
        direct = group_advantages(rewards).advantages_G
        permuted = group_advantages(rewards[order]).advantages_G
        np.testing.assert_array_equal(direct[order], permuted)


def test_rewards_that_are_not_finite_or_no_group_are_refused():
    for bad in (math.nan, -math.inf):
        with pytest.raises(NonFiniteError):
            group_advantages([1.0, bad, -1.0])
    for shape in ((), (0,), (2, 4)):
        with pytest.raises(ValueError, match="shape"):
            group_advantages(np.ones(shape))
    with pytest.raises(ValueError, match="population"):
        group_advantages([1, -1], std="biased")


def one_short(rewards_G, settings):
    return rewards_G[1:]


def divided_by_zero(rewards_G, settings):
    return [math.inf, *rewards_G[1:]]


def nothing(rewards_G, settings):
    return None


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (one_short, r"\[2\] for 3 rows"),
        (divided_by_zero, "divided_by_zero"),
        (nothing, "NoneType for 3 rows"),
    ],
)
def test_an_estimator_that_returns_no_finite_number_for_each_is_refused(estimator, message):
    settings = AdvantageSection(estimator=f"{__name__}:{estimator.__name__}")
    with pytest.raises(RecipeError, match=rf"estimator .*{message}"):
        estimate_advantages([1.0, -1.0, 0.0], settings)


def test_without_division_the_advantage_is_the_reward_minus_the_mean():
    """Dr. GRPO by hand: rewards 1 1 1 -1 have mean 0.5; σ_g is still reported, for priorities."""
    group = group_advantages([1.0, 1.0, 1.0, -1.0], divide_by_std=False)
    assert group.advantages_G.tolist() == [0.5, 0.5, 0.5, -1.5]
    assert group.std == pytest.approx(math.sqrt(0.75), rel=1e-7)
    assert group_advantages([1.0, 1.0], divide_by_std=False).advantages_G is None


def test_the_sample_deviation_divides_by_the_rewards_that_came_less_one():
    """By hand: of 1, none, 1 and -1 the mean is 1/3 and the sum of squares 8/3, over 3 - 1."""
    group = group_advantages([1.0, None, 1.0, -1.0], "sample", 0.0)
    assert group.std == pytest.approx(math.sqrt(4 / 3), rel=1e-7)
    assert group.advantages_G[0] == pytest.approx(2 / 3 / math.sqrt(4 / 3), rel=1e-6)


@given(st.lists(st.sampled_from([None, 1.0, -1.0]), min_size=2, max_size=16))
def test_a_reward_that_did_not_come_leaves_the_statistics_to_the_other_members(rewards):
    came = [reward for reward in rewards if reward is not None]
    found = group_advantages(rewards)
    if len(came) < 2:
        assert (found.mean, found.std, found.advantages_G) == (None, None, None)
        return
    alone = group_advantages(came)
    assert (found.mean, found.std) == (alone.mean, alone.std)
    if alone.advantages_G is None:
        assert found.advantages_G is None
        return
    missing = np.array([reward is None for reward in rewards])
    np.testing.assert_array_equal(found.advantages_G[~missing], alone.advantages_G)
    assert np.isnan(found.advantages_G[missing]).all()
