import dataclasses
import weakref

import numpy as np
import pytest
from buffer_makers import check_valid, ids, make_group, make_rollout, replay_settings

from grpo_replay.errors import RecipeError
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.entry_store import NEVER_USED
from grpo_replay.replay.insertion import RolloutColumns, is_correct, number_problem
from grpo_replay.replay.priorities import EPSILON, Candidates, pick, query_spans


def stored_ids(buffer):
    assert check_valid(buffer) == (True, "")
    assert ids(buffer.rollouts()) == buffer.column("rollout_id").tolist()
    return buffer.column("rollout_id").tolist()


def filled(settings, births, group_size=2):
    """One rollout a step: id = birth step."""
    buffer = ReplayBuffer(settings, group_size)
    for step in births:
        buffer.insert([make_rollout(step, birth_step=step)], step)
    return buffer


def test_age_is_bounded_by_step_minus_birth_whether_or_not_the_buffer_is_full():
    buffer = filled(replay_settings(max_age_steps=3), births=range(1, 7))
    assert buffer.evict(step=7) == 3  # ages 6 5 4 are too old; 3 2 1 stay
    assert stored_ids(buffer) == [4, 5, 6]
    assert buffer.evict(step=7) == 0
    assert buffer.evict(step=8) == 1


def test_evict_ahead_removes_rollouts_too_old_for_the_next_step():
    buffer = filled(replay_settings(max_age_steps=3), births=range(1, 7))
    assert ReplayBuffer(buffer.settings, 2).stats(0).evicted == 0
    assert buffer.evict_ahead(step=6) == 3
    assert stored_ids(buffer) == [4, 5, 6]  # at rest: max_age_steps births
    assert buffer.evict(step=7) == 0  # so the guard has nothing to do
    assert buffer.stats(6).evicted == 0  # step 7 has been counted since
    assert buffer.stats(7).evicted == 0


def test_births_out_of_order_are_evicted_by_their_own_age():
    buffer = ReplayBuffer(replay_settings(max_age_steps=3), 2)
    for i, birth in enumerate([4, 2, 5, 1, 3]):
        buffer.insert([make_rollout(i, birth_step=birth)], step=5)
    assert buffer.evict(step=6) == 2  # births 2 and 1
    assert stored_ids(buffer) == [0, 2, 4]


def test_capacity_is_first_in_first_out_and_counted():
    buffer = ReplayBuffer(replay_settings(capacity_rollouts=5), 2)
    assert buffer.insert([make_rollout(i) for i in range(4)], step=1) == 0
    assert buffer.insert([make_rollout(i, birth_step=2) for i in range(4, 8)], step=2) == 3
    assert stored_ids(buffer) == [3, 4, 5, 6, 7]
    assert buffer.stats(2).evicted == 3
    assert buffer.stats(2).evicted_by_capacity == 3
    assert buffer.insert([make_rollout(8, birth_step=3)], step=3) == 1
    assert buffer.stats(3).evicted == 1
    assert buffer.stats(3).evicted_by_capacity == 4


def test_with_queries_as_units_capacity_evicts_whole_oldest_groups():
    settings = replay_settings(unit="query", priority="uniform", capacity_rollouts=5)
    buffer = ReplayBuffer(settings, 2)
    groups = [0, 0, 1, 1, 1, 2, 2]
    buffer.insert([make_rollout(i, group_id=g) for i, g in enumerate(groups)], step=1)
    assert stored_ids(buffer) == [2, 3, 4, 5, 6]  # exactly full: 2 removed
    buffer.insert([make_rollout(7, group_id=3, birth_step=2)], step=2)
    assert stored_ids(buffer) == [5, 6, 7]  # one too many removes three
    assert buffer.stats(2).evicted_by_capacity == 5


def test_a_query_larger_than_the_capacity_does_not_fit():
    settings = replay_settings(unit="query", priority="uniform", capacity_rollouts=3)
    buffer = ReplayBuffer(settings, 2)
    assert buffer.insert([make_rollout(i, group_id=0) for i in range(4)], step=1) == 4
    assert len(buffer) == 0


