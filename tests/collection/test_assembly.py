"""Rollouts of the groups that a step takes."""

import numpy as np
import pytest
from collected import group, row
from msgspec import structs

from grpo_replay.collection.arrivals import ArrivalRules, Arrivals
from grpo_replay.collection.assembly import mean_lengths, rollouts_to_insert, take_rollouts
from grpo_replay.collection.ledger import Amount
from grpo_replay.collection.messages import Group
from grpo_replay.recipe import Recipe, resolve_recipe


def recipe(**sections) -> Recipe:
    sampling = {"group_size": 2, **sections.pop("sampling", {})}
    return resolve_recipe([{"sampling": sampling, **sections}])


def take(groups: list[Group], step: int, settings: Recipe, max_age=None):
    queue = Arrivals(ArrivalRules(None, False, max_age))
    for each in groups:
        queue.take_in(each)
    return take_rollouts(queue.select(step), settings, queue.ledger), queue.ledger


def straddler() -> Group:
    """Its second row changes from version 3 to version 4 after two tokens."""
    plain = group((0, 9), version=3, rewards=(1.0, -1.0))
    rows = (plain.rows[0], row(-1.0, 3, [(3, 0, 2), (4, 2, 3)]))
    return Group(0, 9, 0, "p9", plain.prompt_token_ids, rows, 1.0, 2.0)


def test_a_group_becomes_rollouts_with_the_samplers_logprobs_as_behaviour():
    taken, ledger = take([group((0, 0), version=3, rewards=(1.0, -1.0))], 5, recipe())
    first, second = taken.fresh
    assert (first.rollout_id, second.rollout_id, second.group_id) == (0, 1, 0)
    assert (first.birth_step, first.policy_version, first.policy_version_end) == (4, 3, 3)
    np.testing.assert_array_equal(first.behavior_logprobs, np.float32([-0.5, -0.5, -0.5]))
    np.testing.assert_array_equal(first.completion_token_ids, [7, 8, 9])
    np.testing.assert_array_equal(first.prompt_token_ids, [5, 6])
    assert abs(first.advantage - 1) < 1e-5
    assert ledger.settled["inserted"] == Amount(2, 6)


def test_ids_follow_the_order_of_arrival_and_count_every_group():
    groups = [group((0, 4), rewards=(1.0, 1.0)), group((0, 2))]
    taken, ledger = take(groups, 1, recipe())
    assert [r.rollout_id for r in taken.generated] == [0, 1, 2, 3]
    assert [r.kept for r in taken.generated] == [False, False, True, True]
    assert ledger.settled["zero_variance"] == Amount(2, 6)
    assert ledger.in_flight == Amount()


def test_a_stale_group_is_recorded_but_not_trained_on():
    taken, ledger = take([group((0, 0), version=0), group((0, 1), version=4)], 5, recipe(), 2)
    assert [r.rollout_id for r in taken.fresh] == [2, 3]
    assert [r.kept for r in taken.generated] == [False, False, True, True]
    assert all(r.advantage is None and r.behavior_logprobs is None for r in taken.generated[:2])
    assert ledger.settled["stale"] == Amount(2, 6)


def test_straddlers_are_kept_or_dropped_as_the_recipe_says_and_counted():
    kept, _ = take([straddler()], 5, recipe())
    assert (len(kept.fresh), kept.straddlers) == (2, 1)
    assert (kept.fresh[1].policy_version, kept.fresh[1].policy_version_end) == (3, 4)
    drop = recipe(sampling={"collection": {"straddlers": "drop"}})
    dropped, ledger = take([straddler()], 5, drop)
    assert [r.rollout_id for r in dropped.fresh] == [0]
    assert dropped.straddlers == 1
    assert ledger.settled["stale"] == Amount(1, 3)


@pytest.mark.parametrize("straddlers", ["keep", "drop"])
@pytest.mark.parametrize("drop_zero_variance", [True, False])
@pytest.mark.parametrize("rewards", [(1.0, -1.0), (1.0, 1.0)])
def test_what_will_be_inserted_is_known_before(straddlers, drop_zero_variance, rewards):
    settings = recipe(
        sampling={"collection": {"straddlers": straddlers}},
        replay={"drop_zero_variance": drop_zero_variance},
    )
    rows = tuple(row(each, spans=[(0, 0, 2), (1, 2, 3)][: 1 + i]) for i, each in enumerate(rewards))
    for given in (group(rewards=rewards), structs.replace(group(), rows=rows)):
        taken, _ = take([given], 1, settings)
        assert rollouts_to_insert(given, settings) == len(taken.fresh)


def test_the_length_of_what_is_dropped_is_reported_against_what_is_kept():
    """tinker-cookbook#822: dropping what is late favours short answers."""
    groups = [group((0, 0), version=0, tokens=9), group((0, 1), version=4, tokens=4)]
    taken, _ = take(groups, 5, recipe(), max_age=2)
    assert mean_lengths(taken.generated) == (4.0, 9.0)
