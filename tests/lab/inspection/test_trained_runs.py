"""Inspection of runs made by the trainer: two tiny runs, with the checks of test_summary."""

from pathlib import Path

import pytest
import test_summary
from commands import run_inspect as run
from small_runs.trained import train_small_run

from grpo_replay.lab.inspection.rebuild import what_if
from grpo_replay.lab.inspection.source import open_source

pytestmark = pytest.mark.slow

CHECKS = [
    value
    for name, value in vars(test_summary).items()
    if name.startswith("test_")
    and any(mark.name == "parametrize" for mark in getattr(value, "pytestmark", []))
    and value.__code__.co_varnames[: value.__code__.co_argcount] == ("runs", "preset")
]


OWN = {
    "ours": {"capacity_rollouts": 5000, "warmup_steps": 3, "max_age_steps": 5},
    "fifo": {"capacity_rollouts": 96, "ratio": 1.5, "warmup_steps": 0, "max_age_steps": None},
}


def train(folder: Path, preset: str, **replay) -> Path:
    """24 steps of 8 prompts of 4, the size of the synthetic runs."""
    train_small_run(
        folder, sampling={"prompts_per_step": 8}, replay={"preset": preset} | OWN[preset] | replay,
        run={"steps": 24}, checkpoint={"every_steps": 12}, eval={"benchmarks": []},
        batch={"updates_per_step": 1},
    )  # fmt: skip
    return folder


def test_numbers_and_draws_of_real_runs_and_a_what_if_that_comes_true(tmp_path, processes, capsys):
    real = {preset: train(tmp_path / preset, preset) for preset in ("ours", "fifo")}
    assert len(CHECKS) == 6
    for preset, folder in real.items():
        for check in CHECKS:
            check(real, preset)
        assert run(str(folder), verify=True) == 0
    run(str(real["ours"]), show=100)
    assert "no tokenizer" not in capsys.readouterr().out
    predicted = what_if(open_source(real["ours"]), ["max_age_steps=2"])
    shorter = train(tmp_path / "shorter", "ours", max_age_steps=2)
    actual = what_if(open_source(shorter), []).logged
    assert actual["age_p95"] == predicted.changed["age_p95"] == 2.0
    assert actual["age_mean"] == pytest.approx(predicted.changed["age_mean"], abs=0.2)
    assert predicted.logged["age_mean"] - actual["age_mean"] > 0.8
    assert actual["stored_mean"] == pytest.approx(predicted.changed["stored_mean"], rel=0.25)
