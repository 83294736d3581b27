"""Inspection of runs made by the trainer: a tiny run per preset, with the checks of test_summary.

pytest -m slow tests/lab/inspection/test_trained_runs.py        about three minutes on two cores
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import test_summary
from commands import run_inspect as run
from small_runs.synthetic import PRESETS

from grpo_replay.lab.inspection.rebuild import what_if
from grpo_replay.lab.inspection.source import open_source

pytestmark = pytest.mark.slow

CHECKS = [
    value
    for name, value in vars(test_summary).items()
    if name.startswith("test_")
    and any(mark.name == "parametrize" for mark in getattr(value, "pytestmark", []))
    and "tmp_path" not in value.__code__.co_varnames[: value.__code__.co_argcount]
]


def train(folder: Path, preset: str, **replay) -> Path:
    """24 steps of 8 prompts of 4, the size of the synthetic runs."""
    settings = {"preset": preset, "capacity_rollouts": 96 if preset == "fifo" else 5000} | replay
    if preset == "fifo":
        settings |= {"ratio": 1.5}
    elif preset == "grpo":
        settings |= {"max_age_steps": 10}
    else:
        settings |= {"warmup_steps": 3, "max_age_steps": settings.get("max_age_steps", 5)}
    words = [f"replay.{key}={value}" for key, value in settings.items()] + [
        "sampling.prompts_per_step=8",
        "sampling.group_size=4",
        "run.steps=24",
        "checkpoint.every_steps=12",
        "eval.benchmarks=[]",
        "tracking.report_to=[]",
    ]
    command = [sys.executable, "-m", "grpo_replay.cli.app", "train", "tiny", "--output-dir", folder]
    for word in words:
        command += ["--set", word]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=os.environ | place, timeout=600, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("real")
    return {preset: train(folder / preset, preset) for preset in PRESETS}


def test_all_checks_of_the_synthetic_runs_are_collected():
    assert len(CHECKS) == 11


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("preset", PRESETS)
def test_numbers_of_a_real_run(real, check, preset):
    presets = next(m.args[1] for m in check.pytestmark if m.name == "parametrize")
    if preset in presets:
        check(real, preset)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_real_run_verifies_and_prints(real, preset, capsys):
    assert run(str(real[preset]), verify=True) == 0
    assert run(str(real[preset])) == 0
    assert "step 24" in capsys.readouterr().out


def test_a_real_rollout_shows_its_prompt(real, capsys):
    run(str(real["ours"]), show=100)
    assert "no tokenizer" not in capsys.readouterr().out


def test_a_run_with_a_shorter_age_matches_the_what_if(real, tmp_path):
    predicted = what_if(open_source(real["ours"]), ["max_age_steps=2"])
    actual = what_if(open_source(train(tmp_path / "run", "ours", max_age_steps=2)), []).logged
    assert actual["age_p95"] == predicted.changed["age_p95"] == 2.0
    assert actual["age_mean"] == pytest.approx(predicted.changed["age_mean"], abs=0.2)
    assert predicted.logged["age_mean"] - actual["age_mean"] > 0.8
    assert actual["stored_mean"] == pytest.approx(predicted.changed["stored_mean"], rel=0.25)
