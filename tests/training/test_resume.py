"""A run that was killed and resumed is the run that was never killed, bit for bit."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slow_tests import slow_except
from small_runs.trained import (
    FinishedRun,
    interrupted,
    same_files,
    same_weights,
    small_recipe,
    train_small_run,
)

from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.storage.run_directory import RunDirectory

PROGRAM = Path(__file__).parents[1] / "support" / "killed_run.py"

RUNS = {
    "ours": {"run": {"steps": 12}, "checkpoint": {"every_steps": 3, "keep": 100}},
    # Everything that has a state or a random stream of its own.
    "every option": {
        "run": {"steps": 12},
        "checkpoint": {"every_steps": 3, "keep": 100},
        "replay": {"preset": "group_std", "warmup_steps": 2, "with_replacement": True},
        "loss": {"beta": 0.05, "kind": "gspo", "aggregation": "sequence_mean"},
        "sampling": {"max_refills": 2},
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 2},
        "model": {"lora": {"r": 4, "lora_dropout": 0.2}},
        "engine": {"zero_stage": 3},
    },
}


def kill(folder: Path, sections: dict) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), "8", json.dumps(sections)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


@pytest.fixture(scope="module", params=slow_except(["ours"], RUNS))
def runs(request, tmp_path_factory, processes) -> tuple[FinishedRun, FinishedRun]:
    """(never killed, killed after step 8 and resumed from the checkpoint of step 6). The quick one
    dies of an exception, the slow one of SIGKILL."""
    folder, sections = tmp_path_factory.mktemp("resume"), RUNS[request.param]
    if request.param == "ours":
        interrupted(folder / "killed", 8, **sections)
    else:
        kill(folder / "killed", sections)
    assert len(FinishedRun(folder / "killed", None).metrics) == 8
    assert (folder / "killed/checkpoints/latest").resolve().name == "step_000006"
    if request.param == "ours":
        whole = request.getfixturevalue("ours_run")
        assert whole.recipe == small_recipe(**sections)
    else:
        whole = train_small_run(folder / "whole", **sections)
    return whole, train_small_run(folder / "killed", resume=True, **sections)


def test_metrics_have_no_gap_no_duplicate_and_the_same_numbers(runs):
    whole, resumed = runs
    assert [line["step"] for line in resumed.metrics] == list(range(1, 13))
    assert resumed.timeless_metrics == whole.timeless_metrics
    assert len(whole.timeless_metrics[0]) > 35


def test_rollouts_and_draws_are_the_same(runs):
    whole, resumed = runs
    assert same_files(whole.path, resumed.path, "rollouts") == 12
    assert same_files(whole.path, resumed.path, "draws") == 12
    assert len(resumed.all_draws) > 10


def test_weights_and_buffer_are_the_same(runs):
    whole, resumed = runs
    assert same_weights(whole.weights(12), resumed.weights(12))
    assert same_weights(whole.weights(6), resumed.weights(6))
    assert not same_weights(whole.weights(6), whole.weights(9))
    a, b = whole.snapshot(12).state, resumed.snapshot(12).state
    for name in ("priority", "times_used", "last_used_step"):
        assert a[name].tobytes() == b[name].tobytes()
    assert a["evicted_at"] == b["evicted_at"]
    rollouts = whole.snapshot(12).rollouts, resumed.snapshot(12).rollouts
    assert len(rollouts[0]) == len(rollouts[1]) > 10
    for one, other in zip(*rollouts, strict=True):
        assert one.rollout_id == other.rollout_id
        assert one.behavior_logprobs.tobytes() == other.behavior_logprobs.tobytes()


def test_counters_are_the_same(runs):
    states = []
    for run in runs:
        state = json.loads((run.path / "checkpoints/latest/state.json").read_text())
        del state["wall_seconds"]
        states.append(state)
    assert states[0] == states[1]
    assert states[0]["policy_version"] == states[0]["step"] == 12
    assert states[0]["prompt_cursor"] >= 12 * 6


def test_a_resumed_run_passes_the_independent_recomputation(runs):
    assert verify_run(runs[1].path).passed


def test_two_runs_of_one_process_do_not_write_into_each_other_s_log(tmp_path):
    logger = logging.getLogger("grpo_replay.test")
    first, second = RunDirectory(tmp_path / "first"), RunDirectory(tmp_path / "second")
    for run_dir in (first, second):
        (run_dir.path / "log").mkdir(parents=True)
        run_dir.open_log(1)
        logger.info("written while %s ran", run_dir.path.name)
    texts = [(d.path / "log/attempt_001.log").read_text() for d in (first, second)]
    assert "while first ran" in texts[0] and "while second ran" not in texts[0]
    assert "while second ran" in texts[1]
