"""Draws of the buffer over many steps, with its evictions: they follow the law of its settings."""

import numpy as np
import pytest
from buffer_makers import ids, make_group, replay_settings
from draw_uniforms import rosenblatt
from scipy.stats import kstest

from grpo_replay.replay import ReplayBuffer, priorities
from grpo_replay.replay.priorities import EPSILON

# A right law fails once in ten thousand seeds; the seeds are fixed.
FALSE_ALARM = 1e-4


def units_of(buffer, settings):
    """The weights of what may be drawn, oldest first, and the unit of each rollout."""
    groups: dict[int, list] = {}
    for rollout in buffer.rollouts():
        key = rollout.group_id if settings.unit == "query" else rollout.rollout_id
        groups.setdefault(key, []).append(rollout)
    of = {
        "abs_advantage": lambda rollout: abs(rollout.advantage) + EPSILON,
        "group_std": lambda rollout: rollout.group_reward_std + EPSILON,
        "uniform": lambda rollout: 1.0,
    }[settings.priority]
    priority_U = np.array([np.mean([of(each) for each in unit]) for unit in groups.values()])
    unit_of = {i: place for place, unit in enumerate(groups.values()) for i in ids(unit)}
    return priority_U**settings.priority_exponent, unit_of


def p_values(settings, steps=100):
    """Kolmogorov-Smirnov p-values of the draws of a run, the candidates ordered by weight, which
    finds a wrong exponent or priority, and by age, which finds a preference for old or new."""
    buffer, rng = ReplayBuffer(settings, group_size=4), np.random.default_rng(3)
    found = {"weight": [], "age": []}
    for step in range(1, steps + 1):
        buffer.evict(step)
        if len(buffer):
            weight_U, unit_of = units_of(buffer, settings)
            drawn = list(dict.fromkeys(unit_of[i] for i in ids(buffer.draw(8, step, rng).rollouts)))
            by_weight = np.argsort(weight_U, kind="stable")
            rank_U = np.argsort(by_weight)
            for name, order, places in (
                ("weight", by_weight, rank_U[drawn]), ("age", slice(None), drawn),
            ):  # fmt: skip
                found[name].append(rosenblatt(weight_U[order], places, False, rng))
        for group in range(4):
            rewards = rng.choice([-1.0, 0.0, 0.5, 1.0], 4)
            rewards[:2] = -1.0, 1.0
            buffer.insert(make_group(16 * step + 4 * group, 4 * step + group, step, rewards), step)
    return {name: kstest(np.concatenate(u), "uniform").pvalue for name, u in found.items()}


RUNS = {
    "a sharp exponent": {"priority_exponent": 2.0},
    "uniform": {"priority": "uniform"},
    "queries": {"unit": "query", "priority": "group_std", "priority_exponent": 1.0},
    "a full buffer": {"capacity_rollouts": 40},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_draws_of_a_run_follow_the_law(name):
    found = p_values(replay_settings(max_age_steps=5, **RUNS[name]))
    assert min(found.values()) > FALSE_ALARM, found


def uniform_draw(law, count, rng):
    return rng.permutation(law.weight_N.size)[:count]


def recent_draw(law, count, rng):
    size = law.weight_N.size
    return size - 1 - rng.permutation(size - size // 3)[:count]


@pytest.mark.parametrize(
    "wrong, name, order",
    [(uniform_draw, "a sharp exponent", "weight"), (recent_draw, "uniform", "age")],
)
def test_draws_that_ignore_the_law_are_found(monkeypatch, wrong, name, order):
    monkeypatch.setattr(priorities, "draw_without_replacement", wrong)
    found = p_values(replay_settings(max_age_steps=5, **RUNS[name]))
    assert found[order] < 1e-9


def test_the_transform_tells_draws_with_and_without_replacement_apart():
    weights = np.array([0.1, 1.0, 0.5, 2.0, 0.3, 0.7])
    rng = np.random.default_rng(4)
    right, wrong = [], []
    for _ in range(1000):
        drawn = rng.choice(6, 4, replace=False, p=weights / weights.sum())
        right.append(rosenblatt(weights, drawn, False, rng))
        wrong.append(rosenblatt(weights, drawn, True, rng))
    assert kstest(np.concatenate(right), "uniform").pvalue > FALSE_ALARM
    assert kstest(np.concatenate(wrong), "uniform").pvalue < 1e-12
