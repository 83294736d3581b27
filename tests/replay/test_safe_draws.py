"""Soft age, a bound on uses, and a pause after a use."""

from itertools import pairwise

import numpy as np
import pytest
from buffer_makers import ids, make_group, make_rollout, replay_settings
from small_runs.trained import interrupted, same_files, same_weights, train_small_run

from grpo_replay.errors import RecipeError
from grpo_replay.lab.inspection.rebuild import what_if
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import load_recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.priorities import draw_law

SAFE = {"age_decay_steps": 2.0, "max_uses": 2, "cooldown_steps": 1}


def aged(settings, count=3):
    """A rollout a step, of |advantage| 1: id = birth step."""
    buffer = ReplayBuffer(settings, 1)
    for step in range(count):
        buffer.insert([make_rollout(step, birth_step=step, advantage=1.0)], step)
    return buffer


def test_the_law_with_decay_by_hand():
    """p^0.5 = 1 and 2, exp(-age / 2) = 1 and 1/e."""
    law = draw_law(np.array([1.0, 4.0]), 0.5, -np.array([0.0, 2.0]) / 2)
    e = np.e
    np.testing.assert_allclose(law.probability_N, [e / (e + 2), 2 / (e + 2)])
    assert law.effective_sample_size == pytest.approx((e + 2) ** 2 / (e**2 + 4))
    assert law.log_weight_N.max() == 0
    uniform = draw_law(np.array([1.0, 4.0]), 0.0, -np.array([0.0, 2.0]) / 2)
    np.testing.assert_allclose(uniform.probability_N, [e / (e + 1), 1 / (e + 1)])


@pytest.mark.parametrize("decay", [0.01, 1e6])
def test_extreme_decays_neither_overflow_nor_lose_the_youngest(decay):
    law = draw_law(np.ones(3), 1.0, -np.array([1000.0, 2000.0, 3000.0]) / decay)
    assert np.isfinite(law.probability_N).all() and law.probability_N[0] >= 1 / 3


def test_ages_are_those_of_the_draw_not_of_the_insertion():
    """All draws of 4,000 follow exp(-age/2) at each of two steps, within five sigmas."""
    buffer = aged(replay_settings(age_decay_steps=2.0, with_replacement=True, priority="uniform"))
    rng = np.random.default_rng(0)
    for step in (3, 9):
        weight = np.exp(-(step - np.arange(3)) / 2)
        expected = weight / weight.sum()
        draw = buffer.draw(4000, step, rng)
        found = np.bincount(ids(draw.rollouts), minlength=3) / 4000
        assert np.abs(found - expected).max() < 5 * np.sqrt(0.25 / 4000)
        np.testing.assert_allclose(draw.probabilities[:9], expected[ids(draw.rollouts[:9])])


def test_a_query_decays_as_a_whole():
    settings = replay_settings(unit="query", priority="uniform", age_decay_steps=1.0)
    buffer = ReplayBuffer(settings, 2)
    for step in range(2):
        buffer.insert(make_group(2 * step, step, step, [1.0, -1.0]), step)
    draw = buffer.draw(1, 2, np.random.default_rng(0))
    old, young = np.exp(-2.0), np.exp(-1.0)
    expected = (young if draw.rollouts[0].birth_step else old) / (old + young)
    np.testing.assert_allclose(draw.probabilities, [expected] * 2)


def test_a_rollout_is_drawn_at_most_so_often():
    buffer = aged(replay_settings(max_uses=2))
    rng = np.random.default_rng(0)
    sizes = [len(buffer.draw(3, step, rng).rollouts) for step in range(3, 6)]
    assert sizes == [3, 3, 0]
    buffer.insert([make_rollout(9, birth_step=6, advantage=1.0)], 6)
    assert ids(buffer.draw(3, 7, rng).rollouts) == [9]


@pytest.mark.parametrize(("steps", "expected"), [(1, [1, 0, 0, 1, 0]), (2, [1, 0, 0, 0, 1])])
def test_a_rollout_rests_for_so_many_steps_after_a_use(steps, expected):
    """Drawn in step 3, and again in step 5 after one step of rest, in step 6 after two."""
    buffer = aged(replay_settings(cooldown_steps=steps), count=1)
    rng = np.random.default_rng(0)
    assert [len(buffer.draw(1, step, rng).rollouts) for step in (3, 3, 4, 5, 6)] == expected


