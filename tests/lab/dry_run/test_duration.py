"""What a step is expected to be, from what a run measured."""

import pytest

from grpo_replay.lab.dry_run.estimates import Speed, step_section
from grpo_replay.lab.dry_run.rows import Row, Section
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
    found = step_section(recipe, expected_of(recipe, {"survival": 100 / 256})).to_json()
    assert found["replayed_rollouts_expected"] == replayed
    assert found["trained_rollouts_expected"] == 100 + replayed


def test_every_pass_over_the_fresh_batch_trains_on_its_tokens_again():
    recipe = load_recipe("qwen3-1.7b", ["replay.preset=grpo", "batch.epochs=3"])
    expected = expected_of(recipe, {"survival": 100 / 256, "completion_tokens": 500.0})
    found = step_section(recipe, expected).to_json()
    assert found["surviving_rollouts_expected"] == 100
    assert found["trained_rollouts_expected"] == 300
    assert found["trained_tokens_expected"] == 150_000


@pytest.mark.parametrize(("overlaps", "seconds"), [(False, 5.5), (True, 3.5)])
def test_the_seconds_of_a_step_are_those_of_its_tokens_and_the_rest(overlaps, seconds):
    assert Speed(300, 266.67, 0.5).seconds(600, 800, overlaps) == seconds


def test_measured_values_replace_assumptions_and_say_so():
    recipe = load_recipe("qwen3-0.6b")
    found = expected_of(recipe, {"survival": 0.5, "completion_tokens": 700.0})
    assert (found.survival, found.completion_tokens, found.mu) == (0.5, 700, 6.84)
    assert found.sources["survival"] == "measured in the run"
    keeps_all = load_recipe("fifo-qwen3-0.6b")
    assert expected_of(keeps_all, {"survival": 0.5}).survival == 1


def test_a_section_is_the_same_rows_for_json_and_for_the_terminal_without_unknown_and_zero():
    rows = [Row("tokens_expected", "tokens", 1234, 5678), Row("seconds", "seconds", 1.5),
            Row("host_gib", "host, GiB", 0.0), Row("push_mib", "push", None),
            Row("fits", "", True)]  # fmt: skip
    section = Section("step", "A step", rows)
    assert section.to_json() == {
        "tokens_expected": 1234, "tokens_most": 5678, "seconds": 1.5, "host_gib": 0.0,
        "push_mib": None, "fits": True,
    }  # fmt: skip
    cells = [row.cells() for row in section.shown()]
    assert cells == [("  tokens", "1,234", "5,678"), ("  seconds", "1.500", "")]
    assert Section("memory", "Memory").to_json() is None
