"""AReaL's bound on groups ahead of the trainer, by hand."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_replay.collection.intake import accepted_limit


def test_the_limit_by_hand():
    assert accepted_limit(1, 0, 8, steps=10) == 16
    assert accepted_limit(1, 1, 8, steps=10) == 24
    assert accepted_limit(0, 0, 8, steps=10) == 8
    assert accepted_limit(1, 9, 8, steps=10) == 80  # nothing is sampled that no step trains on


@given(st.integers(0, 5), st.integers(1, 6), st.integers(1, 30))
def test_every_step_of_a_run_may_have_its_groups_and_none_is_left_over(ahead, prompts, steps):
    """Trainer and collector never wait for each other, at the first step or the last: before each
    step the bound admits at least the groups of all steps up to it, and after the last none."""
    for version in range(steps):
        limit = accepted_limit(ahead, version, prompts, steps)
        assert (version + 1) * prompts <= limit <= steps * prompts
    assert accepted_limit(ahead, steps, prompts, steps) == steps * prompts