def test_positive_bias_buffer_worked_by_hand():
    # N = 5, δ = 0.4: the freshest 3, and the freshest 2 correct ones outside them.
    settings = replay_settings(
        capacity_rollouts=5, positive_fraction=0.4, max_age_steps=None, priority="uniform"
    )
    buffer = ReplayBuffer(settings, 2)
    history = []
    expected = [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],  # 0 is correct and leaves the window of the freshest 3
        [0, 2, 3, 4],  # 1 is wrong
        [0, 2, 3, 4, 5],
        [2, 3, 4, 5, 6],  # 0, 2 and 3 are correct and outside: the freshest two stay
        [2, 3, 5, 6, 7],  # 4 is wrong
    ]
    for i, correct in enumerate([True, False, True, True, False, True, False, True]):
        buffer.insert(
            [make_rollout(i, birth_step=i + 1, advantage=1.0 if correct else -1.0)], step=i + 1
        )
        history.append(stored_ids(buffer))
    assert history == expected


def test_statistics_by_hand():
    buffer = ReplayBuffer(replay_settings(), 2)
    buffer.insert([make_rollout(0, birth_step=1, advantage=-2.0)], step=1)
    buffer.insert([make_rollout(1, birth_step=4, advantage=1.0)], step=4)
    buffer.draw(2, 5, np.random.default_rng(0))
    buffer.draw(2, 6, np.random.default_rng(0))
    stats = buffer.stats(6)
    assert (stats.rollouts, stats.age_mean, stats.age_max) == (2, 3.5, 5)
    assert stats.priority_mean == pytest.approx(1.5 + EPSILON, rel=1e-12)
    assert stats.times_used_mean == 2.0
    assert buffer.column("last_used_step").tolist() == [6, 6]


def test_statistics_of_an_empty_buffer_are_undefined():
    stats = ReplayBuffer(replay_settings(), 2).stats(3)
    assert dataclasses.astuple(stats) == (0, None, None, None, None, 0, 0, 0)


def test_a_draw_removes_nothing_and_records_each_use():
    buffer = filled(replay_settings(with_replacement=True), births=[1, 2, 3])
    assert buffer.column("last_used_step").tolist() == [NEVER_USED] * 3
    draw = buffer.draw(3, 4, np.random.default_rng(3))
    assert len(buffer) == 3
    counts = [ids(draw.rollouts).count(i) for i in (1, 2, 3)]
    assert sum(counts) == 3
    assert buffer.column("times_used").tolist() == counts
    assert draw.ages.tolist() == [4 - i for i in ids(draw.rollouts)]


@pytest.mark.parametrize("with_replacement, drawn", [(False, 3), (True, 10)])
def test_a_draw_of_more_than_the_buffer_holds_returns_everything_or_repeats(
    with_replacement, drawn
):
    buffer = filled(replay_settings(with_replacement=with_replacement), births=[1, 2, 3])
    draw = buffer.draw(10, 4, np.random.default_rng(0))
    assert len(draw.rollouts) == drawn and set(ids(draw.rollouts)) == {1, 2, 3}
    assert buffer.column("times_used").sum() == drawn


def test_an_empty_buffer_draws_nothing_and_uses_no_randomness():
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    draw = ReplayBuffer(replay_settings(), 2).draw(10, 4, rng)
    assert draw.entries == ()
    assert draw.probabilities.shape == draw.ages.shape == (0,)
    assert rng.bit_generator.state == before


def test_stored_arrays_are_read_only():
    rollout = make_rollout(0)
    buffer = ReplayBuffer(replay_settings(), 2)
    buffer.insert([rollout], 1)
    with pytest.raises(ValueError, match="read-only"):
        buffer.rollouts()[0].behavior_logprobs[0] = 0.0
    with pytest.raises(ValueError, match="read-only"):
        rollout.behavior_logprobs[:] = 0.0
    with pytest.raises(ValueError, match="read-only"):
        buffer.column("priority")[0] = 5.0


def test_texts_are_not_stored():
    buffer = ReplayBuffer(replay_settings(), 2)
    buffer.insert([make_rollout(0)], 1)
    assert buffer.rollouts()[0].completion_text == ""


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        ([make_rollout(1, kept=False)], "rollout 1"),
        ([dataclasses.replace(make_rollout(1), behavior_logprobs=None)], "rollout 1"),
        ([dataclasses.replace(make_rollout(1), behavior_logprobs=np.zeros(2))], "behaviour"),
        ([make_rollout(1, birth_step=3)], "step 3.*step 2"),
        ([make_rollout(1), make_rollout(1)], "stored twice"),
        ([make_rollout(0)], "stored twice"),
    ],
)
def test_invalid_rollouts_are_refused_and_the_buffer_is_unchanged(rollouts, message):
    buffer = ReplayBuffer(replay_settings(), 2)
    buffer.insert([make_rollout(0)], 1)
    with pytest.raises(ValueError, match=message):
        buffer.insert(rollouts, step=2)
    assert stored_ids(buffer) == [0]


