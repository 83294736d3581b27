"""A run says when it would be killed before it could write its last checkpoint."""

import logging
import math

import pytest
from small_runs.trained import train_small_run

from grpo_replay.distributed.failures import LAUNCH_FOLDER_VARIABLE
from grpo_replay.training.stop_grace import grace_seconds, notice_of_grace

SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
         "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n1"}  # fmt: skip
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "x",
            "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "r"}  # fmt: skip


@pytest.mark.parametrize(
    "environment, setting, grace",
    [
        ({}, None, math.inf),
        (SLURM, None, 30.0),
        (SLURM, 600.0, 600.0),
        (TORCHRUN, None, 30.0),
        (TORCHRUN | {LAUNCH_FOLDER_VARIABLE: "/tmp/x"}, None, math.inf),
    ],
    ids=["alone", "Slurm", "Slurm with a longer grace", "torchrun", "our launcher"],
)
def test_the_grace_is_the_recipes_or_the_launchers(monkeypatch, environment, setting, grace):
    for name in ("WORLD_SIZE", LAUNCH_FOLDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert grace_seconds(setting) == grace


def test_a_grace_that_is_too_short_is_told_with_what_to_ask_for():
    assert notice_of_grace(30.0, 20.0, 10.0) is None
    notice = notice_of_grace(30.0, 200.0, 70.0)
    assert "(200 s at most so far)" in notice and "(70 s)" in notice
    assert "#SBATCH --signal=TERM@540" in notice


def test_a_run_tells_it_once_after_its_first_checkpoint(tmp_path, processes, caplog):
    with caplog.at_level(logging.WARNING, "grpo_replay.training.run"):
        train_small_run(
            tmp_path / "run",
            run={"steps": 3, "stop_grace_seconds": 0.001},
            checkpoint={"every_steps": 1},
            replay={"preset": "grpo"},
        )
    told = [each.message for each in caplog.records if "SIGKILL" in each.message]
    assert len(told) == 1
