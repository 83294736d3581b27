"""The CUDA path as far as a CPU shows it: DeepSpeed's accelerator is `cuda`, and torch.cuda answers
as on a machine with one GPU and no CUDA toolkit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_replay.engine.processes import choose_device
from grpo_replay.errors import LaunchError
from grpo_replay.recipe import EngineSection

PROGRAM = Path(__file__).parents[1] / "support" / "cuda_program.py"


def run_program(**variables: str) -> subprocess.CompletedProcess[str]:
    repository = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": repository, "HF_HUB_OFFLINE": "1"} | variables
    environment.pop("CUDA_HOME", None)
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_joining_prints_nothing_and_sets_every_time_out():
    """Without a toolkit DeepSpeed would print a warning for every operator to stdout, where --json
    belongs, and its own group would wait as long as torch's default."""
    seen = run_program(DS_ACCELERATOR="cuda")
    assert seen.stdout == ""
    assert json.loads(seen.stderr.splitlines()[-1]) == {"timeout_seconds": 77.0}


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch):
    cuda, auto = EngineSection(device="cuda"), EngineSection(device="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchError, match=r"sees 0: .* driver 580 or newer"):
        choose_device(cuda, 0)
    assert choose_device(auto, 0) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(auto, 1) == choose_device(cuda, 1) == torch.device("cuda", 1)
    with pytest.raises(LaunchError, match=r"local rank 2 needs GPU 2, and .* sees 2"):
        choose_device(cuda, 2)
    assert choose_device(EngineSection(device="cpu"), 2) == torch.device("cpu")
