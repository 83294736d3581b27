"""What a step is expected to be, from what a run measured."""

import pytest

from grpo_replay.lab.dry_run.estimates import (
    Speed,
    describe_step,
    seconds_of_step,
)
from grpo_replay.lab.planning.expected import expected_of
from grpo_replay.recipe import load_recipe


@pytest.mark.parametrize(
    ("words", "replayed"),
    [
        (["replay.ratio=2"], 200),
        (["replay.ratio=20"], 1000),  # all that ten steps store
        (["replay.ratio=20", "replay.capacity_rollouts=500"], 500),
        (["replay.ratio=20", "replay.with_replacement=true"], 2000),
        (["replay.ratio=20", "replay.max_uses=3"], 300),
    ],
)
def test_no_more_is_drawn_than_is_stored_or_may_be_used_again(words, replayed):
    """100 of 256 rollouts survive, and are stored for ten steps."""
    recipe = load_recipe("qwen3-1.7b", words)
    found = describe_step(recipe, expected_of(recipe, {"survival": 100 / 256}))
    assert found["replayed_rollouts_expected"] == replayed
    assert found["trained_rollouts_expected"] == 100 + replayed


def test_every_pass_over_the_fresh_batch_trains_on_its_tokens_again():
    recipe = load_recipe("qwen3-1.7b", ["replay.preset=grpo", "batch.epochs=3"])
    found = describe_step(
        recipe, expected_of(recipe, {"survival": 100 / 256, "completion_tokens": 500.0})
    )
    assert found["surviving_rollouts_expected"] == 100
    assert found["trained_rollouts_expected"] == 300
    assert found["trained_tokens_expected"] == 150_000


@pytest.mark.parametrize(("overlaps", "seconds"), [(False, 5.5), (True, 3.5)])
def test_the_seconds_of_a_step_are_those_of_its_tokens_and_the_rest(overlaps, seconds):
    step = {"generated_tokens_expected": 600, "trained_tokens_expected": 800}
    assert seconds_of_step(step, Speed(300, 266.67, 0.5), overlaps) == seconds


def test_measured_values_replace_assumptions_and_say_so():
    recipe = load_recipe("qwen3-0.6b")
    found = expected_of(recipe, {"survival": 0.5, "completion_tokens": 700.0})
    assert (found.survival, found.completion_tokens, found.mu) == (0.5, 700, 6.84)
    assert found.sources["survival"] == "measured in the run"
    keeps_all = load_recipe("fifo-qwen3-0.6b")
    assert expected_of(keeps_all, {"survival": 0.5}).survival == 1
