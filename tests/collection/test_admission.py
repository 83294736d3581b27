"""AReaL's bound on groups ahead of the trainer, by hand."""

from grpo_replay.collection.intake import accepted_limit


def test_the_limit_by_hand():
    assert accepted_limit(1, 0, 8, steps=10) == 16
    assert accepted_limit(1, 1, 8, steps=10) == 24
    assert accepted_limit(0, 0, 8, steps=10) == 8
    assert accepted_limit(1, 9, 8, steps=10) == 80  # nothing is sampled that no step trains on