@pytest.mark.parametrize(
    "mask, logprobs, problem",
    [
        ([True, False, True], [-1.0, np.nan, -1.0], ""),  # a tool's token has no log-prob
        ([False, True, True], [-1.0, np.nan, -1.0], "log-prob of token 1 is nan"),
        ([False, False, False], [-1.0] * 3, "with 0 tokens that train"),
        ([True, False], [-1.0] * 3, r"bool (2,) with 1 tokens that train: expected bool (3,)"),
        ([1, 0, 1], [-1.0] * 3, "is int64 (3,)"),
    ],
)
def test_a_mask_is_checked_and_only_its_tokens_need_log_probs(mask, logprobs, problem):
    rollout = dataclasses.replace(
        make_rollout(1),
        completion_mask=np.array(mask),
        behavior_logprobs=np.array(logprobs, np.float32),
    )
    found = number_problem(rollout)
    assert problem in found and bool(problem) == bool(found)


def test_with_queries_as_units_groups_must_be_whole_and_adjacent():
    buffer = ReplayBuffer(replay_settings(unit="query", priority="uniform"), 2)
    split = [make_rollout(0, group_id=4), make_rollout(1, group_id=5), make_rollout(2, group_id=4)]
    with pytest.raises(ValueError, match="group 4 are not adjacent"):
        buffer.insert(split, 1)
    buffer.insert(split[:2], 1)
    with pytest.raises(ValueError, match="already stored"):
        buffer.insert(split[2:], 1)


def busy_buffer(settings):
    buffer = ReplayBuffer(settings, 4)
    rng = np.random.default_rng(2)
    for step in range(1, 9):
        buffer.evict(step)
        rewards = rng.choice([-1.0, 1.0, 0.25], (3, 4))
        rewards[:, 0], rewards[:, 1] = -1, 1
        groups = [make_group(12 * step + 4 * g, 3 * step + g, step, rewards[g]) for g in range(3)]
        buffer.insert([rollout for group in groups for rollout in group], step)
        buffer.draw(5, step, rng)
    return buffer


def assert_same_state(state, other):
    assert state.keys() == other.keys()
    assert ids(state["entries"]) == ids(other["entries"])
    for name in state.keys() - {"entries"}:
        np.testing.assert_array_equal(state[name], other[name])


def test_a_state_is_a_copy():
    buffer = busy_buffer(replay_settings())
    state = buffer.get_state()
    before = state["times_used"].copy()
    buffer.draw(20, 9, np.random.default_rng(0))
    np.testing.assert_array_equal(state["times_used"], before)


def test_a_state_with_other_priorities_is_refused_and_the_buffer_is_unchanged():
    buffer = busy_buffer(replay_settings())
    state = buffer.get_state()
    state["priority"][3] *= 1.0 + 1e-12
    before = buffer.get_state()
    with pytest.raises(ValueError, match="saved priorities"):
        buffer.set_state(state)
    assert_same_state(before, buffer.get_state())


def test_the_evicted_that_were_never_drawn_are_counted_by_step():
    """Stored 0 to 3, of which 0 was drawn before; the step draws 1. Then 4 to 7 push them all out,
    of which 2 and 3 were never drawn; at its end nothing is too old. In the next step 4 to 7 are:
    5 was drawn while it was fresh."""
    settings = replay_settings(capacity_rollouts=4, max_age_steps=3)
    buffer, rng = ReplayBuffer(settings, 2), np.random.default_rng(0)
    buffer.insert([make_rollout(i) for i in range(4)], 2, np.array([1, 0, 0, 0]))
    while buffer.column("times_used")[1] == 0:
        before = buffer.get_state()
        buffer.draw(1, 3, rng)
        if buffer.column("times_used")[[0, 2, 3]].tolist() != [1, 0, 0]:
            buffer.set_state(before)
    fresh = [make_rollout(i, birth_step=3) for i in range(4, 8)]
    assert buffer.insert(fresh, 3, np.array([0, 1, 0, 0])) == 4
    assert buffer.evict_ahead(3) == 0
    assert (buffer.stats(3).evicted, buffer.stats(3).evicted_undrawn) == (4, 2)
    assert (buffer.stats(4).evicted, buffer.stats(4).evicted_undrawn) == (0, 0)
    assert buffer.evict(7) == 4
    assert (buffer.stats(7).evicted, buffer.stats(7).evicted_undrawn) == (4, 3)


