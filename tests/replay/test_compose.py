"""Each composition, worked by hand over the trainer's own sequence of calls."""

import copy
import math
from collections import Counter

import numpy as np
import pytest
from buffer_makers import check_valid, ids, make_group, make_rollout, replay_settings

from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.compose import (
    buffer_step,
    compose_batch,
    draw_count,
)
from grpo_replay.replay.insertion import entries_of

G = 4
GENERATED = 16  # R: four prompts


def fresh_of(step, survivors):
    """`survivors` groups of G, ids 100·step + 0, 1, …; every group has one right answer."""
    return [
        rollout
        for g in range(survivors)
        for rollout in make_group(100 * step + G * g, 10 * step + g, step, [1, -1, -1, -1])
    ]


def run(settings, survivors_by_step, seed=0):
    """(buffer, fresh, batch) of every step, in the trainer's order of calls."""
    buffer, rng, history = ReplayBuffer(settings, G), np.random.default_rng(seed), []
    for step, survivors in enumerate(survivors_by_step, start=1):
        fresh = fresh_of(step, survivors)
        buffer.evict(step)
        twin = copy.deepcopy(buffer)
        if settings.composition == "buffer_only":
            twin.insert(fresh, step)
        stored = ids(twin.rollouts())
        batch = buffer_step(buffer, fresh, step, GENERATED, rng)
        assert check_valid(buffer) == (True, "")
        assert len(batch.rollouts) == len(batch.replayed) == len(batch.ages)
        ages = [step - rollout.birth_step for rollout in batch.rollouts]
        assert batch.ages.tolist() == ages
        history.append((stored, fresh, batch, ids(buffer.rollouts())))
    return history


