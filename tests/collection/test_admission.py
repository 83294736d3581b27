"""AReaL's bound on groups ahead of the trainer, by hand."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_replay.collection.intake import accepted_limit, may_start, unacknowledged_limit


def test_the_limit_by_hand():
    assert accepted_limit(1, 0, 8, steps=10) == 16
    assert accepted_limit(1, 1, 8, steps=10) == 24
    assert accepted_limit(0, 0, 8, steps=10) == 8
    assert accepted_limit(1, 9, 8, steps=10) == 80  # nothing is sampled that no step trains on


def test_a_discarded_group_is_replaced_and_an_accepted_one_is_not():
    assert may_start(24, accepted_before=16, discarded_since=0) == 8
    assert may_start(24, accepted_before=16, discarded_since=3) == 11


def test_the_finished_groups_that_wait_fill_one_buffer():
    assert unacknowledged_limit(84, 16) == 6
    assert unacknowledged_limit(80, 16) == 5
    assert unacknowledged_limit(1, 16) == 1


@given(st.integers(0, 5), st.integers(1, 6), st.integers(1, 30))
def test_every_step_of_a_run_may_have_its_groups_and_none_is_left_over(ahead, prompts, steps):
    """Trainer and collector never wait for each other, at the first step or the last: before each
    step the bound admits at least the groups of all steps up to it, and after the last none."""
    for version in range(steps):
        limit = accepted_limit(ahead, version, prompts, steps)
        assert (version + 1) * prompts <= limit <= steps * prompts
    assert accepted_limit(ahead, steps, prompts, steps) == steps * prompts