def test_the_next_ids_follow_those_of_the_rollouts():
    buffer = ReplayBuffer(replay_settings(), 4)
    buffer.count_ids([make_rollout(5, group_id=9), make_rollout(3, group_id=2)])
    assert (buffer.next_rollout_id, buffer.next_group_id) == (6, 10)


@pytest.mark.parametrize("positive_fraction", [0.0, 0.5])
def test_removed_rollouts_are_released(positive_fraction):
    settings = replay_settings(capacity_rollouts=4, positive_fraction=positive_fraction)
    buffer = ReplayBuffer(settings, 2)
    tokens = []
    for i in range(8):
        rollout = make_rollout(i, advantage=(-1.0) ** i)
        tokens.append(weakref.ref(rollout.completion_token_ids))
        buffer.insert([rollout], 1)
    del rollout
    held = [i for i, each in enumerate(tokens) if each() is not None]
    assert held == stored_ids(buffer) == ([2, 4, 6, 7] if positive_fraction else [4, 5, 6, 7])


def test_unused_first_draws_what_was_never_drawn_and_then_the_others():
    """Of eight rollouts three are drawn; then the five others; a draw of six takes one a second
    time. The first-draw probabilities are those among the unused, or among the used."""
    settings = replay_settings(unused_first=True, priority="uniform")
    buffer = ReplayBuffer(settings, 2)
    buffer.insert([make_rollout(i) for i in range(8)], 1)
    rng = np.random.default_rng(0)
    first = buffer.draw(3, 2, rng)
    assert first.probabilities.tolist() == [1 / 8] * 3 and first.effective_sample_size == 8
    second = buffer.draw(6, 2, rng)
    assert set(ids(second.rollouts[:5])) == set(range(8)) - set(ids(first.rollouts))
    assert second.rollouts[5].rollout_id in ids(first.rollouts)
    assert second.probabilities.tolist() == [1 / 5] * 5 + [1 / 3]
    assert buffer.column("times_used").sum() == 9 and buffer.column("times_used").min() == 1
    third = buffer.draw(2, 3, rng)  # all are used: the law of all
    assert third.probabilities.tolist() == [1 / 8] * 2 and third.entropy == np.log(8)


def test_unused_first_leaves_out_what_is_never_drawn():
    """Priorities 0 are never drawn: neither do they stand before the used ones, nor behind."""
    settings = replay_settings(unused_first=True, priority_exponent=1.0)
    priority_N, rng = np.array([0.0, 0.0, 1.0, 1.0]), np.random.default_rng(0)
    for used in ([True, False, True, True], [True, True, False, False]):
        candidates = Candidates(priority_N, np.arange(4), np.array(used), np.zeros(4))
        picks = pick(candidates, 3, settings, rng)
        assert sorted(picks.indices) == [2, 3] and picks.probabilities.tolist() == [0.5, 0.5]
    candidates = Candidates(
        np.zeros(4), np.arange(4), np.array([True, False, True, False]), np.zeros(4)
    )
    with pytest.raises(RecipeError, match="all 2 priorities are 0"):
        pick(candidates, 3, settings, rng)


def test_spans_of_queries_by_hand():
    starts, sizes = query_spans(np.array([4, 4, 7, 5, 5, 5]))
    assert (starts.tolist(), sizes.tolist()) == ([0, 2, 3], [2, 1, 3])
    starts, sizes = query_spans(np.zeros(0, dtype=np.int64))
    assert starts.shape == sizes.shape == (0,)


def correct_of(rollout):
    return is_correct(RolloutColumns(rollout))


def test_correct_is_a_positive_advantage_or_a_group_that_is_all_correct():
    assert correct_of(make_rollout(0, advantage=0.5))
    assert not correct_of(make_rollout(0, advantage=-0.5))
    assert not correct_of(make_rollout(0, advantage=0.0))
    assert correct_of(make_rollout(0, advantage=0.0, group_reward_std=0.0, group_correct=1))
    assert not correct_of(make_rollout(0, advantage=0.0, group_reward_std=0.0, group_correct=0))
