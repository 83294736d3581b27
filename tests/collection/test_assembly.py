"""Rollouts of the groups that a step takes."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from collected import group, row

from grpo_replay.collection.arrivals import (
    Amount,
    Arrivals,
    is_partial,
    rollouts_to_insert,
    take_rollouts,
)
from grpo_replay.collection.messages import LOGPROBS, Group, pack
from grpo_replay.recipe import Recipe, resolve_recipe
from grpo_replay.types import Rollout


def recipe(**sections) -> Recipe:
    sampling = {"group_size": 2, **sections.pop("sampling", {})}
    return resolve_recipe([{"sampling": sampling, **sections}])


def take(groups: list[Group], step: int, settings: Recipe, max_age=None):
    queue = Arrivals(None, False, max_age)
    for each in groups:
        queue.apply_record(each)
    return take_rollouts(queue.select(step), settings, queue.ledger), queue.ledger


def partial_group() -> Group:
    """Its second row changes from version 3 to version 4 after two tokens."""
    plain = group((0, 9), version=3, rewards=(1.0, -1.0))
    changing = msgspec.structs.replace(
        row(-1.0, 3, [(3, 0, 2), (4, 2, 3)]),
        logprobs=pack(np.array([-0.25, -0.5, -1.0]), LOGPROBS),
    )
    return msgspec.structs.replace(plain, rows=(plain.rows[0], changing))


def survivors(taken: Sequence[Rollout]) -> list[Rollout]:
    return [rollout for rollout in taken if rollout.kept]


def test_a_group_becomes_rollouts_with_the_samplers_logprobs():
    taken, ledger = take([group((0, 0), version=3, rewards=(1.0, -1.0))], 5, recipe())
    first, second = survivors(taken)
    assert (first.rollout_id, second.rollout_id, second.group_id) == (0, 1, 0)
    assert (first.birth_step, first.policy_version, first.policy_version_end) == (4, 3, 3)
    np.testing.assert_array_equal(first.sampler_logprobs, np.float32([-0.5, -0.5, -0.5]))
    np.testing.assert_array_equal(first.completion_token_ids, [7, 8, 9])
    np.testing.assert_array_equal(first.prompt_token_ids, [5, 6])
    assert abs(first.advantage - 1) < 1e-5
    assert ledger.closed["inserted"] == Amount(2, 6)


def test_ids_follow_the_order_of_arrival_and_count_every_group():
    groups = [group((0, 4), rewards=(1.0, 1.0)), group((0, 2))]
    taken, ledger = take(groups, 1, recipe())
    assert [r.rollout_id for r in taken] == [0, 1, 2, 3]
    assert [r.kept for r in taken] == [False, False, True, True]
    assert ledger.closed["zero_variance"] == Amount(2, 6)
    assert ledger.in_flight == Amount()


def test_a_rollout_whose_reward_did_not_come_counts_nowhere_and_is_closed_as_such():
    """One of the first group's three; two of the second's, so that nothing can be compared."""
    settings = recipe(sampling={"group_size": 3}, replay={"drop_zero_variance": False})
    groups = [group((0, 0), rewards=(1.0, None, -1.0)), group((0, 1), rewards=(None, 1.0, None))]
    taken, ledger = take(groups, 1, settings)
    assert [r.rollout_id for r in survivors(taken)] == [0, 2]
    assert [r.advantage for r in survivors(taken)] == pytest.approx([1.0, -1.0], abs=1e-5)
    missing = taken[1]
    assert (missing.reward, missing.advantage, missing.behavior_logprobs) == (None, None, None)
    assert (missing.group_reward_mean, missing.group_reward_std) == (0.0, 1.0)
    assert all(r.group_reward_mean is r.group_reward_std is None for r in taken[3:])
    assert ledger.closed["no_reward"] == Amount(3, 9)
    assert ledger.closed["zero_variance"] == Amount(1, 3)
    assert ledger.in_flight == Amount()


def test_a_stale_group_is_recorded_but_not_trained_on():
    taken, ledger = take([group((0, 0), version=0), group((0, 1), version=4)], 5, recipe(), 2)
    assert [r.rollout_id for r in survivors(taken)] == [2, 3]
    assert [r.kept for r in taken] == [False, False, True, True]
    assert all(r.advantage is None and r.behavior_logprobs is None for r in taken[:2])
    assert ledger.closed["stale"] == Amount(2, 6)


def test_partial_rollouts_are_kept_or_dropped_as_the_recipe_says_and_counted():
    kept, _ = take([partial_group()], 5, recipe())
    _, second = survivors(kept)
    assert sum(map(is_partial, kept)) == 1
    assert (second.policy_version, second.policy_version_end, second.birth_step) == (3, 4, 4)
    assert second.sampler_logprobs.tolist() == [-0.25, -0.5, -1.0]
    drop = recipe(sampling={"collection": {"partial_rollouts": "drop"}})
    dropped, ledger = take([partial_group()], 5, drop)
    assert [r.rollout_id for r in survivors(dropped)] == [0]
    assert sum(map(is_partial, dropped)) == 1
    assert ledger.closed["stale"] == Amount(1, 3)


LONG_HALF = {"max_completion_length": 4}


@pytest.mark.parametrize(
    ("sections", "inserted"),
    [
        ({}, 4),
        ({"replay": {"drop_zero_variance": False}}, 6),
        ({"sampling": {"collection": {"partial_rollouts": "drop"}}}, 3),
        ({"sampling": LONG_HALF, "reward": {"overlong_buffer_tokens": 2}}, 6),
        ({"sampling": LONG_HALF, "reward": {"mask_truncated": True}}, 3),
    ],
    ids=[
        "plain",
        "zero variance kept",
        "partial rollouts dropped",
        "length penalty",
        "truncated masked",
    ],
)
def test_what_a_step_waits_for_is_what_it_inserts(sections, inserted):
    """Three groups: one with a partial rollout, one whose rewards differ and whose second
    completion was cut off, and one whose rewards are equal and lengths are not, which a length
    penalty tells apart."""
    cut_off = msgspec.structs.replace(row(-1.0, 4, [(3, 0, 4)]), finish_reason="length")
    equal = (row(1.0, 2, [(3, 0, 2)]), row(1.0, 4, [(3, 0, 4)]))
    plain = group((0, 1), version=3)
    groups = [
        partial_group(),
        msgspec.structs.replace(plain, rows=(plain.rows[0], cut_off)),
        msgspec.structs.replace(group((0, 2), version=3), rows=equal),
    ]
    settings = recipe(**sections)
    queue = Arrivals(None, False, None)
    for each in groups:
        queue.apply_record(each)
    waiting = sum(rollouts_to_insert(each, settings) for each in queue.young(5))
    taken = take_rollouts(queue.select(5), settings, queue.ledger)
    assert waiting == len(survivors(taken)) == inserted
