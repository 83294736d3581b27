"""What the end of a run says."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from grpo_replay.cli.run_display import describe_end, print_result


def summary(clipped: float | None) -> dict:
    return {
        "means": {"reward/missing_fraction": 0.0, "replay/clip_fraction": clipped},
        "final": {"mean": 0.5}, "steps": 60, "wall_seconds": 90.0,
        "generated_tokens": 1000, "trained_tokens": 2000, "replayed_rollouts": 300,
    }  # fmt: skip


def test_the_end_says_when_staleness_times_rate_was_too_large():
    said = describe_end(Path("runs/one"), summary(0.269))
    assert "26.9 % of the replayed tokens were clipped" in said
    assert "optimizer.learning_rate" in said and "replay.max_age_steps" in said
    for clipped in (0.1, 0.0, None):  # None: plain GRPO
        assert "clipped" not in describe_end(Path("runs/one"), summary(clipped))


def test_the_end_of_a_run_that_trained_on_nothing_says_so():
    text = "nothing was trained: the weights are as before"
    assert text in describe_end(Path("runs/one"), summary(None) | {"trained_tokens": 0})
    assert text not in describe_end(Path("runs/one"), summary(None))


def test_accuracies_are_printed_if_there_are_any():
    nothing = {"comparable": True, "base": {}, "base_stderr": {}, "final_stderr": {}}
    for found in ({"base": {"mean": 0.4}, "final": {}}, {"base": {}, "final": {"mean": 0.5}}):
        out = StringIO()
        print_result(Path("runs/one"), {**summary(None), **nothing, **found}, Console(file=out))
        assert "held-out accuracy" in out.getvalue()
