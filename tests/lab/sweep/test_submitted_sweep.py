"""Cells as jobs: submitit's local executor, and its Slurm executor on stand-ins for Slurm's
commands. The trainer is a stand-in too, except in the slow test."""

import json
import os
import re
import signal
import subprocess
import sys

import fake_slurm
import psutil
import pytest
from fake_sweep import CELLS, Sweep, words_of

from grpo_replay.cli.sweep_command import SweepOptions, run
from grpo_replay.errors import UsageError
from grpo_replay.lab.sweep.submitting import read_options

pytest.importorskip("submitit")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake_slurm.install(tmp_path / "bin")
    (tmp_path / "jobs").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "jobs"))
    yield tmp_path / "jobs"
    for process in psutil.process_iter():
        if str(tmp_path) in words_of(process):
            process.kill()


def finished(sweep: Sweep) -> bool:
    return all(sweep.steps(cell) == list(range(1, 26)) for cell in CELLS)


@pytest.mark.slow
def test_jobs_of_the_local_executor_outlive_the_sweep_and_the_next_one_follows_them(tmp_path):
    sweep = Sweep(tmp_path, **{cell: {"hold": True} for cell in CELLS})
    process = sweep.start(2, "--executor", "submitit-local")
    sweep.wait_for_steps("grpo/seed-5", "ours/seed-5")
    process.kill()
    process.wait()
    assert len(sweep.cell_processes()) == 2
    code, err = sweep.run(2)
    assert code == 3 and "grpo/seed-5 was submitted as submitit-local job" in err
    process = sweep.start(2, "--executor", "submitit-local")
    told = sweep.wait_for_line(process, "running grpo/seed-5")
    assert "left by an earlier sweep, submitit-local job" in told
    sweep.behave({})
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert finished(sweep)
    assert [len(sweep.commands(cell)) for cell in CELLS] == [1, 1, 1, 1]
    assert list(sweep.out.rglob("*.job")) == []


@pytest.mark.slow
def test_a_job_that_fails_is_reported_with_the_message_of_its_cell(tmp_path):
    sweep = Sweep(tmp_path, **{"ours/seed-5": {"fail": "no such file"}})
    code, err = sweep.run(2, "--executor", "submitit-local")
    assert code == 3
    assert "failed: ours/seed-5: no such file" in err


@pytest.mark.slow
def test_slurm_runs_all_cells_and_a_job_out_of_time_is_checkpointed_and_requeued(tmp_path, slurm):
    sweep = Sweep(tmp_path, **{"ours/seed-5": {"hold": True}})
    options = ("--executor", "slurm", "--executor-option", "time=60")
    process = sweep.start(None, *options, "--executor-option", "partition=gpu")
    sweep.wait_for_steps("ours/seed-5")
    job = json.loads((sweep.out / "log/ours/seed-5.log.job").read_text())
    script = (slurm / f"{job['job_id']}.sh").read_text()
    assert "#SBATCH --time=60" in script and "#SBATCH --partition=gpu" in script
    assert "#SBATCH --job-name=ours/seed-5" in script and "--signal=USR2@90" in script
    sweep.behave({})
    worker = json.loads((slurm / f"{job['job_id']}.json").read_text())
    (python,) = [p for p in psutil.Process(worker).children() if "submitit" in words_of(p)]
    python.send_signal(signal.SIGUSR2)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert finished(sweep)
    assert [len(sweep.commands(cell)) for cell in CELLS] == [1, 2, 1, 1]
    assert "train --resume" in sweep.commands("ours/seed-5")[1]


@pytest.mark.slow
def test_ctrl_c_leaves_the_jobs_of_slurm_in_the_queue(tmp_path, slurm):
    sweep = Sweep(tmp_path, **{cell: {"hold": True} for cell in CELLS})
    options = ("--executor", "slurm", "--executor-option", "time=60")
    process = sweep.start(None, *options)
    sweep.wait_for_steps(*CELLS)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "4 jobs go on without the sweep" in err
    assert len(sweep.cell_processes()) == 4
    sweep.behave({})
    code, err = sweep.run(None, *options)
    assert code == 0, err
    assert finished(sweep) and [len(sweep.commands(cell)) for cell in CELLS] == [1, 1, 1, 1]


def test_slurm_scripts_are_printed_without_slurm(tmp_path):
    sweep = Sweep(tmp_path)
    options = ("--executor", "slurm", "--executor-option", "time=60", "--print")
    process = sweep.start(None, *options, "--executor-option", "gpus_per_node=4")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    scripts = re.split(r"mkdir -p \S+ && sbatch <<'END'\n", out)[1:]
    assert len(scripts) == 4
    for script, cell in zip(scripts, CELLS, strict=True):
        assert script.startswith("#!/bin/bash") and script.endswith("\nEND\n")
        assert f"#SBATCH --job-name={cell}\n" in script and "#SBATCH --gpus-per-node=4" in script
        assert "#SBATCH --signal=TERM@90" in script
        assert "grpo-replay train tiny --set run.steps=25" in script
        assert f"--output-dir {sweep.out / cell}\n" in script
    assert not sweep.out.exists()


def test_bad_options_are_refused_before_anything_is_started(tmp_path):
    with pytest.raises(UsageError, match="needs --executor-option time=MINUTES"):
        read_options("slurm", ["partition=gpu"])
    with pytest.raises(UsageError, match="'time': expected key=value"):
        read_options("slurm", ["time"])
    sweep, time = Sweep(tmp_path), ("time=3",)
    for told, options in {
        r"--executor slrum .did you mean 'slurm'": {"executor": "slrum"},
        "--executor-option needs --executor": {"executor_options": time},
        'Could not detect "srun"': {"executor": "slurm", "executor_options": time},
        "tiem": {"executor": "slurm", "executor_options": (*time, "tiem=3"),
                 "print_commands": True},
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=told):
            run(SweepOptions(str(sweep.file), output_dir=str(sweep.out), **options))
        assert not sweep.out.exists()


def test_submitit_that_is_not_installed_is_named(tmp_path):
    code = (
        "import sys; sys.modules['submitit'] = None\n"
        "from grpo_replay.lab.sweep.submitting import import_submitit\n"
        "import_submitit('slurm')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "--executor slurm needs submitit: pip install 'grpo-replay[sweep]'" in done.stderr
