"""What a step is expected to be, from what a run measured."""

import json

import pytest

from grpo_replay.lab.dry_run.estimates import (
    describe_step,
    expected_of,
)
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.estimate import measured_speed
from grpo_replay.recipe import load_recipe


@pytest.mark.parametrize(
    ("words", "replayed"),
    [
        (["replay.ratio=2"], 200),
        (["replay.ratio=20"], 1000),  # all that ten steps store
        (["replay.ratio=20", "replay.capacity_rollouts=500"], 500),
        (["replay.ratio=20", "replay.with_replacement=true"], 2000),
    ],
)
def test_no_more_is_drawn_without_replacement_than_is_stored(words, replayed):
    """100 of 256 rollouts survive, and are stored for ten steps."""
    recipe = load_recipe("qwen3-1.7b", words)
    found = describe_step(recipe, expected_of(recipe, {"survival": 100 / 256}))
    assert found["replayed_rollouts_expected"] == replayed
    assert found["trained_rollouts_expected"] == 100 + replayed


def test_the_speed_of_a_run_is_that_of_one_of_its_ranks(runs, tmp_path):
    lines = [json.loads(line) for line in (runs["ours"] / "metrics.jsonl").open()]
    generated, trained, generating, training = (
        sum(line[f"cost/{name}"] for line in lines)
        for name in (
            "generated_tokens", "trained_tokens", "generation_seconds", "training_seconds",
        )
    )  # fmt: skip
    for line in lines:
        both = line["cost/generation_seconds"] + line["cost/training_seconds"]
        line["step_time"] = both + 2.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "environment.json").write_text('{"world_size": 2}')
    speed = measured_speed(open_source(tmp_path))
    assert speed.generated == pytest.approx(generated / generating / 2)
    assert speed.trained == pytest.approx(trained / training / 2)
    assert speed.other_seconds == pytest.approx(2.5)
    assert measured_speed(open_source(runs["ours"])) is None  # no step_time


def test_measured_values_replace_assumptions_and_say_so():
    recipe = load_recipe("qwen3-0.6b")
    found = expected_of(recipe, {"survival": 0.5, "completion_tokens": 700.0})
    assert (found.survival, found.completion_tokens, found.mu) == (0.5, 700, 6.84)
    assert found.sources["survival"] == "measured in the run"
    keeps_all = load_recipe("fifo-qwen3-0.6b")
    assert expected_of(keeps_all, {"survival": 0.5}).survival == 1
