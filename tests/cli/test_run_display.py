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
        "replay": {"shadow": False, "mu": 0.5, "compute_share": 0.2, "advice": "leave it off"},
    }  # fmt: skip


def test_the_end_says_what_replay_took_or_in_shadow_would_take():
    said = describe_end(Path("runs/one"), summary(None))
    assert "replay took 20 % of the compute; leave it off" in said
    means = {
        "replay/rollouts": 88.0, "replay/clip_fraction": 0.027, "replay/ratio_ess": 0.99,
        "replay/approx_kl": 0.004, "shadow/rare_success_fraction": 0.07,
        "shadow/new_prompt_fraction": None,
    }  # fmt: skip
    shadow = summary(None)["replay"] | {"shadow": True, "means": means, "shadow_time_share": 0.01}
    said = describe_end(Path("runs/one"), summary(None) | {"replay": shadow})
    assert "in shadow: 88 rollouts a step" in said and "2.7 % of their tokens clipped" in said
    assert "replay would take 20 % of the compute" in said
    without_probe = dict.fromkeys(means) | {"replay/rollouts": 11.3}
    said = describe_end(
        Path("runs/one"), summary(None) | {"replay": shadow | {"means": without_probe}}
    )
    assert "11 rollouts a step" in said and "no probe" in said
    assert "KL" not in said and "of their tokens" not in said, "nothing was measured"
    unknown = summary(None)["replay"] | {"mu": None, "compute_share": None, "advice": None}
    assert "compute" not in describe_end(Path("runs/one"), summary(None) | {"replay": unknown})


def test_the_end_says_when_staleness_times_rate_was_too_large():
    said = describe_end(Path("runs/one"), summary(0.269))
    assert "26.9 % of the replayed tokens were clipped" in said
    assert "optimizer.learning_rate" in said and "replay.max_age_steps" in said
    for clipped in (0.1, 0.0, None):  # None: plain GRPO
        assert "clipped" not in describe_end(Path("runs/one"), summary(clipped))


def test_the_end_of_a_run_that_trained_on_nothing_says_so():
    text = "nothing was trained: the weights are unchanged"
    assert text in describe_end(Path("runs/one"), summary(None) | {"trained_tokens": 0})
    assert text not in describe_end(Path("runs/one"), summary(None))


def test_accuracies_are_printed_if_there_are_any():
    nothing = {"comparable": True, "base": {}, "base_stderr": {}, "final_stderr": {}}
    for found in ({"base": {"mean": 0.4}, "final": {}}, {"base": {}, "final": {"mean": 0.5}}):
        out = StringIO()
        print_result(Path("runs/one"), {**summary(None), **nothing, **found}, Console(file=out))
        assert "held-out accuracy" in out.getvalue()
