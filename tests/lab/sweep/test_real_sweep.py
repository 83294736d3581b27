"""A sweep of real runs on the tiny model, interrupted once and killed with SIGKILL afterwards: the
sweep and a run. It ends as the same sweep whose printed commands ran undisturbed."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from small_runs.trained import FinishedRun

from grpo_replay.lab.verification.verify import verify_run

ROOT = Path(__file__).resolve().parents[3]

SWEEP = """
name: real
recipe: tiny
set:
  - run.steps=12
  - sampling.prompts_per_step=4
  - replay.warmup_steps=2
  - batch.max_tokens_per_microbatch=200
  - eval.max_problems=2
  - eval.samples=1
  - eval.greedy=false
  - eval.every_steps=12
  - checkpoint.every_steps=2
  - "tracking.report_to=[]"
arms: {grpo: [replay.preset=grpo], ours: [replay.preset=ours]}
seeds: [5]
"""
ENV = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
CELLS = ("grpo/seed-5", "ours/seed-5")


@pytest.fixture
def start(tmp_path):
    """Starts `grpo-replay sweep`; what is left at the end is killed."""
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    started = []

    def launch(folder: str, *options: str) -> subprocess.Popen[str]:
        words = ["sweep", str(tmp_path / "sweep.yaml"), "--output-dir", str(tmp_path / folder)]
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_replay", *words, *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=ENV,
        )  # fmt: skip
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=280)
    return process.returncode, out, err


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while True:
        path = run / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= step:
            return
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def process_of(folder: Path) -> psutil.Process:
    """The process that trains in a folder, from its lock."""
    return psutil.Process(int((folder / ".lock").read_text().split()[0]))


@pytest.mark.slow
def test_a_sweep_killed_with_one_of_its_runs_and_continued_is_what_its_printed_commands_do(
    start, tmp_path
):
    out = tmp_path / "killed"
    process = start("killed", "--jobs", "2")
    wait_for_step(out / "ours/seed-5", 1, process)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert (out / "ours/seed-5/checkpoints/latest").exists()
    done = len((out / "ours/seed-5/metrics.jsonl").read_text().splitlines())

    process = start("killed", "--jobs", "2")
    wait_for_step(out / "ours/seed-5", done + 1, process)
    run = process_of(out / "ours/seed-5")
    other = process_of(out / "grpo/seed-5")
    run.kill()
    process.send_signal(signal.SIGKILL)
    process.wait()
    other.wait(timeout=200)  # the kernel told it; it finishes its step
    assert not (out / "ours/seed-5/summary.json").exists()

    code, stdout, err = finish(start("killed", "--jobs", "2"))
    assert code == 0, err
    assert "2 cells: 2 done" in stdout
    _, printed, _ = finish(start("whole", "--print"))
    for line in printed.splitlines():
        words = shlex.split(line)
        assert words[0] == "grpo-replay"
        subprocess.run([sys.executable, "-m", "grpo_replay", *words[1:]], check=True, env=ENV)
    for cell in CELLS:
        ours, theirs = (FinishedRun(tmp_path / name / cell, None) for name in ("killed", "whole"))
        assert ours.timeless_metrics == theirs.timeless_metrics
        assert [row["step"] for row in ours.metrics] == list(range(1, 13))
        assert verify_run(ours.path).passed
    log = (out / "log/ours/seed-5.log").read_text()
    assert log.count("# process ") == 3 and "--resume" in log

    code, stdout, err = finish(start("killed", "--print"))
    assert (code, stdout) == (0, "")