def test_fresh_anchored_step_by_step():
    history = run(replay_settings(max_age_steps=2, ratio=0.5), [2, 1, 3, 0, 2, 2])
    sizes = []
    for step, (stored, fresh, batch, after) in enumerate(history, start=1):
        drawn = ids(batch.draw.rollouts)
        sizes.append((len(stored), len(fresh), len(drawn)))
        assert ids(batch.rollouts) == ids(fresh) + drawn  # all fresh, then the draw
        assert batch.replayed.tolist() == [False] * len(fresh) + [True] * len(drawn)
        assert set(drawn) <= set(stored)
        assert len(set(drawn)) == len(drawn)
        assert all(1 <= age <= 2 for age in batch.draw.ages)
        births = {i // 100 for i in after}
        assert births <= {step, step - 1}  # at rest: the births that the next step may use
        assert set(ids(fresh)) <= set(after)
    # Stored before the draw, fresh, drawn = min(round(fresh / 2), stored); step 4 is a no-op.
    assert sizes == [(0, 8, 0), (8, 4, 2), (12, 12, 6), (16, 0, 0), (12, 8, 4), (8, 8, 4)]
    assert len(history[3][2].rollouts) == 0


def test_ages_reach_the_bound_and_never_pass_it():
    history = run(replay_settings(max_age_steps=3, ratio=1.0), [2] * 12)
    seen = Counter(age for _, _, batch, _ in history for age in batch.draw.ages.tolist())
    assert set(seen) == {1, 2, 3}


def test_with_fewer_stored_than_asked_all_are_drawn():
    history = run(replay_settings(ratio=1.0), [1, 4])
    assert len(history[1][2].draw.rollouts) == 4  # asked 16, stored 4
    assert sorted(ids(history[1][2].draw.rollouts)) == ids(history[0][1])


@pytest.mark.parametrize("composition", ["fresh_anchored", "pool"])
def test_warm_up_trains_on_all_fresh_and_fills_the_buffer(composition):
    history = run(replay_settings(composition=composition, warmup_steps=2), [2, 2, 2])
    for stored, fresh, batch, after in history[:2]:
        assert ids(batch.rollouts) == ids(fresh)
        assert not batch.replayed.any()
        assert batch.draw.entries == ()
        assert after == stored + ids(fresh)
    assert len(history[2][2].draw.rollouts) == (4 if composition == "fresh_anchored" else 12)


def test_pool_draws_the_batch_from_fresh_and_stored_together():
    settings = replay_settings(composition="pool", max_age_steps=2, priority_exponent=1.0)
    history = run(settings, [2, 1, 3, 0, 2])
    assert [len(batch.rollouts) for _, _, batch, _ in history] == [8, 6, 18, 0, 12]
    right, wrong = math.sqrt(3), math.sqrt(1 / 3)
    for stored, fresh, batch, _ in history:
        pool = stored + ids(fresh)
        assert ids(batch.rollouts) == ids(batch.draw.rollouts)
        assert set(ids(batch.rollouts)) <= set(pool)
        assert batch.replayed.tolist() == (batch.ages > 0).tolist()
        total = len(pool) / G * (right + 3 * wrong)
        expected = [(right if r.reward > 0 else wrong) / total for r in batch.rollouts]
        np.testing.assert_allclose(batch.draw.probabilities, expected, rtol=1e-5)
    # Step 1 has nothing stored: 12 asked, all 8 fresh drawn once.
    assert sorted(ids(history[0][2].rollouts)) == ids(history[0][1])
    assert any(batch.replayed.any() and not batch.replayed.all() for _, _, batch, _ in history)


def test_pool_counts_a_draw_in_the_birth_step_as_a_use():
    settings = replay_settings(composition="pool", max_age_steps=None, warmup_steps=1)
    buffer, rng, uses = ReplayBuffer(settings, G), np.random.default_rng(4), Counter()
    last = {}
    for step in range(1, 6):
        fresh = fresh_of(step, 2)
        batch = buffer_step(buffer, fresh, step, GENERATED, rng)
        uses.update(ids(batch.draw.rollouts))
        last |= dict.fromkeys(ids(batch.draw.rollouts), step)
    stored = buffer.column("rollout_id").tolist()
    assert buffer.column("times_used").tolist() == [uses[i] for i in stored]
    assert buffer.column("last_used_step").tolist() == [last.get(i, -1) for i in stored]
    assert any(i // 100 == last[i] for i in last)  # some were drawn in their birth step
    assert sum(uses.values()) == 4 * 12  # none in the warm-up


def test_pool_counts_every_use_of_a_fresh_rollout_that_is_drawn_again():
    """Eight draws with replacement from four rollouts: one of them at least is drawn twice."""
    settings = replay_settings(composition="pool", ratio=1.0, with_replacement=True)
    buffer = ReplayBuffer(settings, G)
    batch = buffer_step(buffer, fresh_of(1, 1), 1, G, np.random.default_rng(0))
    uses = Counter(ids(batch.draw.rollouts))
    assert sum(uses.values()) == 8
    stored = buffer.column("rollout_id").tolist()
    assert buffer.column("times_used").tolist() == [uses[i] for i in stored]


def test_pool_of_queries_takes_whole_groups():
    settings = replay_settings(
        composition="pool", unit="query", priority="group_std", max_age_steps=3
    )
    history = run(settings, [2, 3, 1, 2])
    # round(1.5 · B' / 4) queries of 4: 3 asked of 2 there; 4.5 → 4; 1.5 → 2; 3.
    assert [len(batch.rollouts) for _, _, batch, _ in history] == [8, 16, 8, 12]
    for stored, fresh, batch, _ in history:
        by_group = {}
        for rollout in batch.rollouts:
            by_group.setdefault(rollout.group_id, []).append(rollout.completion_index)
        assert all(members == [0, 1, 2, 3] for members in by_group.values())
        assert set(batch.draw.probabilities.tolist()) == {1 / ((len(stored) + len(fresh)) / G)}


def fifo(**changes):
    return replay_settings(
        **{
            "preset": "fifo",
            "composition": "buffer_only",
            "priority": "uniform",
            "max_age_steps": None,
            "capacity_rollouts": 20,
            "ratio": 0.5,
        }
        | changes
    )


def test_buffer_only_inserts_before_it_draws_and_draws_without_survivors():
    history = run(fifo(), [2, 0, 2, 4])
    # B = round(0.5 · 16) = 8 of all stored, those of this step included.
    assert [(len(stored), len(batch.rollouts)) for stored, _, batch, _ in history] == [
        (8, 8),
        (8, 8),
        (16, 8),
        (20, 8),
    ]
    for stored, fresh, batch, after in history:
        assert set(ids(fresh)) <= set(stored)
        assert set(ids(batch.rollouts)) <= set(stored)
        assert batch.replayed.all()
        assert after == stored
        np.testing.assert_allclose(batch.draw.probabilities, 1 / len(stored))
    assert history[0][2].ages.tolist() == [0] * 8
    assert history[3][0][:4] == [304, 305, 306, 307]  # the newest 20 of 8 + 8 + 16


@pytest.mark.parametrize("sizes", [(4, 4, 3), (4, 3, 3), (3, 3, 3)])
@pytest.mark.parametrize("changes", [{}, {"with_replacement": False, "unused_first": True}])
def test_a_step_of_several_draws_makes_them_one_after_the_other_and_splits_the_batch_evenly(
    changes, sizes
):
    count = sum(sizes)
    buffer, twin = (ReplayBuffer(fifo(ratio=1.0, **changes), G) for _ in range(2))
    for each in (buffer, twin):
        each.insert(fresh_of(1, 3), 1)
    batch = compose_batch(buffer, [], 2, count, np.random.default_rng(0), draws=3)
    first, second, third = sizes
    assert batch.draw.update_N.tolist() == [0] * first + [1] * second + [2] * third
    assert batch.draw.updates == 3
    rng = np.random.default_rng(0)
    draws = [twin.draw(size, 2, rng) for size in sizes]
    assert ids(batch.rollouts) == [i for draw in draws for i in ids(draw.rollouts)]
    assert batch.draw.ages.tolist() == [1] * count
    np.testing.assert_array_equal(
        batch.draw.probabilities, np.concatenate([draw.probabilities for draw in draws])
    )
    assert batch.draw.effective_sample_size == draws[0].effective_sample_size == 12
    np.testing.assert_array_equal(buffer.column("times_used"), twin.column("times_used"))


def test_buffer_only_with_an_age_limit_still_uses_that_age():
    history = run(fifo(max_age_steps=2, ratio=2.0, capacity_rollouts=1000), [1] * 6)
    assert set(history[-1][2].ages.tolist()) == {0, 1, 2}
    assert {i // 100 for i in history[-1][3]} == {5, 6}


@pytest.mark.parametrize("off", [{"preset": "grpo"}, {"ratio": 0.0}])
@pytest.mark.parametrize("composition", ["fresh_anchored", "pool"])
def test_without_replay_nothing_is_stored_drawn_or_random(off, composition):
    settings = replay_settings(composition=composition, **off)
    assert not settings.replays
    buffer, rng = ReplayBuffer(settings, G), np.random.default_rng(0)
    before = rng.bit_generator.state
    for step in (1, 2, 3):
        fresh = fresh_of(step, 2)
        batch = buffer_step(buffer, fresh, step, GENERATED, rng)
        assert ids(batch.rollouts) == ids(fresh)
    assert len(buffer) == 0
    assert rng.bit_generator.state == before


@pytest.mark.parametrize(
    ("composition", "unit", "ratio", "base", "expected"),
    [
        ("fresh_anchored", "rollout", 0.5, 113, 56),  # 56.5: the even neighbour, 169 in all
        ("fresh_anchored", "rollout", 0.5, 115, 58),  # 57.5
        ("fresh_anchored", "rollout", 1.0, 113, 113),
        ("fresh_anchored", "rollout", 0.1, 4, 0),
        ("fresh_anchored", "query", 0.5, 104, 6),  # 6.5 of G = 8
        ("fresh_anchored", "query", 0.5, 120, 8),  # 7.5
        ("pool", "rollout", 0.5, 113, 170),  # 169.5
        ("pool", "query", 0.5, 104, 20),  # 19.5
        ("buffer_only", "rollout", 0.25, 256, 64),
        ("buffer_only", "query", 0.25, 256, 8),
    ],
)
def test_counts_by_hand(composition, unit, ratio, base, expected):
    settings = replay_settings(composition=composition, unit=unit, ratio=ratio, priority="uniform")
    assert draw_count(settings, 8, base) == expected


@pytest.mark.parametrize("composition", ["fresh_anchored", "pool"])
def test_replay_in_the_birth_step_is_impossible(composition):
    buffer = ReplayBuffer(replay_settings(composition=composition), G)
    buffer.insert([make_rollout(0, birth_step=3)], 3)
    with pytest.raises(ValueError, match="birth step"):
        compose_batch(buffer, entries_of(fresh_of(3, 1)), 3, GENERATED, np.random.default_rng(0))


def test_pool_refuses_scattered_queries():
    settings = replay_settings(composition="pool", unit="query", priority="uniform")
    fresh = fresh_of(1, 2)
    with pytest.raises(ValueError, match="not adjacent"):
        compose_batch(
            ReplayBuffer(settings, G),
            entries_of(fresh[::2] + fresh[1::2]),
            1,
            16,
            np.random.default_rng(0),
        )
