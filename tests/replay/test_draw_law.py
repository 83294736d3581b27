"""The law of a draw against hand-worked numbers and brute-force enumeration."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from buffer_makers import ids, make_rollout, replay_settings
from scipy.stats import chisquare

from grpo_replay.errors import RecipeError
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.insertion import entries_of
from grpo_replay.replay.priorities import (
    COLUMNS,
    EPSILON,
    draw_law,
    draw_with_replacement,
    draw_without_replacement,
    entry_priorities,
)

# A right law fails a chi-square test at this level once in ten thousand seeds; the seeds are fixed.
FALSE_ALARM = 1e-4


def successive_draw_law(probability_N, count):
    """P of every ordered sequence of `count` distinct draws, by definition."""
    law = {}
    for sequence in itertools.permutations(range(len(probability_N)), count):
        left, chance = 1.0, 1.0
        for i in sequence:
            chance *= probability_N[i] / left
            left -= probability_N[i]
        if chance > 0:
            law[sequence] = chance
    return law


def assert_follows(outcomes, law):
    counts = Counter(outcomes)
    assert set(counts) <= set(law)
    observed = [counts[outcome] for outcome in law]
    expected = np.array(list(law.values()))
    assert expected.sum() == pytest.approx(1.0)
    assert chisquare(observed, expected * len(outcomes)).pvalue > FALSE_ALARM


def priorities_of(name, rollouts):
    return entry_priorities(name, entries_of(rollouts))


def test_priorities_by_hand():
    rollouts = [
        make_rollout(1, advantage=-2.0, group_reward_std=0.75, tokens=3),
        make_rollout(2, advantage=0.5, group_reward_std=1.0, tokens=8),
    ]
    assert priorities_of("abs_advantage", rollouts).tolist() == [2 + EPSILON, 0.5 + EPSILON]
    assert priorities_of("group_std", rollouts).tolist() == [0.75 + EPSILON, 1 + EPSILON]
    assert priorities_of("uniform", rollouts).tolist() == [1.0, 1.0]
    assert priorities_of("own_functions:short", rollouts).tolist() == [
        1 / 3 + EPSILON,
        1 / 8 + EPSILON,
    ]


def every_column(columns):
    return np.stack([np.asarray(values, float) for values in columns.values()]).sum(axis=0)


every_column.columns = tuple(COLUMNS)


def test_a_priority_may_use_every_column_that_is_logged():
    rollout = make_rollout(
        7, group_id=50, birth_step=900, reward=0.25, advantage=-0.5, group_reward_std=0.125,
        group_correct=3000, tokens=20_000,
    )  # fmt: skip
    rollout = replace(rollout, behavior_logprobs=np.full(20_000, -0.375, np.float32))
    cut = replace(rollout, finish_reason="length")
    found = priorities_of(f"{__name__}:every_column", [rollout, cut])
    assert found.tolist() == [23_956.5 + EPSILON, 23_957.5 + EPSILON]


def nearly_relative(columns):
    return columns["reward"] / columns["reward"].mean()


def last_is_nan(columns):
    return np.where(columns["rollout_id"] == 9, np.nan, columns["reward"])


def rewards_as_they_are(columns):
    return columns["reward"]


for function in (nearly_relative, last_is_nan, rewards_as_they_are):
    function.columns = ("reward", "rollout_id")


def test_a_priority_of_zero_is_one_and_what_is_none_is_named():
    rollouts = [make_rollout(7, reward=0.0), make_rollout(8, reward=0.5), make_rollout(9)]
    found = priorities_of(f"{__name__}:rewards_as_they_are", rollouts)
    assert found.tolist() == [EPSILON, 0.5 + EPSILON, 1.0 + EPSILON]
    with pytest.raises(RecipeError, match=r"last_is_nan.*nan for rollout 9"):
        priorities_of(f"{__name__}:last_is_nan", rollouts)
    with pytest.raises(RecipeError, match="nearly_relative"):
        priorities_of(f"{__name__}:nearly_relative", rollouts[1:])


@pytest.mark.parametrize(
    "name, found",
    [
        ("own_functions:unnamed", "unnamed.columns"),
        ("own_functions:misnamed", r"\('length',\)"),
        ("own_functions:negative", "-3.0 for rollout 1"),
        ("own_functions:nothing", r"NoneType .*\[2\]"),
        ("own_functions:NUMBER", "NUMBER"),
        ("own_functions:missing", "'missing'"),
        ("nowhere.py:f", "nowhere.py"),
    ],
)
def test_what_is_no_priority_is_refused(name, found):
    with pytest.raises(RecipeError, match=found):
        priorities_of(name, [make_rollout(1), make_rollout(2, tokens=9)])


def test_probabilities_ess_and_entropy_by_hand():
    # √1 : √4 : √9 = 1 : 2 : 3.
    law = draw_law(np.array([1.0, 4.0, 9.0]), 0.5)
    np.testing.assert_allclose(law.probability_N, [1 / 6, 2 / 6, 3 / 6], rtol=1e-15)
    assert law.effective_sample_size == pytest.approx(36 / 14, rel=1e-14)
    expected = math.log(6) / 6 + math.log(3) / 3 + math.log(2) / 2
    assert law.entropy == pytest.approx(expected, rel=1e-14)


def test_exponent_zero_is_exactly_uniform_whatever_the_priorities():
    for size in (1, 2, 3, 7, 1000):
        priorities = np.random.default_rng(size).random(size)
        priorities[0] = 0.0
        law = draw_law(priorities, 0.0)
        assert (law.probability_N == 1 / size).all()
        assert law.effective_sample_size == size
        assert law.entropy == math.log(size)


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 1e300])
def test_the_scale_of_priorities_does_not_matter(scale):
    law = draw_law(np.array([1.0, 2.0, 5.0]) * scale, 1.0)
    np.testing.assert_allclose(law.probability_N, [1 / 8, 2 / 8, 5 / 8], rtol=1e-12)


def test_a_huge_exponent_neither_overflows_nor_loses_the_order():
    law = draw_law(np.array([1e-6, 3.0, 2.0, 1e-7]), 1e4)
    assert law.probability_N.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert law.effective_sample_size == 1.0
    assert law.entropy == 0.0
    # Probabilities that underflow are still the right ones to draw last, in order.
    drawn = draw_without_replacement(law, 4, np.random.default_rng(0))
    assert drawn.tolist() == [1, 2, 0, 3]


def test_a_zero_priority_is_never_drawn():
    law = draw_law(np.array([0.0, 1.0, 0.0, 3.0]), 0.5)
    rng = np.random.default_rng(1)
    assert law.probability_N[[0, 2]].tolist() == [0.0, 0.0]
    for _ in range(200):
        assert sorted(draw_without_replacement(law, 4, rng).tolist()) == [1, 3]
    assert set(draw_with_replacement(law, 2000, rng).tolist()) == {1, 3}
    assert draw_law(np.array([0.0, 1.0, 0.0, 1.0]), 0.5).entropy == pytest.approx(math.log(2))


def test_priorities_without_a_law_are_refused():
    with pytest.raises(RecipeError, match=r"replay\.priority"):
        draw_law(np.zeros(3), 0.5)
    for bad in (-1e-9, math.nan, math.inf):
        with pytest.raises(ValueError, match="priority 2 is"):
            draw_law(np.array([0.0, 0.5, bad, 2.0]), 0.5)


def test_a_draw_without_candidates_is_empty():
    law = draw_law(np.zeros(0), 0.5)
    rng = np.random.default_rng(0)
    assert law.effective_sample_size == 0.0
    assert law.entropy == 0.0
    assert draw_without_replacement(law, 3, rng).size == 0
    assert draw_with_replacement(law, 3, rng).size == 0


@pytest.mark.parametrize("draw", [draw_without_replacement, draw_with_replacement])
def test_a_draw_of_nothing_is_empty_and_one_of_one_takes_one(draw):
    priorities = np.full(100, 1e-9)
    priorities[57] = 1.0
    law, rng = draw_law(priorities, 20.0), np.random.default_rng(0)
    state = rng.bit_generator.state
    for count in (0, -1):
        assert (draw(law, count, rng).tolist(), rng.bit_generator.state) == ([], state)
    assert [draw(law, 1, rng).tolist() for _ in range(20)] == [[57]] * 20


def test_with_replacement_frequencies_match_the_probabilities():
    law = draw_law(np.array([0.2, 1.0, 1.0, 0.05, 3.0, 0.7]), 0.5)
    drawn = draw_with_replacement(law, 50_000, np.random.default_rng(11))
    assert_follows(drawn.tolist(), dict(enumerate(law.probability_N)))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
def test_without_replacement_sequences_match_successive_draws(exponent):
    priorities = np.array([0.2, 1.0, 1.0, 0.5, 3.0])
    law = draw_law(priorities, exponent)
    rng = np.random.default_rng(12)
    drawn = [tuple(draw_without_replacement(law, 3, rng).tolist()) for _ in range(20_000)]
    exact = successive_draw_law(priorities**exponent / (priorities**exponent).sum(), 3)
    assert len(exact) == 60
    assert_follows(drawn, exact)


def stored(settings, advantages, groups=None):
    buffer = ReplayBuffer(settings, group_size=2)
    buffer.insert(
        [
            make_rollout(
                i,
                advantage=float(np.float32(a)),
                group_reward_std=float(np.float32(abs(a))),
                group_id=None if groups is None else groups[i],
            )
            for i, a in enumerate(advantages)
        ],
        step=1,
    )
    return buffer


def test_the_buffers_rollout_draws_follow_the_law_of_absolute_advantages():
    # |A| + ε = 1, 4, 9, 1 → with α = 0.5 weights 1 : 2 : 3 : 1.
    settings = replay_settings(priority_exponent=0.5)
    buffer = stored(settings, [1 - EPSILON, EPSILON - 4, 9 - EPSILON, EPSILON - 1])
    rng = np.random.default_rng(14)
    draws = [buffer.draw(2, 2, rng) for _ in range(6000)]
    exact = successive_draw_law(np.array([1, 2, 3, 1]) / 7, 2)
    assert_follows([tuple(ids(draw.rollouts)) for draw in draws], exact)
    for draw in draws[:100]:
        weights = {0: 1, 1: 2, 2: 3, 3: 1}
        expected = [weights[i] / 7 for i in ids(draw.rollouts)]
        np.testing.assert_allclose(draw.probabilities, expected, rtol=1e-7)
    assert draws[0].effective_sample_size == pytest.approx(49 / 15)


def test_the_buffers_query_draws_follow_the_mean_priority_of_members():
    # Queries of sizes 3, 1, 2 with σ_g = 2, 3, 4 and α = 1: P = 2/9, 3/9, 4/9 whatever the size.
    settings = replay_settings(unit="query", priority="group_std", priority_exponent=1.0)
    buffer = stored(settings, [2.0, 2.0, 2.0, 3.0, 4.0, 4.0], groups=[7, 7, 7, 3, 9, 9])
    rng = np.random.default_rng(15)
    members = {7: [0, 1, 2], 3: [3], 9: [4, 5]}
    outcomes = []
    for _ in range(6000):
        drawn = ids(buffer.draw(2, 2, rng).rollouts)
        first = {0: 7, 3: 3, 4: 9}[drawn[0]]
        second = {0: 7, 3: 3, 4: 9}[drawn[len(members[first])]]
        assert drawn == members[first] + members[second]
        outcomes.append((first, second))
    exact = successive_draw_law(np.array([2, 3, 4]) / 9, 2)
    by_group = {tuple([7, 3, 9][i] for i in sequence): p for sequence, p in exact.items()}
    assert_follows(outcomes, by_group)


def test_with_replacement_through_the_buffer():
    settings = replay_settings(with_replacement=True, priority_exponent=1.0)
    buffer = stored(settings, [1.0, 2.0, 3.0, 4.0])
    rng = np.random.default_rng(16)
    drawn = [i for _ in range(3000) for i in ids(buffer.draw(4, 2, rng).rollouts)]
    assert_follows(drawn, {i: (i + 1) / 10 for i in range(4)})
    assert buffer.column("times_used").sum() == 12_000