def test_rollouts_of_priority_0_alone_are_no_reason_to_stop():
    """While one with a priority rests; where all have none, no law can draw."""
    signed = f"{__file__}:only_positive"
    buffer = ReplayBuffer(
        replay_settings(priority=signed, priority_exponent=1, cooldown_steps=2), 1
    )
    rows = [make_rollout(i, birth_step=0, advantage=a) for i, a in enumerate((1.0, -1.0))]
    buffer.insert(rows[1:], 0)
    with pytest.raises(RecipeError, match="all 1 priorities are 0"):
        buffer.draw(1, 1, np.random.default_rng(0))
    buffer.insert(rows[:1], 1)
    drawn = [len(buffer.draw(1, step, np.random.default_rng(0)).rollouts) for step in (2, 3, 5)]
    assert drawn == [1, 0, 1]


def test_priorities_of_0_are_drawn_where_no_priority_weighs():
    signed = f"{__file__}:only_positive"
    buffer = ReplayBuffer(
        replay_settings(priority=signed, priority_exponent=0, cooldown_steps=1), 1
    )
    rows = [make_rollout(i, birth_step=0, advantage=a) for i, a in enumerate((1.0, -1.0))]
    buffer.insert(rows, 0)
    assert sorted(ids(buffer.draw(2, 1, np.random.default_rng(0)).rollouts)) == [0, 1]


def only_positive(columns):
    return np.maximum(columns["advantage"], 0.0)


only_positive.columns, only_positive.epsilon = ("advantage",), False


def test_neutral_values_draw_the_same_bits():
    plain = aged(replay_settings(), count=50)
    neutral = aged(replay_settings(max_uses=10**6, age_decay_steps=1e300), count=50)
    for step in range(50, 60):
        one, other = (
            buffer.draw(9, step, np.random.default_rng(step)) for buffer in (plain, neutral)
        )
        assert ids(one.rollouts) == ids(other.rollouts)
        assert one.probabilities.tolist() == other.probabilities.tolist()


def test_a_bound_on_uses_needs_draws_without_replacement():
    with pytest.raises(RecipeError, match="max_uses 2 with"):
        load_recipe("fifo-tiny", ["replay.max_uses=2"])


@pytest.fixture(scope="module")
def run(tmp_path_factory, processes):
    return train_small_run(tmp_path_factory.mktemp("safe") / "run", replay=SAFE, run={"steps": 6})


def test_a_run_keeps_the_bounds_and_passes_the_verification(run):
    steps_of: dict[int, list[int]] = {}
    for draw in run.all_draws:
        steps_of.setdefault(draw["rollout_id"], []).append(draw["step"])
    assert max(map(len, steps_of.values())) == 2
    gaps = [b - a for steps in steps_of.values() for a, b in pairwise(steps)]
    assert gaps and min(gaps) > 1
    report = verify_run(run.path)
    assert report.passed, [check for check in report.checks if not check.passed]


def test_a_verification_under_other_rules_names_the_draws(run, tmp_path):
    """The run's draws do not follow the law of its recipe without decay."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy, symlinks=True)
    recipe = copy / "recipe.yaml"
    for old, name in (("age_decay_steps: 2.0", "probabilities"), ("max_uses: 2", "drawn units")):
        text = recipe.read_text()
        assert old in text
        new = old.replace("2.0", "null").replace(": 2", ": 1")
        recipe.write_text(text.replace(old, new))
        failed = [check.name for check in verify_run(copy).checks if not check.passed]
        recipe.write_text(text)
        assert name in failed


@pytest.mark.slow
def test_a_resumed_run_is_the_same_bit_for_bit(run, tmp_path):
    interrupted(tmp_path / "run", 4, replay=SAFE, run={"steps": 6})
    again = train_small_run(tmp_path / "run", resume=True, replay=SAFE, run={"steps": 6})
    assert same_files(run.path, again.path, "draws") > 0
    assert same_weights(run.weights(), again.weights())


def test_what_if_simulates_them(run):
    once = what_if(open_source(run.path), ["max_uses=1"])
    assert once.changed["never_drawn_share"] < once.same["never_drawn_share"]
    young = what_if(open_source(run.path), ["age_decay_steps=0.2"])
    assert young.changed["age_mean"] < young.same["age_mean"]
